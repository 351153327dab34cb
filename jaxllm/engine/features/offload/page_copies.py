"""Pages and states that are copied between the devices and the host, some at a time, and what they are there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxllm.engine.core.device import Device
from jaxllm.engine.core.feature import Built
from jaxllm.engine.core.keys import Key, Kind
from jaxllm.engine.core.sizes import StepSizes, smallest_covering
from jaxllm.engine.core.step import StepFunctions
from jaxllm.engine.features.offload.host_pages import ROW_KINDS, CacheRow, Digest, Page, RowKind
from jaxllm.models.caches import Buffer

T = TypeVar("T")

SIZES: dict[RowKind, tuple[int, ...]] = {"page": (4, 32), "state": (1,)}
"""How many are copied at once; more in several steps. A state may be as large as a thousand pages."""


class LeavingPages(NamedTuple):
    """Pages, or states, on their way to the host, and what they are called there."""

    digests: list[Digest]
    arrays: Any
    """Of each buffer as many rows, or more."""
    blocks: PageBlocks

    def contents(self) -> list[Page]:
        """The pages, once they have arrived."""
        return self.blocks.split(self.arrays, len(self.digests))


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


class PageCopies:
    """Nothing waits for a copy here: it is enqueued among the steps."""

    def __init__(self, device: Device, sizes: StepSizes):
        self._device = device
        self._blocks: dict[RowKind, PageBlocks] = {
            kind: PageBlocks(sizes.buffers_of(paged=kind == "page")) for kind in ROW_KINDS
        }
        self._padding: dict[RowKind, int] = {"page": 0, "state": sizes.max_num_seqs}
        """The rows of padding."""

    def read(self, rows: list[tuple[CacheRow, Digest]]) -> list[LeavingPages]:
        """Copy pages and states to the host."""
        found = []
        for kind, some in _parts_of(rows):
            key = _key("copy_out", kind, len(some))
            arrays = self._device.run(key, self._numbers(kind, some, key.size))
            for array in arrays:
                array.copy_to_host_async()
            found.append(LeavingPages([digest for _, digest in some], arrays, self._blocks[kind]))
        return found

    def write(self, rows: list[tuple[CacheRow, Page]]) -> None:
        """Fill pages and states with what the host has."""
        for kind, some in _parts_of(rows):
            key = _key("copy_in", kind, len(some))
            contents = self._blocks[kind].join([content for _, content in some], key.size)
            self._device.run(key, self._numbers(kind, some, key.size), *contents)

    def _numbers(self, kind: RowKind, some: list[tuple[CacheRow, T]], size: int) -> np.ndarray:
        padding = [self._padding[kind]] * (size - len(some))
        return np.array([*(row.number for row, _ in some), *padding], np.int32)


def _parts_of(rows: list[tuple[CacheRow, T]]) -> Iterator[tuple[RowKind, list[tuple[CacheRow, T]]]]:
    """Of one kind each, and as many as are copied at once."""
    for kind, same in groupby(rows, lambda entry: entry[0].kind):
        some = list(same)
        for start in range(0, len(some), SIZES[kind][-1]):
            yield kind, some[start : start + SIZES[kind][-1]]


def _key(kind: Kind, of: RowKind, count: int) -> Key:
    return Key(kind, smallest_covering(SIZES[of], count), frozenset({of}))


def copying_step(key: Key, maker: StepFunctions) -> Built:
    """`(parts, numbers) -> (rows,)`: `size` rows of each buffer that has any; or `(parts, numbers, *rows) ->
    (caches,)`, which fills them.
    """
    of: RowKind = "page" if "page" in key.variant else "state"
    has_them, buffers = _has_rows(of, maker), maker.sizes.buffers_of(paged=of == "page")

    def out(parts: dict[str, Any], numbers: jax.Array) -> tuple[Any, ...]:
        found = zip(jax.tree.leaves(parts["caches"]), has_them, strict=True)
        return (tuple(buffer[numbers] for buffer, has in found if has),)

    def back(parts: dict[str, Any], numbers: jax.Array, *rows: jax.Array) -> tuple[Any, ...]:
        found, tree = jax.tree.flatten(parts["caches"])
        given = iter(rows)
        pairs = zip(found, has_them, strict=True)
        written = [buffer.at[numbers].set(next(given)) if has else buffer for buffer, has in pairs]
        return (jax.tree.unflatten(tree, written),)

    numbers = maker.state.ints(key.size)
    if key.kind == "copy_out":
        return Built(out, [numbers], tuple(P(*buffer.axes) for buffer in buffers))
    return Built(back, [numbers, *(maker.state.sharded((key.size, *b.shape[1:]), b.dtype, b.axes) for b in buffers)])


def _has_rows(of: RowKind, maker: StepFunctions) -> list[bool]:
    """Of each array that layers keep, in turn, whether it has a row for each page, or for each state."""
    sizes, found = maker.sizes, list[bool]()
    paged = iter(sizes.is_paged)
    for buffers, layer in zip(sizes.buffers, maker.state.abstract()["caches"], strict=True):
        found += [next(paged) == (of == "page") for _ in buffers]
        found += [False] * (len(jax.tree.leaves(layer)) - len(buffers))  # places of experts
    return found
