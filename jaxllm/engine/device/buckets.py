"""The shapes that steps are padded to."""

from __future__ import annotations

from dataclasses import dataclass

SMALLEST_ROWS = 2
"""One row would leave XLA:CPU's fast matrix product."""
SMALLEST_PREFILL = 16


@dataclass(frozen=True)
class Buckets:
    """Padded sizes of each kind of step, ascending: decodes by sequences, the backbone by tokens, the head by rows."""

    decode: tuple[int, ...]
    prefill: tuple[int, ...]
    head: tuple[int, ...]

    @classmethod
    def build(cls, max_num_seqs: int, max_num_batched_tokens: int) -> Buckets:
        """Powers of two up to each limit, and the limit itself."""
        rows = powers_of_two(SMALLEST_ROWS, max(max_num_seqs, SMALLEST_ROWS))
        return cls(rows, powers_of_two(min(SMALLEST_PREFILL, max_num_batched_tokens), max_num_batched_tokens), rows)


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
