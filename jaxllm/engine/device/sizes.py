"""The sizes of an engine: how many sequences, tokens, pages and states, and of what shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxllm.models.caches import Buffer, CacheLayout, CacheSpec, PerSlot


@dataclass(frozen=True)
class NgramDrafts:
    """How drafts are found in a sequence's own text: `num_tokens` of them behind a match of `shortest` to `longest`."""

    num_tokens: int
    shortest: int
    longest: int


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
    drafts: NgramDrafts | None = None
    """How a decode looks for tokens to try ahead; it tries none without."""

    @property
    def num_drafts(self) -> int:
        """Most tokens that a decode tries ahead with each of its rows."""
        return self.drafts.num_tokens if self.drafts is not None else 0

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

    @property
    def pages_per_seq(self) -> int:
        return -(-self.max_model_len // self.page_size)

    @property
    def has_states(self) -> bool:
        """Whether some layer keeps a state of each sequence."""
        return any(isinstance(spec, PerSlot) for spec in self.caches)

    @property
    def buffers(self) -> tuple[tuple[Buffer, ...], ...]:
        """Those of each layer, over all devices."""
        return tuple(self.cache_layout.buffers(spec, self.num_pages, self.num_states) for spec in self.caches)
