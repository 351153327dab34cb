"""The sizes of an engine: how many sequences, tokens, pages and snapshots, of what shape, and padded to what."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.models.caches import Buffer, CacheLayout, CacheSpec, Paged, PerSlot, parts_of
from jaxllm.models.layers.host_experts import ExpertPlaces, with_places
from jaxllm.models.options import Stage


def held_caches(caches: Sequence[CacheSpec], stage: Stage | None) -> tuple[CacheSpec, ...]:
    """The caches of each layer on the devices of a stage: nothing, where another stage has it."""
    return tuple(spec if stage is None or index in stage.layers else None for index, spec in enumerate(caches))


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most that an engine does at once, and remembers."""

    max_num_seqs: int
    max_num_batched_tokens: int
    decode_steps: int
    """Most tokens that a decode gives each of its rows."""
    max_model_len: int
    page_size: int
    num_pages: int
    num_snapshots: int
    """Of what layers keep of a sequence besides pages, as many can be kept of cached prefixes."""
    most_ahead: int = 0
    """Most tokens that a decode tries ahead with each of its sequences."""
    ahead_by_rows: tuple[tuple[int, int], ...] = ()
    """(rows, most): a step that is padded to that many sequences has room for `most` instead."""

    def ahead(self, rows: int) -> int:
        """Most tokens that a decode padded to `rows` sequences tries ahead with each of them."""
        return dict(self.ahead_by_rows).get(rows, self.most_ahead)

    @property
    def num_slot_rows(self) -> int:
        """Rows of buffers that have one for each slot: then one for padding, and one for each snapshot."""
        return self.max_num_seqs + 1 + self.num_snapshots


@dataclass(frozen=True, kw_only=True)
class StepSizes(Limits):
    """The sizes that every step shares."""

    caches: tuple[CacheSpec, ...]
    """Each layer's caches of earlier tokens."""
    cache_layout: CacheLayout
    hidden_size: int
    vocab_size: int
    dtype: Any
    further_caches: tuple[CacheSpec, ...] = ()
    """The caches, beside those of the model, of another model that runs in the same steps."""
    expert_places: tuple[ExpertPlaces | None, ...] = ()
    """Each layer's buffers of its places for experts in host memory; they follow its caches of tokens."""
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
    def keeps_by_slot(self) -> bool:
        """Some layer keeps something of each sequence besides pages."""
        return any(isinstance(spec, PerSlot) for spec in parts_of(self.caches))

    @property
    def buffers(self) -> tuple[tuple[Buffer, ...], ...]:
        """The buffers of each layer, over all devices; those of another model come last."""
        specs = (*held_caches(self.caches, self.stage), *self.further_caches)
        return tuple(self.cache_layout.buffers(spec, self.num_pages, self.num_slot_rows) for spec in specs)

    @property
    def layers(self) -> tuple[Any, ...]:
        """The buffers of each layer, and after them its places for experts, as a step finds them."""
        buffers = self.buffers
        return with_places(buffers, (*self.expert_places, *[None] * (len(buffers) - len(self.expert_places))))

    @property
    def is_paged(self) -> tuple[bool, ...]:
        """For each buffer, layer after layer: it has a row for each page; others have one for each slot."""
        layout = self.cache_layout
        parts = parts_of((*held_caches(self.caches, self.stage), *self.further_caches))
        return tuple(isinstance(part, Paged) for part in parts for _ in layout.buffers(part, 1, 1))

    def buffers_of(self, paged: bool) -> list[Buffer]:
        """The buffers that have a row for each page, or the others, which have one for each slot."""
        buffers = [buffer for layer in self.buffers for buffer in layer]
        return [buffer for buffer, has_pages in zip(buffers, self.is_paged, strict=True) if has_pages == paged]


SMALLEST_PREFILL = 16


@dataclass(frozen=True)
class Buckets:
    """Padded sizes of each kind of step, ascending: decodes by sequences, the backbone by tokens, the head by rows.

    An encoder has no decodes, and a head only if it classifies.
    """

    decode: tuple[int, ...]
    prefill: tuple[int, ...]
    head: tuple[int, ...]

    @property
    def encodes(self) -> bool:
        """These are an encoder's."""
        return not self.decode

    @classmethod
    def of_encoder(
        cls, max_num_seqs: int, max_num_batched_tokens: int, prefill: Collection[int] | None, *, classifies: bool
    ) -> Buckets:
        """Those of an encoder. Raises ConfigError: a size is beyond its limits."""
        rows = (max_num_seqs,) if classifies else ()
        return cls((), _token_sizes(prefill, max_num_batched_tokens), rows)

    @classmethod
    def build(
        cls,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        *,
        smallest_rows: int = 1,
        decode: Collection[int] | None = None,
        prefill: Collection[int] | None = None,
    ) -> Buckets:
        """The sizes asked for up to each limit, by default powers of two, and the limit itself.

        Args:
            smallest_rows: of a decode.

        Raises:
            ConfigError: a size is beyond its limits.
        """
        rows, tokens = max(max_num_seqs, smallest_rows), max_num_batched_tokens
        if decode and min(decode) < smallest_rows:
            raise ConfigError(f"decode_buckets holds {min(decode)}: at least {smallest_rows} on this platform")
        by_rows = _sizes("decode_buckets", decode, smallest_rows, rows, "max_num_seqs")
        return cls(by_rows, _token_sizes(prefill, tokens), by_rows)


def _token_sizes(prefill: Collection[int] | None, limit: int) -> tuple[int, ...]:
    return _sizes("prefill_buckets", prefill, min(SMALLEST_PREFILL, limit), limit, "max_num_batched_tokens")


def _sizes(name: str, chosen: Collection[int] | None, first: int, limit: int, of: str) -> tuple[int, ...]:
    if chosen is None:
        return powers_of_two(first, limit)
    if chosen and max(chosen) > limit:
        raise ConfigError(f"{name} holds {max(chosen)}: at most {of}, which is {limit}")
    return tuple(sorted({*chosen, limit}))


def powers_of_two(first: int, last: int) -> tuple[int, ...]:
    """`first`, doubled until it would pass `last`, and `last`.

    Worked example: `powers_of_two(2, 24)` is `(2, 4, 8, 16, 24)`.
    """
    sizes = [first]
    while sizes[-1] * 2 <= last:
        sizes.append(sizes[-1] * 2)
    if sizes[-1] < last:
        sizes.append(last)
    return tuple(sizes)


def smallest_covering(sizes: tuple[int, ...], needed: int) -> int:
    """The smallest of the ascending `sizes` that holds `needed`."""
    return next(size for size in sizes if size >= needed)
