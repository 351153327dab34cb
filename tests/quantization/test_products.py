"""What every kind of weight multiplies to is what its expansion does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.pallas_kernels.products import ragged_dot, tiles
from jaxllm.quantization import weight as weights
from jaxllm.quantization.schemes import SCHEMES
from jaxllm.quantization.weight import Fused, Weight
from tests.quantization.blocks import random_weight

EXACT = [name for name in SCHEMES if name != "w8a8"]
"""Kinds whose products round nothing but the weights."""


def expanded(weight: Weight) -> np.ndarray:
    return np.asarray(jax.jit(lambda w: w.dequantize())(weight), np.float64)


def inputs(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("scheme", EXACT)
@pytest.mark.parametrize(("rows", "tokens"), [(1, 2), (40, 3), (97, 17)])
def test_products_go_tile_by_tile(scheme, rows, tokens, monkeypatch):
    monkeypatch.setattr(weights, "TILE", 10 * 512)  # 97 rows are nine tiles of 10 and one that overlaps
    weight, x = random_weight(scheme, rows, 512), inputs(tokens, 512)
    found = jax.jit(lambda w, x: w.matmul(x))(weight, x)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, x @ expanded(weight).T, atol=1e-4)


def test_a_product_never_holds_the_expanded_matrix():
    weight = random_weight("q4_0", 1 << 14, 512)
    compiled = jax.jit(lambda w, x: w.matmul(x)).lower(weight, jnp.zeros((2, 512))).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < (1 << 14) * 512 * 4 / 2


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_are_those_of_the_expansion(scheme):
    weight, ids = random_weight(scheme, 9, 256), np.array([8, 0, 3, 3])
    np.testing.assert_array_equal(weight.rows(jnp.asarray(ids)), expanded(weight)[ids])


@pytest.mark.parametrize("scheme", EXACT)
@pytest.mark.parametrize("grouped", [tiles, ragged_dot])
def test_experts(scheme, grouped):
    weight, x, sizes = random_weight(scheme, 3, 24, 256), inputs(6, 256), np.array([4, 0, 1])
    found = jax.jit(grouped)(x, weight, jnp.asarray(sizes))
    matrices = expanded(weight)
    expected = np.zeros((6, 24))
    for row, expert in enumerate(np.repeat(np.arange(3), sizes)):
        expected[row] = matrices[expert] @ x[row]
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("scheme", EXACT)
def test_latent_attention_uses_rows_head_by_head(scheme):
    weight, x = random_weight(scheme, 4 * 5, 256), inputs(3, 4, 256)
    heads = expanded(weight).reshape(4, 5, 256)
    out = jax.jit(lambda w, x: w.expand_heads(x, 5, slice(2, None)))(weight, x)
    np.testing.assert_allclose(out, np.einsum("thi,hoi->tho", x, heads[:, 2:]), atol=1e-4)
    back = jax.jit(lambda w, x: w.absorb_heads(x, 5, slice(2)))(weight, x[:, :, :2])
    np.testing.assert_allclose(back, np.einsum("tho,hoi->thi", x[:, :, :2], heads[:, :2]), atol=1e-4)


def test_fused_products_of_several_kinds():
    parts = tuple(random_weight(scheme, 6, 256, seed=i) for i, scheme in enumerate(("q4k", "q6k", "int4", "fp8")))
    x = inputs(2, 256)
    found = jax.jit(lambda w, x: w.matmul(x))(Fused(parts), x)
    np.testing.assert_allclose(found, x @ np.concatenate(list(map(expanded, parts))).T, atol=1e-4)


@pytest.mark.parametrize("size", [40, 64, 256, 300])
def test_w8a8_rounds_each_64_inputs_of_a_row_to_int8(size):
    weight, x = random_weight("w8a8", 12, size), inputs(3, size)
    x[1] *= 1000  # others do not notice
    x[0, :64] *= 1000
    x[2] = 0
    found = jax.jit(lambda w, x: w.matmul(x))(weight, x)
    rounded = np.empty_like(x, np.float64)
    for start in range(0, size, 64):
        run = x[:, start : start + 64].astype(np.float64)
        step = np.maximum(np.abs(run).max(axis=1, keepdims=True), 1e-9) / 127
        rounded[:, start : start + 64] = np.round(run / step) * step
    np.testing.assert_allclose(found, rounded @ expanded(weight).T, rtol=1e-4, atol=1e-4)
