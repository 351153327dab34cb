"""What kernels for NVIDIA GPUs load of weights: with few rows each byte once, whatever the format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.pallas_kernels.gpu import packed
from jaxllm.pallas_kernels.gpu.few_rows import few_rows_of_blocks, few_rows_of_groups
from jaxllm.pallas_kernels.gpu.matmul import integer_matmul, matmul
from jaxllm.pallas_kernels.gpu.products import linear
from jaxllm.pallas_kernels.gpu.route import RowLists, list_rows
from jaxllm.quantization.weight import Weight
from tests.pallas_kernels.gpu import test_block_scaled, test_int8, test_matmul, test_packed
from tests.pallas_kernels.gpu.bytes_read import bytes_read

pytestmark = pytest.mark.hardware

MOST = 1.01
"""Of the bytes that a weight is stored in."""

LEVELS = "4 bits, levels"


def made(name: str, *shape: int) -> Weight:
    """A weight of any numbers, of a kind that a kernel reads."""
    if name == "fp8 in blocks":
        return test_block_scaled.blocks(*shape)
    if name == "integers":
        return test_int8.weights(*shape)
    if name in test_packed.KINDS:
        return test_packed.tiles(name, *shape)[0]
    return test_matmul.KINDS[name](np.random.default_rng().standard_normal(shape).astype(np.float32))


def share_read(weight: Weight, function: Callable[..., Any], x: jax.Array, *lists: RowLists) -> float:
    """Of the weight's bytes, those that `function(weight, x, *lists)` loads: of all that isn't a row's or a list."""
    others = {array.shape for array in jax.tree.leaves(lists)}
    found = bytes_read(function, weight, x, *lists)
    read = sum(count for (shape, _), count in found.items() if shape[0] != len(x) and shape not in others)
    return read / sum(array.nbytes for array in jax.tree.leaves(weight))


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("name", [*test_packed.KINDS, LEVELS, "fp8 in blocks", "integers"])
def test_few_rows_read_each_byte_once(name: str, rows: int) -> None:
    """In as many parts as a long row is walked in."""
    weight = made(name, 128, 4096)
    x = jnp.ones((rows, 4096), jnp.float32)
    assert 0.99 <= share_read(weight, lambda weight, x: linear(x, weight, interpret=True), x) <= MOST


@pytest.mark.parametrize(("name", "inputs"), [("Q5_1", 2816), ("Q5_1", 1408), ("Q5_0", 896), ("4 bits", 1696)])
def test_rows_that_end_within_a_tile_are_read_once(name: str, inputs: int) -> None:
    weight = made(name, 128, inputs)
    x = jnp.ones((16, inputs), jnp.float32)
    assert 0.99 <= share_read(weight, lambda weight, x: linear(x, weight, interpret=True), x) <= MOST


@pytest.mark.parametrize("activated", [False, True])
@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        *((name, 512) for name in ("Q4_0", "Q4_K", "Q6_K", "4 bits", "MXFP4", LEVELS, "fp8 in blocks", "integers")),
        ("Q5_1", 704),
    ],
)
def test_experts_read_their_own_weights_once(name: str, inputs: int, activated: bool) -> None:
    """Of three experts the first and the last have rows."""
    weight = made(name, 3, 128, inputs)
    rows = 16
    lists = list_rows(jnp.repeat(jnp.array([0, 2]), 8), 3, rows, 16, interpret=True)
    options: dict[str, Any] = {"activation": jax.nn.silu if activated else None, "interpret": True}

    def run(weight: Weight, x: jax.Array, lists: RowLists) -> Any:
        (matrix,) = weight.kernel_matrices or ()
        if name == "fp8 in blocks":
            return few_rows_of_blocks(x, matrix, lists, rows, dtype=jnp.bfloat16, **options)
        if name == "integers":
            return integer_matmul(x, matrix, lists, rows, 16, dtype=jnp.float32, **options)
        if name == LEVELS:
            return few_rows_of_groups(x, matrix, lists, rows, **options)
        return packed.grouped_matmul(x, matrix, lists, rows, 16, **options)

    assert 2 / 3 <= share_read(weight, run, jnp.ones((rows, inputs), jnp.float32), lists) <= 2 / 3 * MOST


def test_what_is_read_twice_is_seen() -> None:
    """By each of two tiles of rows: else the tests above would show nothing."""
    weight = made("fp8", 96, 128)

    def run(weight: Weight, x: jax.Array) -> Any:
        (matrix,) = weight.kernel_matrices or ()
        return matmul(x, matrix, interpret=True)

    few, many = (share_read(weight, run, jnp.ones((rows, 128), jnp.float32)) for rows in (16, 129))
    assert few == pytest.approx(1, rel=0.01) and many == pytest.approx(2, rel=0.01)
