"""Normalisation."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.models.layers.params import param
from jaxllm.models.options import BuildOptions
from jaxllm.pallas_kernels import Kernels, Norm, RootMeanSquare
from jaxllm.sharding.layout import Layout, Segment
from jaxllm.sharding.mesh import TENSOR


class RMSNorm(nnx.Module):
    """`RootMeanSquare` with a weight that is loaded.

    The weight is the whole factor: families that store `w` and multiply by `1 + w` have 1 added when they are loaded.
    """

    def __init__(self, size: int, eps: float, kernels: Kernels):
        self.weight = param((size,), jnp.float32)
        self.eps = eps
        self.kernels = kernels

    def __call__(self, x: Float[Array, "... n"]) -> Float[Array, "... n"]:
        return self.traced(x)

    @property
    def traced(self) -> Norm:
        """The norm with its weight as it is now: what kernels take."""
        return RootMeanSquare(self.weight[...], self.eps, self.kernels.normalise)


class LayerNorm(nnx.Module):
    """Mean and variance over the last axis (Ba et al. 2016, arXiv:1607.06450), in float32."""

    def __init__(self, size: int, eps: float, kernels: Kernels):
        self.weight = param((size,), jnp.float32)
        self.bias = param((size,), jnp.float32)
        self.eps = eps
        self.kernels = kernels

    @property
    def traced(self) -> Norm:
        """The norm itself: products take no such."""
        return self.__call__

    def __call__(self, x: Float[Array, "... n"]) -> Float[Array, "... n"]:
        return self.kernels.normalise(x, self.weight[...], self.bias[...], self.eps, True)


class HeadLayerNorms(nnx.Module):
    """A LayerNorm for every head, each with a weight of its own and no bias."""

    def __init__(self, num_heads: int, head_dim: int, eps: float, shards: int, options: BuildOptions):
        layout = Layout((Segment(num_heads, shards),), options.tp)
        self.weight = param((layout.rows, head_dim), jnp.float32, (TENSOR, None), layout)
        self.eps = eps
        self.kernels = options.kernels

    def __call__(self, x: Float[Array, "T H D"]) -> Float[Array, "T H D"]:
        return self.kernels.normalise(x, self.weight[...], None, self.eps, True)
