"""Products of integers (W8A8) on the kernels of NVIDIA GPUs, interpreted or on one, against exact sums."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.pallas_kernels import late_sum
from jaxllm.pallas_kernels.gpu.matmul import integer_matmul, round_runs
from jaxllm.pallas_kernels.gpu.products import linear
from jaxllm.pallas_kernels.gpu.route import list_rows
from jaxllm.pallas_kernels.matrices import quantize_runs
from jaxllm.quantization.coded import Coded, per_channel
from jaxllm.quantization.stored import INT8
from tests.pallas_kernels.gpu.test_experts import silu
from tests.support.gpu_here import INTERPRET

pytestmark = pytest.mark.hardware

F32 = np.dtype(np.float32)


def weights(*shape: int) -> Coded:
    """All codes that there are, -128 too."""
    random = np.random.default_rng(sum(shape))
    codes = random.integers(-128, 128, shape).astype(np.int8)
    scale = np.exp(random.uniform(-8, -3, shape[:-1])).astype(np.float32)
    coding = per_channel(INT8, F32, activations=True).coding
    return Coded(jnp.asarray(codes), jnp.asarray(scale), None, coding, F32)


def inputs(*shape: int) -> np.ndarray:
    """A few are a hundred times as large as the others, and a run is of zeros."""
    random = np.random.default_rng(1)
    x = random.standard_normal(shape) * np.where(random.uniform(size=shape[-1]) < 0.03, 100, 1)
    x[:, :64] *= random.uniform(size=(shape[0], 1)) < 0.5
    return x.astype(np.float32)


def rounded(x: np.ndarray) -> np.ndarray:
    """Float64 of the multiples of its runs' scales that are nearest."""
    found = np.empty(x.shape)
    for row, start in np.ndindex(len(x), -(-x.shape[1] // 64)):
        run = x[row, 64 * start : 64 * (start + 1)]
        scale = np.abs(run).max() / np.float32(127) if run.any() else np.float32(1)
        found[row, 64 * start : 64 * (start + 1)] = np.rint(run / scale) * np.float64(scale)
    return found


def by_hand(weight: Coded) -> np.ndarray:
    return np.asarray(weight.codes, np.float64) * np.asarray(weight.scale, np.float64)[..., None]


def close(found: Any, expected: np.ndarray, tolerance: float = 3e-6) -> None:
    scale = np.sqrt((expected**2).mean())
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("size", [64, 96, 1088])
def test_inputs_are_rounded_as_in_plain_xla(size: int) -> None:
    x = inputs(5, size)
    codes, scale = round_runs(jnp.asarray(x), interpret=INTERPRET)
    expected, runs = quantize_runs(jnp.asarray(x))
    np.testing.assert_allclose(scale, runs, rtol=1e-6)
    np.testing.assert_allclose(codes.astype(int), expected.astype(int), rtol=0, atol=0 if INTERPRET else 1)


@pytest.mark.parametrize("rows", [1, 5, 16, 40, 150])
@pytest.mark.parametrize("shape", [(72, 128), (200, 96), (64, 1216)], ids=str)
def test_sums_of_integers(shape: tuple[int, int], rows: int) -> None:
    """Outputs that no block divides, a run that is not whole, and parts of a row, of which the last is shorter."""
    weight, x = weights(*shape), inputs(rows, shape[1])
    found = late_sum(integer_matmul(jnp.asarray(x), weight.kernel_matrices[0], interpret=INTERPRET))
    assert found.dtype == jnp.float32
    close(found, rounded(x) @ by_hand(weight).T)


def test_the_type_that_is_asked_for() -> None:
    weight, x = weights(64, 1216), inputs(3, 1216)
    found = linear(jnp.asarray(x), weight, dtype=jnp.bfloat16, interpret=INTERPRET)
    assert found.dtype == jnp.bfloat16
    close(found, rounded(x) @ by_hand(weight).T, 1e-2)


@pytest.mark.parametrize("tile_rows", [16, 64])
@pytest.mark.parametrize("activated", [True, False])
def test_tiles_of_each_groups_rows(activated: bool, tile_rows: int) -> None:
    """Two of them read one row; those of no group are NaN."""
    weight, total = weights(3, 144, 96), 60
    random = np.random.default_rng(3)
    group = random.permutation(np.repeat(np.arange(4), [17, 0, 38, 5]))
    x = inputs(total // 2, 96)
    x[(group == 3).reshape(-1, 2).all(axis=1)] = np.nan
    lists = list_rows(jnp.asarray(group, jnp.int32), 3, total, tile_rows, interpret=INTERPRET)
    options: dict[str, Any] = {"activation": jax.nn.silu} if activated else {}
    found = integer_matmul(
        jnp.asarray(x), weight.kernel_matrices[0], lists, total, tile_rows, interpret=INTERPRET, **options
    )
    assert found.shape == (total, 72 if activated else 144)
    exact, matrices = rounded(np.nan_to_num(x)), by_hand(weight)
    for row in np.flatnonzero(group != 3):
        expected = matrices[group[row]] @ exact[row // 2]
        if activated:
            gate, up = np.split(expected, 2)
            expected = silu(gate) * up
        close(found[row], expected, 1e-5)
