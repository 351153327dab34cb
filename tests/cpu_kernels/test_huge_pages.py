"""Memory gathered into huge pages: what it holds stays as it is."""

from __future__ import annotations

import itertools
import mmap
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from jaxllm import cpu_kernels
from jaxllm.cpu_kernels.tiles import ALIGNMENT, CHUNK, HUGE, Room, use_huge_pages


def kilobytes_in_huge_pages() -> int:
    found = re.search(r"AnonHugePages:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    return int(found[1]) if found else 0


@pytest.mark.skipif(sys.platform != "linux", reason="Linux gathers memory when it is told to")
def test_arrays_lie_in_huge_pages_and_hold_what_they_held() -> None:
    rng = np.random.default_rng(0)
    values = [rng.integers(0, 255, 3 * HUGE // 2, dtype=np.uint8) for _ in range(16)]
    arrays = [jnp.array(value) for value in values]
    jax.block_until_ready(arrays)
    gathered = use_huge_pages(arrays)
    if gathered == 0:
        pytest.skip("this kernel gathers no memory")
    assert kilobytes_in_huge_pages() >= gathered // 1024
    for array, value in zip(arrays, values, strict=True):
        np.testing.assert_array_equal(array, value)


@pytest.mark.parametrize("threads", [1, 2])
def test_zeros_are_zeros_each_in_memory_of_its_own(threads: int) -> None:
    large = jax.ShapeDtypeStruct((2, 5, HUGE), np.int16)
    asked = [jax.ShapeDtypeStruct((3, HUGE - 7), np.uint8), large, large, jax.ShapeDtypeStruct((1, 7), np.float32)]
    make = jax.jit(lambda: [cpu_kernels.zeros(a.shape, a.dtype) for a in asked])
    fill = jax.jit(lambda arrays: [jnp.full_like(array, 1) for array in arrays], donate_argnums=0)
    with cpu_kernels.forced(threads=threads):
        for _ in range(3):  # memory that held something comes again
            arrays = make()
            assert [(array.shape, array.dtype) for array in arrays] == [(a.shape, a.dtype) for a in asked]
            assert len({array.unsafe_buffer_pointer() for array in arrays}) == len(asked)
            assert not any(np.asarray(array).any() for array in arrays)
            arrays = jax.block_until_ready(fill(arrays))
            del arrays


@pytest.mark.skipif(sys.platform != "linux", reason="Linux clears pages when they are first used")
def test_zeros_take_memory_when_they_are_used() -> None:
    """Most of a KV cache is never used, and would be the largest part of a small model's process."""
    make = jax.jit(lambda: cpu_kernels.zeros((128, HUGE), np.uint8))
    before = psutil.Process().memory_info().rss
    array = jax.block_until_ready(make())
    assert psutil.Process().memory_info().rss - before < array.nbytes // 4
    assert not np.asarray(array).any()


def test_small_arrays_are_left_alone() -> None:
    assert use_huge_pages([jnp.zeros(100)]) == 0


def test_arrays_taken_by_many_threads_lie_apart_where_xla_takes_them() -> None:
    room, sizes = Room(), [1, 63, 100_000, 5 * HUGE, CHUNK // 2, 2 * CHUNK] * 20
    with ThreadPoolExecutor(8) as pool:
        arrays = list(pool.map(room.take, sizes))
    spans = sorted((array.ctypes.data, array.nbytes) for array in arrays)
    assert sorted(sizes) == sorted(nbytes for _, nbytes in spans)
    assert all(begin % ALIGNMENT == 0 for begin, _ in spans)
    assert all(begin + nbytes <= after for (begin, nbytes), (after, _) in itertools.pairwise(spans))


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked of Linux")
def test_small_arrays_side_by_side_lie_in_huge_pages_when_they_are_written() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this kernel has none")
    before = kilobytes_in_huge_pages()
    with mmap.mmap(-1, 32 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as plain:
        plain.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(plain, np.uint8)[:] = 1
        given = kilobytes_in_huge_pages() - before
    if given < 28 * 1024:
        pytest.skip(f"of 32 MiB asked for in huge pages, the kernel gave {given} KiB: it has no more at this moment")
    gained = []
    for _ in range(5):  # other programs may take them meanwhile
        room, before = Room(), kilobytes_in_huge_pages()
        arrays = [room.take(HUGE // 4) for _ in range(64)]
        for array in arrays:
            array.fill(1)
        gained.append(kilobytes_in_huge_pages() - before)
        if gained[-1] >= 24 * 1024:  # of 32 MiB
            return
    raise AssertionError(f"of 32 MiB, KiB in huge pages: {gained}")


def test_memory_goes_back_with_the_last_array() -> None:
    for size in (30, 20):  # once 30 MiB were given back, glibc keeps less than that in its heap
        heap = [np.ones(size * 2**20, np.uint8) for _ in range(20)]
        above = heap.pop()
        del heap  # kept, below what is still there: it is not what arrays lie in
    room = Room()
    arrays = [room.take(HUGE) for _ in range(24)]
    for array in arrays:
        array.fill(1)
    held = psutil.Process().memory_info().rss
    del arrays, array
    assert above.all()
    assert held - psutil.Process().memory_info().rss > 20 * HUGE
