"""Encoders: how far the quantized weights are from the float ones."""

from __future__ import annotations

import gguf
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from jaxllm.quantization.coded import groups, per_channel
from jaxllm.quantization.gguf_encode import ENCODERS, encode
from jaxllm.quantization.stored import FP8, INT8
from jaxllm.quantization.weight import Weight
from tests.quantization.blocks import gguf_dequantize, stored

FLOAT32 = np.dtype(np.float32)

LLAMA_CPP = {
    ("normal", "Q2_K"): 0.005947421, ("normal", "Q3_K"): 0.003022275, ("normal", "Q4_K"): 0.001432775,
    ("normal", "Q5_K"): 0.000726163, ("normal", "Q6_K"): 0.000355868, ("heavy", "Q2_K"): 0.009849456,
    ("heavy", "Q3_K"): 0.005236706, ("heavy", "Q4_K"): 0.002475949, ("heavy", "Q5_K"): 0.001248346,
    ("heavy", "Q6_K"): 0.000653841,
}  # fmt: skip
"""Root mean square errors of ggml's own quantizer (ggml-quants.c at d99724f2, compiled) on `samples`."""


def samples(name: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    normal = rng.normal(size=(64, 2048)).astype(np.float32) * np.float32(0.02)
    return normal if name == "normal" else (rng.standard_t(4, size=(64, 2048)) * 0.02).astype(np.float32)


def expanded(weight: Weight) -> np.ndarray:
    return np.asarray(jax.jit(lambda w: w.dequantize())(weight))


def rmse(found: np.ndarray, values: np.ndarray) -> float:
    return float(np.sqrt(np.mean((found - values) ** 2)))


@pytest.mark.parametrize(("name", "dtype"), LLAMA_CPP)
def test_k_quants_are_as_good_as_llama_cpps(name, dtype):
    values = samples(name)
    error = rmse(gguf_dequantize(encode(values, dtype), dtype), values)
    assert error < 1.02 * LLAMA_CPP[name, dtype]


@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("name", ["normal", "heavy"])
def test_others_are_no_worse_than_ggufs(name, dtype):
    values = samples(name)
    theirs = gguf.quants.quantize(values, GGMLQuantizationType[dtype])
    error = rmse(gguf_dequantize(encode(values, dtype), dtype), values)
    limit = rmse(gguf.quants.dequantize(theirs, GGMLQuantizationType[dtype]), values)
    assert error <= limit * (1.0001 if dtype == "Q8_0" else 0.99)


@pytest.mark.parametrize("dtype", ENCODERS)
@pytest.mark.parametrize("fill", [0.0, 0.25, -0.25])
def test_constant_weights_survive(dtype, fill):
    values = np.full((2, 256), fill, np.float32)
    np.testing.assert_allclose(gguf_dequantize(encode(values, dtype), dtype), values, rtol=0.02)


@pytest.mark.parametrize("dtype", ENCODERS)
def test_one_large_weight_in_a_block_of_zeros(dtype):
    values = np.zeros((3, 256), np.float32)
    values[0, 17], values[2, 255] = 3.0, -0.5
    np.testing.assert_allclose(gguf_dequantize(encode(values, dtype), dtype), values, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize(("codes", "step"), [(INT8, 1 / 127 / 2), (FP8, 1 / 16)])
def test_eight_bits_a_channel(codes, step):
    values = samples("heavy")
    values[3] = 0
    weight = per_channel(codes, FLOAT32).pack([stored(values)], None)
    found = expanded(weight)
    limit = step * (np.abs(values).max(axis=1, keepdims=True) if codes == INT8 else np.abs(values))
    assert (np.abs(found - values) <= limit * 1.001 + 2**-9 * np.abs(values).max(axis=1, keepdims=True) / 448).all()


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", [32, 128])
def test_four_bits_a_group(symmetric, group):
    values = samples("normal")
    weight = groups(FLOAT32, 4, group, symmetric).pack([stored(values)], None)
    grouped = values.reshape(64, -1, group)
    spread = (
        np.maximum(grouped.max(-1) / 7, -grouped.min(-1) / 8) if symmetric else (grouped.max(-1) - grouped.min(-1)) / 15
    )
    # Half a step, and what rounding the zero point moves the ends of the range by.
    error = np.abs(expanded(weight).reshape(grouped.shape) - grouped)
    assert (error <= spread[..., None] * (0.5 if symmetric else 1.01) + 1e-4).all()
    assert weight.shape == values.shape


WEIGHTED = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


@pytest.mark.parametrize("dtype", WEIGHTED)
def test_errors_are_small_where_an_importance_matrix_says(dtype):
    """The error that an output sees: each input's by how large that input is."""
    values = samples("heavy")
    importance = np.exp(np.random.default_rng(1).normal(0, 1.5, values.shape[-1])).astype(np.float32)
    plain, weighted = (gguf_dequantize(encode(values, dtype, given), dtype) for given in (None, importance))
    errors = [float((importance * (found - values) ** 2).sum()) for found in (plain, weighted)]
    assert errors[1] < 0.93 * errors[0]


def test_each_expert_has_an_importance_of_its_own():
    values = samples("normal")[:8].reshape(2, 4, 2048)
    importance = np.exp(np.random.default_rng(1).normal(0, 1.5, (2, 2048))).astype(np.float32)
    together = encode(values, "Q6_K", importance)
    for expert in range(2):
        np.testing.assert_array_equal(together[expert], encode(values[expert], "Q6_K", importance[expert]))


def test_inputs_that_were_never_used_are_not_lost():
    values = samples("normal")[:4]
    for dtype in WEIGHTED:
        found = gguf_dequantize(encode(values, dtype, np.zeros(2048, np.float32)), dtype)
        assert rmse(found, values) < 0.4 * rmse(0 * values, values), dtype
