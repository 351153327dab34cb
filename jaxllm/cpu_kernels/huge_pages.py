"""Memory that every step reads, in pages of 2 MiB: looking up the addresses of small ones takes up to a third of it."""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import UInt8

from jaxllm.cpu_kernels.library import call

logger = logging.getLogger(__name__)

HUGE = 2 * 2**20
SMALL = 2**16
"""Bytes of an array that is not worth it."""

MADV_COLLAPSE = 25
"""`madvise(2)`: gather memory into huge pages now; since Linux 6.1, whatever /sys says of transparent ones."""

ALIGNMENT = 64
"""Bytes, of the address of a buffer that XLA takes as it is on a CPU."""

CHUNK = 64 * 2**20
"""Bytes that arrays share, and that the system puts into huge pages when they are first written."""


class Room:
    """Memory for arrays that stay, side by side in chunks: nothing is left to gather afterwards.

    A chunk lives as long as the last array in it. What is not written of it takes no memory.
    """

    def __init__(self) -> None:
        self._chunk: weakref.ref[np.ndarray] | None = None
        self._end = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> UInt8[np.ndarray, "bytes"]:
        """Bytes that were not written yet, where XLA's buffers may begin."""
        if nbytes > CHUNK // 4:
            return _aligned(_fresh(nbytes + ALIGNMENT), 0, nbytes)
        with self._lock:
            chunk = self._chunk() if self._chunk else None
            if chunk is None or self._end + ALIGNMENT + nbytes > CHUNK:
                chunk, self._end = _fresh(CHUNK), 0
                self._chunk = weakref.ref(chunk)
            taken = _aligned(chunk, self._end, nbytes)
            self._end = taken.ctypes.data + nbytes - chunk.ctypes.data
            return taken


def _fresh(nbytes: int) -> UInt8[np.ndarray, "bytes"]:
    """Memory that nothing was in before: what an allocator has left over lies in small pages already, and stays."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _aligned(room: np.ndarray, start: int, nbytes: int) -> np.ndarray:
    start += -(room.ctypes.data + start) % ALIGNMENT
    return room[start : start + nbytes]


def zeros(shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
    """`jnp.zeros`, while tracing: on the device that runs it, in huge pages where the system has them."""
    return call("jaxllm_zeros", jax.ShapeDtypeStruct(tuple(shape), dtype))()


def use_huge_pages(arrays: Iterable[jax.Array]) -> int:
    """Gather what the arrays occupy on this host into huge pages, where the system can: bytes that it did so for.

    It is advice, which changes no result. Elsewhere than on Linux nothing is done.
    """
    if sys.platform != "linux":
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    gathered = 0
    for begin, end in _merged(_ranges(arrays)):
        for at in range(begin, end, HUGE):  # one by one: where there is no memory around an array, one cannot be
            if libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(HUGE), MADV_COLLAPSE) == 0:
                gathered += HUGE
    logger.debug("%.0f MiB lie in huge pages", gathered / 2**20)
    return gathered


def _ranges(arrays: Iterable[jax.Array]) -> Iterator[tuple[int, int]]:
    """Whole huge pages that an array has a part of."""
    for array in arrays:
        for shard in array.addressable_shards:
            if shard.data.nbytes >= SMALL:
                pointer = shard.data.unsafe_buffer_pointer()
                yield pointer // HUGE * HUGE, -(-(pointer + shard.data.nbytes) // HUGE) * HUGE


def _merged(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Disjoint ranges that cover the same, in order."""
    current: tuple[int, int] | None = None
    for begin, end in sorted(ranges):
        if current is None or begin > current[1]:
            if current is not None:
                yield current
            current = begin, end
        else:
            current = current[0], max(current[1], end)
    if current is not None:
        yield current
