"""Products over weights as stored, interpreted or on a GPU, against float64 NumPy; and their lowering for CUDA."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jaxllm.pallas_kernels import RootMeanSquare, Unsummed, late_sum
from jaxllm.pallas_kernels.gpu.expand import from_e4m3, to_e4m3
from jaxllm.pallas_kernels.gpu.experts import add_norm
from jaxllm.pallas_kernels.gpu.few_rows import MOST_ROWS, few_rows_of_groups, knows_groups
from jaxllm.pallas_kernels.gpu.matmul import choose_tile_rows, matmul
from jaxllm.pallas_kernels.gpu.products import linear
from jaxllm.pallas_kernels.gpu.route import RowLists, list_rows
from jaxllm.quantization.coded import Coded, fp8_blocks, groups, per_channel
from jaxllm.quantization.stored import FP8, INT8, Stored
from jaxllm.quantization.weight import Dense, Weight
from tests.support.gpu_here import INTERPRET

pytestmark = pytest.mark.hardware

F32 = np.dtype(np.float32)
FP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


def packed(kind: Any, values: np.ndarray) -> Weight:
    return jax.tree.map(jnp.asarray, kind.pack([Stored(values, "F32", values.shape)], None))


def in_blocks(values: np.ndarray) -> Weight:
    *stack, outputs, inputs = values.shape
    codes = jnp.asarray(values, FP8).reshape(*stack, outputs // 8, 8, inputs)
    scale = np.random.default_rng(1).uniform(0.5, 2, (*stack, outputs // 8, inputs // 32))
    return Coded(codes, jnp.asarray(scale, jnp.float32), None, fp8_blocks(F32, 8, 32).coding, F32)


def levels(values: np.ndarray) -> Weight:
    *lead, inputs = values.shape
    random = np.random.default_rng(2)
    codes = random.integers(0, 256, (*lead, inputs // 32, 16), np.uint8)
    scale = random.uniform(0.5, 2, (*lead, inputs // 32))
    coding = groups(F32, 4, 32, True, levels=FP4).coding
    return Coded(jnp.asarray(codes), jnp.asarray(scale, jnp.float16), None, coding, F32)


KINDS: dict[str, Any] = {
    "dense": lambda values: Dense(jnp.asarray(values)),
    "int8": lambda values: packed(per_channel(INT8, F32), values),
    "fp8": lambda values: packed(per_channel(FP8, F32), values),
    "fp8 blocks": in_blocks,
    "4 bits": lambda values: packed(groups(F32), values),
    "4 bits, symmetric, groups of 96": lambda values: packed(groups(F32, 4, 96, True), values),
    "4 bits, symmetric": lambda values: packed(groups(F32, 4, 32, True), values),
    "4 bits, levels": levels,
    "2 bits": lambda values: packed(groups(F32, 2, 32), values),
    "8 bits": lambda values: packed(groups(F32, 8, 32), values),
}

SIZES = {
    "one row": [0, 0, 1],
    "no row in any group": [0, 0, 0],
    "one group has all": [0, 37, 0],
    "a tile and one more": [17, 1, 16],
    "rows of none behind": [3, 0, 20],
}


def check_grouped(weight: Weight, sizes: list[int], rows: int, *, dtype: Any = jnp.float32, share: int = 1) -> None:
    """Rows of each group anywhere among `rows`, `share` of them reading each row of `x`; those of no group are NaN."""
    (matrix,) = weight.kernel_matrices
    random = np.random.default_rng(3)
    group = random.permutation(np.repeat(np.arange(len(sizes) + 1), [*sizes, rows - sum(sizes)]))
    x = random.standard_normal((rows // share, weight.shape[-1])).astype(np.float32)
    nobody = group == len(sizes)
    x[nobody.reshape(-1, share).all(axis=1)] = np.nan
    tile_rows = choose_tile_rows(rows, len(sizes))
    lists = list_rows(jnp.asarray(group, jnp.int32), len(sizes), rows, tile_rows, interpret=INTERPRET)
    x = jnp.asarray(x, dtype)
    out = matmul(x, matrix, lists, rows, interpret=INTERPRET)
    matrices, x = np.asarray(weight.dequantize(), np.float64), np.asarray(x, np.float64)
    for row in np.flatnonzero(~nobody):
        np.testing.assert_allclose(out[row], matrices[group[row]] @ x[row // share], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_with_a_kernel_is_expanded_right(kind):
    """Outputs and inputs that no block divides, and a group that is empty."""
    values = np.random.default_rng(0).standard_normal((3, 136, 96)).astype(np.float32)
    check_grouped(KINDS[kind](values), [5, 0, 18], 24)


def test_every_e4m3_number_is_read_right():
    bits = np.arange(256, dtype=np.uint8)
    bits = bits[(bits & 127) != 127]  # not a number
    expected = bits.view(FP8).astype(np.float32)
    np.testing.assert_array_equal(from_e4m3(jnp.asarray(bits, jnp.int32)), expected)


def test_the_nearest_e4m3_number_is_written():
    random = np.random.default_rng(0)
    x = np.concatenate([random.uniform(-448, 448, 2000), random.normal(0, 0.02, 2000), np.arange(-40, 40) / 1024])
    x = x.astype(np.float32)
    np.testing.assert_array_equal(to_e4m3(jnp.asarray(x)), x.astype(FP8).view(np.uint8))


def test_neighbouring_rows_share_one_that_is_read():
    values = np.random.default_rng(0).standard_normal((3, 40, 72)).astype(np.float32)
    check_grouped(Dense(jnp.asarray(values)), [5, 0, 30], 40, share=4)


@pytest.mark.parametrize("sizes", SIZES)
def test_groups_at_every_edge_of_the_tiles(sizes):
    values = np.random.default_rng(0).standard_normal((3, 40, 72)).astype(np.float32)
    check_grouped(Dense(jnp.asarray(values)), SIZES[sizes], max(sum(SIZES[sizes]), 1) + 2)


def test_many_rows_take_larger_tiles():
    values = np.random.default_rng(0).standard_normal((2, 24, 16)).astype(np.float32)
    assert choose_tile_rows(600, 2) == 128
    check_grouped(Dense(jnp.asarray(values)), [411, 130], 600)


@pytest.mark.parametrize("rows", [1, 16, 130])
@pytest.mark.parametrize("kind", ["fp8 blocks", "4 bits", "4 bits, levels"])
def test_one_matrix(kind, rows):
    weight = KINDS[kind](np.random.default_rng(0).standard_normal((136, 96)).astype(np.float32))
    x = np.random.default_rng(1).standard_normal((rows, 96)).astype(np.float32)
    out = matmul(jnp.asarray(x), weight.kernel_matrices[0], interpret=INTERPRET)
    expected = x.astype(np.float64) @ np.asarray(weight.dequantize(), np.float64).T
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 5, MOST_ROWS])
@pytest.mark.parametrize("shape", [(136, 96), (40, 4672)], ids=str)
@pytest.mark.parametrize("kind", ["4 bits", "4 bits, levels", "4 bits, symmetric", "2 bits", "8 bits"])
def test_few_rows(kind, shape, rows):
    """Of outputs that no block divides; of inputs that are less than a block, and of parts, the last not whole."""
    weight = KINDS[kind](np.random.default_rng(0).standard_normal(shape).astype(np.float32))
    (matrix,) = weight.kernel_matrices
    assert knows_groups(matrix)
    x = np.random.default_rng(1).standard_normal((rows, shape[1])).astype(np.float32)
    out = late_sum(few_rows_of_groups(jnp.asarray(x), matrix, interpret=INTERPRET))
    expected = x.astype(np.float64) @ np.asarray(weight.dequantize(), np.float64).T
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-6 * np.abs(expected).max() * shape[1] ** 0.5)


@pytest.mark.parametrize("activated", [True, False])
@pytest.mark.parametrize("sizes", [[0, 0, 1], [5, 0, 18], [16, 17, 0]], ids=str)
@pytest.mark.parametrize("kind", ["4 bits", "4 bits, levels", "2 bits", "8 bits"])
def test_few_rows_of_each_group(kind, sizes, activated):
    """Two of them read one row; rows of no group are NaN. No block divides the outputs, and inputs are several."""
    weight = KINDS[kind](np.random.default_rng(0).standard_normal((3, 88, 480)).astype(np.float32))
    (matrix,) = weight.kernel_matrices
    assert knows_groups(matrix)
    total = sum(sizes) + 3 + (sum(sizes) + 3) % 2
    random = np.random.default_rng(3)
    group = random.permutation(np.repeat(np.arange(4), [*sizes, total - sum(sizes)]))
    x = random.standard_normal((total // 2, 480)).astype(np.float32)
    x[(group == 3).reshape(-1, 2).all(axis=1)] = np.nan
    lists = list_rows(jnp.asarray(group, jnp.int32), 3, total, MOST_ROWS, interpret=INTERPRET)
    options = {"activation": jax.nn.silu} if activated else {}
    out = few_rows_of_groups(jnp.asarray(x), matrix, lists, total, interpret=INTERPRET, **options)
    assert out.shape == (total, 44 if activated else 88)
    matrices = np.asarray(weight.dequantize(), np.float64)
    for row in np.flatnonzero(group != 3):
        expected = matrices[group[row]] @ x[row // 2].astype(np.float64)
        if activated:
            gate, up = np.split(expected, 2)
            expected = gate / (1 + np.exp(-gate)) * up
        np.testing.assert_allclose(out[row], expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["dense", "int8", "fp8 blocks", "4 bits, symmetric, groups of 96"])
def test_few_rows_of_other_kinds_are_left_to_other_kernels(kind):
    (matrix,) = KINDS[kind](np.ones((136, 96), np.float32)).kernel_matrices
    assert not knows_groups(matrix)


@pytest.mark.parametrize("kind", ["dense", "int8", "fp8"])
def test_what_the_compiler_multiplies_by_itself(kind):
    weight = KINDS[kind](np.random.default_rng(0).standard_normal((40, 96)).astype(np.float32))
    x = np.random.default_rng(1).standard_normal((5, 96)).astype(np.float32)
    residual = np.ones((5, 40), np.float32)
    out = linear(jnp.asarray(x), weight, residual=jnp.asarray(residual))
    expected = x.astype(np.float64) @ np.asarray(weight.dequantize(), np.float64).T + 1
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_sums_in_float32():
    values = np.random.default_rng(0).standard_normal((3, 40, 72)).astype(np.float32)
    check_grouped(Dense(jnp.asarray(values, jnp.float32)), [5, 9, 3], 17)
    check_grouped(Dense(jnp.asarray(values, jnp.bfloat16)), [5, 9, 3], 17, dtype=jnp.bfloat16)


@pytest.mark.parametrize("kind", KINDS)
def test_lowers_for_cuda_without_expanding_weights(kind):
    values = np.random.default_rng(0).standard_normal((4, 256, 192)).astype(np.float32)
    weight = KINDS[kind](values)

    def multiply(x, weight, rows, tiles):
        (matrix,) = weight.kernel_matrices
        return matmul(x, matrix, RowLists(rows, tiles), 64)

    arguments = jnp.ones((64, 192)), weight, jnp.zeros(4 * 64, jnp.int32), jnp.zeros((8, 3), jnp.int32)
    h100 = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=h100)):
        text = jax.jit(multiply).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_sum_and_its_norm_are_the_same_at_once(dtype):
    random = np.random.default_rng(0)
    x, out = (jnp.asarray(random.standard_normal((5, 96)), dtype) for _ in range(2))
    norm = RootMeanSquare(jnp.asarray(random.uniform(0.5, 2, 96), jnp.float32), 1e-5)
    total, normed = add_norm(x, out, norm, interpret=INTERPRET)
    np.testing.assert_array_equal(total, x + out)
    exact = np.asarray(x + out, np.float64)
    exact *= np.asarray(norm.weight, np.float64) / np.sqrt((exact**2).mean(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(np.asarray(normed, np.float64), exact, rtol=1e-5 if dtype == jnp.float32 else 1e-2)


@pytest.mark.parametrize("count", [2, 5])
def test_parts_of_a_product_are_added_up_on_the_way(count):
    random = np.random.default_rng()
    x = jnp.asarray(random.standard_normal((3, 96)), jnp.bfloat16)
    parts = jnp.asarray(random.standard_normal((count, 3, 96)), jnp.float32)
    norm = RootMeanSquare(jnp.asarray(random.uniform(0.5, 2, 96), jnp.float32), 1e-5)
    out = functools.reduce(jnp.add, parts).astype(x.dtype)  # one part after the other, then rounded as a product is
    found = add_norm(x, Unsummed(parts), norm, interpret=INTERPRET)
    for made, expected in zip(found, add_norm(x, out, norm, interpret=INTERPRET), strict=True):
        np.testing.assert_array_equal(made, expected)
