"""Normalisation."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxllm.models.layers.params import param


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis (Zhang & Sennrich 2019, arXiv:1910.07467), in float32.

    The weight is the whole factor: families that store `w` and multiply by `1 + w` have 1 added when they are loaded.
    """

    def __init__(self, size: int, eps: float):
        self.weight = param((size,), jnp.float32)
        self.eps = eps

    def __call__(self, x: Float[Array, "... n"]) -> Float[Array, "... n"]:
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * self.weight[...]).astype(x.dtype)
