"""Weights whose inputs were sorted (act-order) on the kernels of NVIDIA GPUs, against float64."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.pallas_kernels.gpu.products import linear
from jaxllm.quantization.coded import Ordered
from jaxllm.quantization.weight import Weight, fuse
from tests.pallas_kernels.gpu.test_experts import EXPERTS, SIZE, check_layer, values
from tests.pallas_kernels.gpu.test_matmul import KINDS
from tests.support.gpu_here import INTERPRET

pytestmark = pytest.mark.hardware


def ordered(kind: str, matrix: np.ndarray, seed: int = 0) -> Weight:
    """A matrix, or a stack with an order of inputs for each, of which `matrix` has the columns as they are kept."""
    random, inputs = np.random.default_rng(seed), matrix.shape[-1]
    orders = [random.permutation(inputs) for _ in range(matrix[..., 0, 0].size)]
    order = np.reshape(orders, (*matrix.shape[:-2], inputs)).astype(np.int32)
    return Ordered(KINDS[kind](matrix), jnp.asarray(order))


def by_hand(weight: Any) -> np.ndarray:
    """Float64, each input's column put in its place."""
    kept = np.asarray(weight.weight.dequantize(), np.float64)
    natural = np.empty_like(kept)
    for index in np.ndindex(kept.shape[:-2]):
        for column, place in enumerate(np.asarray(weight.order)[index]):
            natural[index][:, place] = kept[index][:, column]
    return natural


@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("kind", ["4 bits", "4 bits, symmetric, groups of 96", "8 bits", "int8"])
def test_inputs_are_brought_into_the_columns_order(kind: str, rows: int) -> None:
    weight = ordered(kind, values(72, 192))
    x = values(rows, 192)
    out = linear(jnp.asarray(x), weight, interpret=INTERPRET)
    expected = x.astype(np.float64) @ by_hand(weight).T
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


def test_parts_of_a_product_may_have_different_orders() -> None:
    parts = [ordered("4 bits", values(rows, 96), seed) for seed, rows in enumerate((40, 24, 24))]
    x = values(3, 96)
    expected = x.astype(np.float64) @ np.concatenate([by_hand(part) for part in parts]).T
    np.testing.assert_allclose(linear(jnp.asarray(x), fuse(parts), interpret=INTERPRET), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 13])
@pytest.mark.parametrize("together", [True, False])
def test_each_expert_has_an_order_of_its_own(together: bool, tokens: int) -> None:
    """Of gate and up together, so that the activation is inside of the kernel, or of each."""
    hidden = 64
    if together:
        gate_up = [ordered("4 bits", values(EXPERTS, 2 * hidden, SIZE))]
    else:
        gate_up = [ordered("4 bits", values(EXPERTS, hidden, SIZE), seed) for seed in range(2)]
    check_layer(gate_up, [ordered("4 bits", values(EXPERTS, SIZE, hidden), 5)], tokens)
