"""Rows of zeros at the end of a batch are not multiplied: those before them get the same bits as without them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import cpu_kernels
from jaxllm.cpu_kernels import RowNorm
from tests.cpu_kernels.weights import ISAS, needs_kernels, random_weights

INPUTS, ROWS = 256, 45

pytestmark = [
    needs_kernels,
    pytest.mark.parametrize("isa", ISAS),
    pytest.mark.parametrize(("live", "padding"), [(0, 1), (0, 70), (1, 1), (1, 31), (11, 53), (64, 1), (65, 100)]),
]


def batch(live: int, padding: int, dtype=np.float32) -> np.ndarray:
    """Random rows, the second of which is zeros as well, then rows of zeros."""
    x = np.random.default_rng(live).normal(size=(live, INPUTS))
    x[1:2] = 0
    return np.concatenate([x, np.zeros((padding, INPUTS))]).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_products_beside_a_residual_and_behind_a_norm(isa, live, padding, dtype):
    weights = [random_weights(format, ROWS, INPUTS).tiles for format in ("q4_1", "f32")]
    norm = RowNorm(jnp.linspace(0.5, 2, INPUTS), 1e-6, 0.5)
    residual = np.random.default_rng(1).normal(size=(live + padding, ROWS)).astype(np.float32)
    plain = jax.jit(lambda x: cpu_kernels.linears(x, weights, norm=norm))
    added = jax.jit(lambda x, residual: cpu_kernels.linears(x, weights[1:], residual=residual)[0])
    x = batch(live, padding, dtype)
    with cpu_kernels.forced(isa):
        products, sums = plain(x), added(x, residual)
        for product, alone in zip(products, plain(x[:live]) if live else (np.zeros((0, ROWS)),) * 2, strict=True):
            np.testing.assert_array_equal(product[:live], alone)
            np.testing.assert_array_equal(product[live:], 0)
        if live:
            np.testing.assert_array_equal(sums[:live], added(x[:live], residual[:live]))
        np.testing.assert_array_equal(sums[live:], residual[live:])


def test_an_mlp(isa, live, padding):
    gate, up = (random_weights("q4_k", 512, INPUTS, seed).tiles for seed in (3, 4))
    down = random_weights("q8_0", ROWS, 512, 5).tiles
    mlp = jax.jit(lambda x, residual: cpu_kernels.mlp(x, gate, up, down, "silu", residual=residual))
    x, residual = batch(live, padding), np.random.default_rng(1).normal(size=(live + padding, ROWS)).astype(np.float32)
    with cpu_kernels.forced(isa):
        y = mlp(x, residual)
        if live:
            np.testing.assert_array_equal(y[:live], mlp(x[:live], residual[:live]))
    np.testing.assert_array_equal(y[live:], residual[live:])


def test_the_greatest_of_as_many_zeros_is_the_first(isa, live, padding):
    head = random_weights("q6_k", ROWS, INPUTS).tiles
    argmax = jax.jit(lambda x: cpu_kernels.argmax(x, head))
    x = batch(live, padding)
    with cpu_kernels.forced(isa):
        found = argmax(x)
        if live:
            np.testing.assert_array_equal(found[:live], argmax(x[:live]))
    np.testing.assert_array_equal(found[live:], 0)


def test_they_are_not_multiplied(isa, live, padding):
    """Not even by what is infinite."""
    weights = random_weights("f32", ROWS, INPUTS)
    tiles = cpu_kernels.Tiles(cpu_kernels.repack("f32", np.full_like(weights.blocks, np.inf)), "f32", ROWS)
    with cpu_kernels.forced(isa):
        (y,) = jax.jit(lambda x: cpu_kernels.linears(x, [tiles]))(batch(live, padding))
    assert np.isfinite(y[live:]).all()
    assert not np.isfinite(y[:live]).any()
