"""Norms that stand by themselves, against float64."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import cpu_kernels
from tests.cpu_kernels.weights import ISAS, needs_kernels

pytestmark = needs_kernels


@partial(jax.jit, static_argnames=("centred",))
def normalise(x, weight, bias, centred):
    return cpu_kernels.normalise(x, weight, bias, 1e-3, centred)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape", [(3, 64), (1, 77), (5, 4, 20)])
def test_norms(isa, centred, with_bias, dtype, shape):
    """Of heads too, where each has a weight of its own."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=shape) + 1, dtype)
    weight, bias = rng.normal(size=shape[1:]).astype(np.float32), rng.normal(size=shape[-1]).astype(np.float32)
    y = np.asarray(x, np.float64)
    y = y - y.mean(-1, keepdims=True) if centred else y
    expected = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-3) * weight + (bias if with_bias else 0)
    with cpu_kernels.forced(isa):
        out = normalise(x, weight, bias if with_bias else None, centred)
    assert out.dtype == x.dtype
    tolerance = 1e-5 if dtype == np.float32 else 1e-2
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=tolerance, atol=tolerance)
