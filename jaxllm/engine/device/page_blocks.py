"""Pages of all layers as the host keeps them, one array of bytes each, and as steps give and take them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np

from jaxllm.engine.device.sizes import StepSizes


class PageBlocks:
    """How one page's parts, one of each layer's buffers, lie behind one another."""

    def __init__(self, sizes: StepSizes):
        self._parts = [(buffer.shape[1:], buffer.dtype) for buffer in sizes.paged_buffers]
        self._ends = np.cumsum([math.prod(shape) * dtype.itemsize for shape, dtype in self._parts]).tolist()
        self.nbytes: int = self._ends[-1] if self._ends else 0
        """What a page takes, over all devices."""

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
