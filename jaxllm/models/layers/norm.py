"""Normalisation."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxllm.models.layers.params import param
from jaxllm.pallas_kernels import Norm, RootMeanSquare
from jaxllm.sharding.layout import Layout, Segment
from jaxllm.sharding.mesh import TENSOR


class RMSNorm(nnx.Module):
    """`RootMeanSquare` with a weight that is loaded.

    The weight is the whole factor: families that store `w` and multiply by `1 + w` have 1 added when they are loaded.
    """

    def __init__(self, size: int, eps: float):
        self.weight = param((size,), jnp.float32)
        self.eps = eps

    def __call__(self, x: Float[Array, "... n"]) -> Float[Array, "... n"]:
        return self.traced(x)

    @property
    def traced(self) -> Norm:
        """The norm with its weight as it is now: what kernels take."""
        return RootMeanSquare(self.weight[...], self.eps)


class LayerNorm(nnx.Module):
    """Mean and variance over the last axis (Ba et al. 2016, arXiv:1607.06450), in float32."""

    def __init__(self, size: int, eps: float):
        self.weight = param((size,), jnp.float32)
        self.bias = param((size,), jnp.float32)
        self.eps = eps

    @property
    def traced(self) -> Norm:
        """The norm itself: kernels know no such."""
        return self.__call__

    def __call__(self, x: Float[Array, "... n"]) -> Float[Array, "... n"]:
        return (_standardized(x, self.eps) * self.weight[...] + self.bias[...]).astype(x.dtype)


class HeadLayerNorms(nnx.Module):
    """A LayerNorm for every head, each with a weight of its own and no bias."""

    def __init__(self, num_heads: int, head_dim: int, eps: float, shards: int, tp: int):
        layout = Layout((Segment(num_heads, shards),), tp)
        self.weight = param((layout.rows, head_dim), jnp.float32, (TENSOR, None), layout)
        self.eps = eps

    def __call__(self, x: Float[Array, "T H D"]) -> Float[Array, "T H D"]:
        return (_standardized(x, self.eps) * self.weight[...]).astype(x.dtype)


def _standardized(x: Float[Array, "... n"], eps: float) -> Any:
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    return y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
