"""Pages that are copied between the devices and the host, some at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import numpy as np

from jaxllm.engine.device.buckets import COPIED_PAGES
from jaxllm.engine.device.device import Device
from jaxllm.engine.device.handle import LeavingPages
from jaxllm.engine.device.page_blocks import PageBlocks
from jaxllm.engine.device.sizes import StepSizes
from jaxllm.engine.offload.host_pages import Page
from jaxllm.engine.offload.prefix_digests import Digest

T = TypeVar("T")


class PageCopies:
    """Nobody waits for a copy here: it is enqueued among the steps."""

    def __init__(self, device: Device, sizes: StepSizes):
        self._device = device
        self._blocks = PageBlocks(sizes)

    def read(self, pages: list[tuple[int, Digest]]) -> list[LeavingPages]:
        """Copy pages to the host."""
        found = []
        for some in _parts_of(pages):
            key = self._device.covering("read_pages", len(some))
            arrays = self._device.run(key, _padded([page for page, _ in some], key.size))
            for array in arrays:
                array.copy_to_host_async()
            found.append(LeavingPages([digest for _, digest in some], arrays, self._blocks))
        return found

    def write(self, pages: list[tuple[int, Page]]) -> None:
        """Fill pages with what the host has."""
        for some in _parts_of(pages):
            key = self._device.covering("write_pages", len(some))
            rows = self._blocks.join([content for _, content in some], key.size)
            self._device.run(key, _padded([page for page, _ in some], key.size), *rows)


def _parts_of(pages: list[T]) -> Iterator[list[T]]:
    """As many at a time as are copied at once."""
    for start in range(0, len(pages), COPIED_PAGES[-1]):
        yield pages[start : start + COPIED_PAGES[-1]]


def _padded(pages: list[int], size: int) -> np.ndarray:
    """Their numbers, and behind them that of the page which belongs to nobody."""
    return np.array(pages + [0] * (size - len(pages)), np.int32)
