"""Whole rows of logits, which are computed where somebody looks at them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

CHUNK = 256
"""Rows that are looked at together while iterating."""


class LogitRows:
    """The logits after each token of a prompt, as if `[T, V]` float32: `rows[5]`, `rows[-3:]`, `np.asarray(rows)`.

    What it keeps are the states that they are made of, `[T, E]`. Iterating gives row after row, and has a few hundred
    of them in memory at a time.
    """

    def __init__(self, states: np.ndarray, unembed: Callable[[np.ndarray], np.ndarray], vocab_size: int):
        self.states = states
        self.shape = (len(states), vocab_size)
        self._unembed = unembed

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index: Any) -> np.ndarray:
        return self._unembed(self.states[index])

    def __iter__(self) -> Iterator[np.ndarray]:
        for chunk in self.chunks():
            yield from chunk

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or np.float32, copy=False)

    def __repr__(self) -> str:
        return f"LogitRows(shape={self.shape})"

    def chunks(self, rows: int = CHUNK) -> Iterator[np.ndarray]:
        """`[rows, V]` after `[rows, V]`; the last may be shorter."""
        for start in range(0, len(self), rows):
            yield self[start : start + rows]
