"""Pages and states that are copied between the devices and the host, some at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TypeVar

import numpy as np

from jaxllm.engine.device.buckets import COPIED_PAGES, COPIED_STATES
from jaxllm.engine.device.device import Device
from jaxllm.engine.device.handle import LeavingPages
from jaxllm.engine.device.keys import Kind
from jaxllm.engine.device.page_blocks import PageBlocks
from jaxllm.engine.device.sizes import StepSizes
from jaxllm.engine.offload.cache_rows import ROW_KINDS, CacheRow, RowKind
from jaxllm.engine.offload.host_pages import Page
from jaxllm.engine.offload.prefix_digests import Digest

T = TypeVar("T")

READS: dict[RowKind, Kind] = {"page": "read_pages", "state": "read_states"}
WRITES: dict[RowKind, Kind] = {"page": "write_pages", "state": "write_states"}
MOST: dict[RowKind, int] = {"page": COPIED_PAGES[-1], "state": COPIED_STATES[-1]}
"""How many are copied at once."""


class PageCopies:
    """Nobody waits for a copy here: it is enqueued among the steps."""

    def __init__(self, device: Device, sizes: StepSizes):
        self._device = device
        self._blocks: dict[RowKind, PageBlocks] = {kind: PageBlocks(sizes.buffers_of(kind)) for kind in ROW_KINDS}
        self._padding: dict[RowKind, int] = {"page": 0, "state": sizes.max_num_seqs}
        """The rows that belong to nobody."""

    def read(self, rows: list[tuple[CacheRow, Digest]]) -> list[LeavingPages]:
        """Copy pages and states to the host."""
        found = []
        for kind, some in _parts_of(rows):
            key = self._device.covering(READS[kind], len(some))
            arrays = self._device.run(key, self._numbers(kind, some, key.size))
            for array in arrays:
                array.copy_to_host_async()
            found.append(LeavingPages([digest for _, digest in some], arrays, self._blocks[kind]))
        return found

    def write(self, rows: list[tuple[CacheRow, Page]]) -> None:
        """Fill pages and states with what the host has."""
        for kind, some in _parts_of(rows):
            key = self._device.covering(WRITES[kind], len(some))
            contents = self._blocks[kind].join([content for _, content in some], key.size)
            self._device.run(key, self._numbers(kind, some, key.size), *contents)

    def _numbers(self, kind: RowKind, some: list[tuple[CacheRow, T]], size: int) -> np.ndarray:
        padding = [self._padding[kind]] * (size - len(some))
        return np.array([*(row.number for row, _ in some), *padding], np.int32)


def _parts_of(rows: list[tuple[CacheRow, T]]) -> Iterator[tuple[RowKind, list[tuple[CacheRow, T]]]]:
    """Of one kind each, and as many as are copied at once."""
    for kind, same in groupby(rows, lambda entry: entry[0].kind):
        some = list(same)
        for start in range(0, len(some), MOST[kind]):
            yield kind, some[start : start + MOST[kind]]
