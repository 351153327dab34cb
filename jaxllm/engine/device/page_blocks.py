"""Pages and states of all layers as the host keeps them, one array of bytes each, and as steps give and take them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np

from jaxllm.models.caches import Buffer


class PageBlocks:
    """How the parts of one page, or of one state, lie behind one another: a row of each layer's buffers."""

    def __init__(self, buffers: Sequence[Buffer]):
        """`buffers` are those that have such a row."""
        self._parts = [(buffer.shape[1:], buffer.dtype) for buffer in buffers]
        self._ends = np.cumsum([math.prod(shape) * dtype.itemsize for shape, dtype in self._parts]).tolist()
        self.nbytes: int = self._ends[-1] if self._ends else 0
        """What a page, or a state, takes over all devices."""

    def split(self, arrays: Sequence[jax.Array], count: int) -> list[np.ndarray]:
        """The first `count` pages of what a step gave, each uint8 `[nbytes]`; waits for it."""
        pages = [np.empty(self.nbytes, np.uint8) for _ in range(count)]
        for array, end, (shape, dtype) in zip(arrays, self._ends, self._parts, strict=True):
            rows = np.asarray(array).reshape(len(array), -1).view(np.uint8)
            begin = end - math.prod(shape) * dtype.itemsize
            for page, row in zip(pages, rows, strict=False):
                page[begin:end] = row
        return pages

    def join(self, pages: Sequence[np.ndarray], size: int) -> list[np.ndarray]:
        """What a step takes for pages of the host's, padded to `size` of them: an array of each buffer."""
        rows = np.zeros((size, self.nbytes), np.uint8)
        for row, page in zip(rows, pages, strict=False):
            row[:] = page
        begins = [0, *self._ends]
        return [
            np.ascontiguousarray(rows[:, begin:end]).view(dtype).reshape(size, *shape)
            for begin, end, (shape, dtype) in zip(begins, self._ends, self._parts, strict=False)
        ]
