"""Normalisation."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxllm.models.layers.linear import param
from jaxllm.models.options import BuildOptions
from jaxllm.pallas_kernels import Kernels, Norm, RootMeanSquare
from jaxllm.sharding.mesh import TENSOR, Layout, Segment, split_rows, sum_over_tensor, tensor_rank, tensor_size


class RMSNorm(nnx.Module):
    """`RootMeanSquare` with a weight that is loaded.

    The weight is the whole factor: families that store `w` and multiply by `1 + w` have 1 added when they are loaded.
    """

    def __init__(self, size: int, eps: float, kernels: Kernels):
        self.weight = param((size,), jnp.float32)
        self.eps, self.kernels = eps, kernels

    def __call__(self, x: Float[Array, "... n"]) -> Float[Array, "... n"]:
        return self.traced(x)

    @property
    def traced(self) -> Norm:
        """The norm with its weight as it is now: what kernels take."""
        return RootMeanSquare(self.weight[...], self.eps, self.kernels.normalise)


class UnitRMSNorm(RMSNorm):
    """`RootMeanSquare` without a weight."""

    def __init__(self, size: int, eps: float, kernels: Kernels):
        self.size = size
        self.eps, self.kernels = eps, kernels

    @property
    def traced(self) -> Norm:
        return RootMeanSquare(jnp.ones(self.size, jnp.float32), self.eps, self.kernels.normalise)


class WholeRMSNorm(nnx.Module):
    """A root mean square over all heads of a token together, whose channels are divided over the tensor axis.

    With more devices than heads some have the same ones: each counts as often as the others.
    """

    def __init__(self, size: int, eps: float, shards: int, options: BuildOptions):
        layout = Layout((Segment(size, shards),), options.tp)
        self.weight = param((layout.rows,), jnp.float32, (TENSOR,), layout)
        self.eps, self.kernels = eps, options.kernels

    def __call__(self, x: Float[Array, "T H D"]) -> Float[Array, "T H D"]:
        flat, weight = x.reshape(x.shape[0], -1), self.weight[...]
        if tensor_size() == 1:
            return self.kernels.normalise(flat, weight, None, self.eps, False).reshape(x.shape)
        y = flat.astype(jnp.float32)
        squares = sum_over_tensor(jnp.sum(y * y, axis=-1, keepdims=True))
        y = y * lax.rsqrt(squares / (tensor_size() * y.shape[-1]) + self.eps) * weight
        return y.astype(x.dtype).reshape(x.shape)


class GroupRMSNorm(nnx.Module):
    """A root mean square over the channels of each group; channels are divided over the tensor axis.

    With more devices than groups each has a part of one, and adds its squares to those of the others that do.
    """

    def __init__(self, size: int, groups: int, eps: float, options: BuildOptions):
        self.weight = param((size,), jnp.float32, (TENSOR,), split_rows(size, options.tp))
        self.groups = groups
        self.eps, self.kernels = eps, options.kernels

    def __call__(self, x: Float[Array, "T n"]) -> Float[Array, "T n"]:
        weight, devices = self.weight[...], tensor_size()
        if self.groups % devices == 0:
            groups = self.groups // devices
            shape = (groups, x.shape[-1] // groups)
            out = self.kernels.normalise(x.reshape(-1, *shape), weight.reshape(shape), None, self.eps, False)
            return out.reshape(x.shape)
        y = x.astype(jnp.float32)
        own = jnp.arange(self.groups) == tensor_rank() * self.groups // devices
        squares = sum_over_tensor(jnp.where(own, jnp.sum(y * y, axis=-1, keepdims=True), 0))
        mean = jnp.sum(jnp.where(own, squares, 0), axis=-1, keepdims=True) * self.groups / (devices * y.shape[-1])
        return (y * lax.rsqrt(mean + self.eps) * weight).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Mean and variance over the last axis (Ba et al. 2016, arXiv:1607.06450), in float32."""

    def __init__(self, size: int, eps: float, kernels: Kernels, bias: bool = True, weight: bool = True):
        self.weight = param((size,), jnp.float32) if weight else None
        self.bias = param((size,), jnp.float32) if bias else None
        self.eps, self.kernels = eps, kernels

    @property
    def traced(self) -> Norm:
        return self.__call__

    def __call__(self, x: Float[Array, "... n"]) -> Float[Array, "... n"]:
        bias = None if self.bias is None else self.bias[...]
        weight = jnp.ones(x.shape[-1], jnp.float32) if self.weight is None else self.weight[...]
        return self.kernels.normalise(x, weight, bias, self.eps, True)


def norm_of_kind(kind: str, size: int, eps: float, kernels: Kernels) -> RMSNorm | LayerNorm:
    """The norm that a config's `norm` names."""
    if kind in ("rms", "unit"):
        return (RMSNorm if kind == "rms" else UnitRMSNorm)(size, eps, kernels)
    return LayerNorm(size, eps, kernels, bias=kind == "layer", weight=kind != "layer_unit")


class HeadLayerNorms(LayerNorm):
    """A LayerNorm for every head, each with a weight of its own and no bias."""

    def __init__(self, num_heads: int, head_dim: int, eps: float, shards: int, options: BuildOptions):
        layout = Layout((Segment(num_heads, shards),), options.tp)
        self.weight = param((layout.rows, head_dim), jnp.float32, (TENSOR, None), layout)
        self.bias = None
        self.eps, self.kernels = eps, options.kernels
