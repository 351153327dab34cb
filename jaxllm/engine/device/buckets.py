"""The shapes that steps are padded to."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from jaxllm.errors import ConfigError

SMALLEST_PREFILL = 16
COPIED_PAGES = (4, 32)
"""More are copied in several steps."""
COPIED_STATES = (1,)
"""The same of states, each of which may be as large as a thousand pages."""


@dataclass(frozen=True)
class Buckets:
    """Padded sizes of each kind of step, ascending: decodes by sequences, the backbone by tokens, the head by rows.

    An encoder has no decodes, and a head only if it classifies.
    """

    decode: tuple[int, ...]
    prefill: tuple[int, ...]
    head: tuple[int, ...]
    drafts: bool = False
    """Decodes try tokens ahead."""
    adapted: bool = False
    """There are decodes and backbones that add what adapters give."""
    recalls: bool = False
    """Drafts are looked for in other texts as well as in a sequence's own."""
    pages: tuple[int, ...] = ()
    """Pages that are copied to the host or from there at once; none where the host keeps none."""
    states: tuple[int, ...] = ()
    """The same of states of prefixes."""

    @property
    def encodes(self) -> bool:
        """Whether these are an encoder's."""
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
        drafts: bool = False,
        adapted: bool = False,
        recalls: bool = False,
        offloads_pages: bool = False,
        offloads_states: bool = False,
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
        pages, states = COPIED_PAGES if offloads_pages else (), COPIED_STATES if offloads_states else ()
        return cls(by_rows, _token_sizes(prefill, tokens), by_rows, drafts, adapted, recalls, pages, states)


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
