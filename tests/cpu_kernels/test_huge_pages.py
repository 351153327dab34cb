"""Memory gathered into huge pages: what it holds stays as it is."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.cpu_kernels.huge_pages import HUGE, use_huge_pages


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


def test_small_arrays_are_left_alone() -> None:
    assert use_huge_pages([jnp.zeros(100)]) == 0
