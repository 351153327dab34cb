"""Products of few rows with e4m3 in blocks, interpreted or on a GPU, against float64; and what is done in registers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.pallas_kernels import late_sum
from jaxllm.pallas_kernels.gpu.expand import e4m3_program
from jaxllm.pallas_kernels.gpu.few_rows import MOST_ROWS, few_rows_of_blocks, knows_blocks
from jaxllm.pallas_kernels.gpu.route import list_rows
from jaxllm.quantization.coded import Coded, fp8_blocks
from jaxllm.quantization.stored import FP8
from tests.pallas_kernels.gpu.ptx_machine import PtxMachine
from tests.pallas_kernels.gpu.test_experts import silu
from tests.support.gpu_here import INTERPRET

pytestmark = pytest.mark.hardware

BF16, F16 = np.dtype(jnp.bfloat16), np.dtype(np.float16)


def blocks(*shape: int, rows: int = 128, columns: int = 128, dtype: np.dtype = BF16) -> Coded:
    """Any codes that are numbers, from the smallest to the largest, and scales that differ a hundredfold."""
    random = np.random.default_rng(sum(shape))
    *stack, outputs, inputs = shape
    bits = random.integers(0, 127, (*stack, outputs // rows, rows, inputs)) | random.choice([0, 128], (inputs,))
    scale = np.exp(random.uniform(-8, -3, (*stack, outputs // rows, inputs // columns)))
    codes, coding = jnp.asarray(bits.astype(np.uint8).view(FP8)), fp8_blocks(dtype, rows, columns).coding
    return Coded(codes, jnp.asarray(scale, jnp.float32), None, coding, dtype)


def by_hand(weight: Coded) -> np.ndarray:
    """Float64, number by number of a table of what codes stand for."""
    table = np.arange(256, dtype=np.uint8).view(FP8).astype(np.float64)
    codes = table[np.asarray(weight.codes).view(np.uint8)].reshape(weight.shape)
    rows, columns = weight.codes.shape[-2], weight.shape[-1] // weight.scale.shape[-1]
    return codes * np.asarray(weight.scale, np.float64).repeat(rows, -2).repeat(columns, -1)


def close(found: Any, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    scale = np.sqrt((expected**2).mean())
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=0, atol=tolerance * scale)


SHAPES = {
    "whole blocks": ((256, 512), 128, 128),
    "outputs that no program's divide": ((200, 384), 8, 128),
    "parts of which the last is shorter": ((96, 1408), 96, 128),
    "small blocks": ((120, 160), 24, 32),
    "large blocks": ((192, 512), 64, 256),
}


@pytest.mark.parametrize("rows", [1, 8, 11, MOST_ROWS])
@pytest.mark.parametrize("name", SHAPES)
def test_few_rows(name: str, rows: int) -> None:
    shape, of_rows, columns = SHAPES[name]
    weight = blocks(*shape, rows=of_rows, columns=columns)
    (matrix,) = weight.kernel_matrices
    assert knows_blocks(matrix)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((rows, shape[1])), BF16)
    out = late_sum(few_rows_of_blocks(x, matrix, interpret=INTERPRET))
    assert out.dtype == jnp.float32
    close(out, np.asarray(x, np.float64) @ by_hand(weight).T)


def test_float16_and_the_type_that_is_asked_for() -> None:
    weight = blocks(128, 256, dtype=F16)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((3, 256)), F16)
    out = few_rows_of_blocks(x, weight.kernel_matrices[0], dtype=jnp.float16, interpret=INTERPRET)
    assert out.dtype == jnp.float16
    close(out, np.asarray(x, np.float64) @ by_hand(weight).T, 2e-3)


def test_what_is_left_to_other_kernels() -> None:
    for weight in (blocks(128, 256, dtype=np.dtype(np.float32)), blocks(96, 96, rows=48, columns=48)):
        assert not knows_blocks(weight.kernel_matrices[0])


@pytest.mark.parametrize("activated", [True, False])
@pytest.mark.parametrize("sizes", [[0, 0, 1], [5, 0, 18], [16, 17, 0]])
def test_tiles_of_each_groups_rows(sizes: list[int], activated: bool) -> None:
    """Two of them read one row; those of no group are NaN."""
    weight = blocks(3, 192, 256, rows=48)
    total = sum(sizes) + 3 + (sum(sizes) + 3) % 2
    random = np.random.default_rng(3)
    group = random.permutation(np.repeat(np.arange(4), [*sizes, total - sum(sizes)]))
    x = random.standard_normal((total // 2, 256))
    x[(group == 3).reshape(-1, 2).all(axis=1)] = np.nan
    x = jnp.asarray(x, BF16)
    lists = list_rows(jnp.asarray(group, jnp.int32), 3, total, MOST_ROWS, interpret=INTERPRET)
    options: dict[str, Any] = {"activation": jax.nn.silu} if activated else {}
    out = few_rows_of_blocks(x, weight.kernel_matrices[0], lists, total, interpret=INTERPRET, **options)
    assert out.shape == (total, 96 if activated else 192)
    matrices = by_hand(weight)
    for row in np.flatnonzero(group != 3):
        expected = matrices[group[row]] @ np.asarray(x, np.float64)[row // 2]
        if activated:
            gate, up = np.split(expected, 2)
            expected = silu(gate) * up
        close(out[row], expected)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_the_program_for_registers_reads_every_number_right(dtype: np.dtype) -> None:
    bits = np.arange(256, dtype=np.uint8)
    words = bits.view("<u4")
    found = np.stack(PtxMachine([words]).run(e4m3_program(dtype)), axis=1).astype("<u4").view(dtype).reshape(-1)
    numbers = (bits & 127) != 127
    np.testing.assert_array_equal(found[numbers].astype(np.float32), bits.view(FP8).astype(np.float32)[numbers])
    np.testing.assert_array_equal(np.signbit(found), bits >= 128)
