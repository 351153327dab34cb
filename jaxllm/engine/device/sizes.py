"""The sizes of an engine: how many sequences, tokens, pages and states, and of what shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxllm.engine.offload.cache_rows import RowKind
from jaxllm.models.caches import Buffer, CacheLayout, CacheSpec, Paged, PerSlot, parts_of
from jaxllm.models.layers.host_experts import ExpertPlaces, with_places
from jaxllm.models.options import AdapterSizes, Stage
from jaxllm.requests.captures import TAPPED


@dataclass(frozen=True)
class NgramDrafts:
    """How drafts are found in texts: `num_tokens` of them behind a match of `shortest` to `longest` tokens.

    They are looked for in a sequence's own text, and in the last `remembered` tokens of other texts: answers that were
    predicted, and with `remembers_answers` those that were given.
    """

    num_tokens: int
    shortest: int
    longest: int
    remembered: int = 0
    remembers_answers: bool = False
    by_rows: tuple[tuple[int, int], ...] = ()
    """(rows, most): a step that is padded to so many sequences has room for `most` drafts instead of `num_tokens`."""


@dataclass(frozen=True)
class ModelDrafts:
    """A draft model finds up to `num_tokens` drafts; for `by_rows` see `NgramDrafts`."""

    num_tokens: int
    by_rows: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class ModuleDrafts:
    """A module that reads the model's states finds up to `num_tokens` drafts; for `by_rows` see `NgramDrafts`.

    It reads the states in front of `layers`, or without any the last hidden states, and makes `size` numbers of them.
    """

    num_tokens: int
    layers: tuple[int, ...] = ()
    size: int = 0
    by_rows: tuple[tuple[int, int], ...] = ()


Drafts = NgramDrafts | ModelDrafts | ModuleDrafts


def with_rows(drafts: Drafts, rows: int) -> Drafts:
    """Those of a step that is padded to `rows` sequences."""
    return replace(drafts, num_tokens=dict(drafts.by_rows).get(rows, drafts.num_tokens))


def held_caches(caches: Sequence[CacheSpec], stage: Stage | None) -> tuple[CacheSpec, ...]:
    """What each layer keeps on the devices of a stage: nothing, where another stage has it."""
    return tuple(spec if stage is None or index in stage.layers else None for index, spec in enumerate(caches))


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much an engine does at once, and remembers."""

    max_num_seqs: int
    max_num_batched_tokens: int
    decode_steps: int
    """Most tokens that a decode gives each of its rows."""
    max_model_len: int
    page_size: int
    num_pages: int
    num_snapshots: int
    """States of cached prefixes that can be kept, where layers keep a state of each sequence."""
    drafts: Drafts | None = None
    """How a decode looks for tokens to try ahead; it tries none without."""
    adapters: AdapterSizes | None = None
    """How many adapters are on the devices at once, and how large; None where there are none."""

    def num_drafts(self, rows: int) -> int:
        """Most tokens that a decode padded to `rows` sequences tries ahead with each of them."""
        return with_rows(self.drafts, rows).num_tokens if self.drafts is not None else 0

    @property
    def remembered(self) -> int:
        """How many tokens of other texts drafts are looked for in."""
        return self.drafts.remembered if isinstance(self.drafts, NgramDrafts) else 0

    @property
    def remembers_answers(self) -> bool:
        """Whether the answers of earlier requests are among those texts."""
        return isinstance(self.drafts, NgramDrafts) and self.drafts.remembers_answers

    @property
    def adapter_places(self) -> int:
        """How many adapters are on the devices at once."""
        return self.adapters.places if self.adapters is not None else 0

    @property
    def num_states(self) -> int:
        """Rows of the buffers of states: one for each slot, one for padding, and behind them one for each snapshot."""
        return self.max_num_seqs + 1 + self.num_snapshots


@dataclass(frozen=True, kw_only=True)
class StepSizes(Limits):
    """The sizes that every step shares."""

    caches: tuple[CacheSpec, ...]
    """What each layer keeps of earlier tokens."""
    cache_layout: CacheLayout
    hidden_size: int
    vocab_size: int
    dtype: Any
    widest_activation: int
    """Numbers of a token that the largest activation has which a layer may give."""
    draft_caches: tuple[CacheSpec, ...] = ()
    """What each layer of a draft model keeps, in pages beside those of the model."""
    expert_places: tuple[ExpertPlaces | None, ...] = ()
    """Of each layer the buffers of its places for experts in host memory, behind what it keeps of tokens."""
    stage: Stage | None = None
    """The layers that run on these devices; None is all of them. What a step is sent is the same for all stages."""

    @property
    def pages_per_seq(self) -> int:
        return -(-self.max_model_len // self.page_size)

    @property
    def num_slots(self) -> int:
        """Sequences that something is kept of between steps: none in an encoder."""
        return self.max_num_seqs if any(spec is not None for spec in self.caches) else 0

    @property
    def has_states(self) -> bool:
        """Whether some layer keeps a state of each sequence."""
        return any(isinstance(spec, PerSlot) for spec in parts_of(self.caches))

    @property
    def kept_hidden(self) -> int:
        """Numbers that are kept of each sequence's last state, where drafts are made of it; else 0."""
        return self.drafts.size if isinstance(self.drafts, ModuleDrafts) else 0

    @property
    def taps(self) -> tuple[int, int]:
        """The shape of what a step that records activations is told: of each layer, and of the last norm, where each
        of its activations goes.
        """
        return len(self.caches) + 1, len(TAPPED)

    @property
    def buffers(self) -> tuple[tuple[Buffer, ...], ...]:
        """Those of each layer, over all devices; a draft model's come last."""
        specs = (*held_caches(self.caches, self.stage), *self.draft_caches)
        return tuple(self.cache_layout.buffers(spec, self.num_pages, self.num_states) for spec in specs)

    @property
    def layers(self) -> tuple[Any, ...]:
        """Those of each layer, and behind them its places for experts, as a step finds them."""
        buffers = self.buffers
        return with_places(buffers, (*self.expert_places, *[None] * (len(buffers) - len(self.expert_places))))

    @property
    def is_paged(self) -> tuple[bool, ...]:
        """Of each buffer, layer after layer, whether it has a row for each page; others have one for each state."""
        layout = self.cache_layout
        parts = parts_of((*held_caches(self.caches, self.stage), *self.draft_caches))
        return tuple(isinstance(part, Paged) for part in parts for _ in layout.buffers(part, 1, 1))

    def buffers_of(self, kind: RowKind) -> list[Buffer]:
        """Those that have a row for each page, or for each state."""
        buffers = [buffer for layer in self.buffers for buffer in layer]
        return [buffer for buffer, paged in zip(buffers, self.is_paged, strict=True) if paged == (kind == "page")]
