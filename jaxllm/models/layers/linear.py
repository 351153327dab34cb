"""Matrix products with weights stored `[out, in]`, as checkpoints have them."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.models.layers.params import param, weight
from jaxllm.models.options import BuildOptions
from jaxllm.sharding.collectives import sum_over_tensor
from jaxllm.sharding.layout import Layout
from jaxllm.sharding.mesh import TENSOR, Axes


class Linear(nnx.Module):
    """A product with an `[o, i]` weight, and a bias or none; every device does it whole unless `axes` divide it."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        options: BuildOptions,
        bias: bool = False,
        *,
        axes: Axes = (None, None),
        layout: Layout | None = None,
    ):
        self.weight = weight((out_features, in_features), options.dtype, axes, layout)
        self.bias = param((out_features,), jnp.float32, axes[:1], layout) if bias else None
        self.kernels = options.kernels

    def __call__(self, x: Float[Array, "T i"]) -> Float[Array, "T o"]:
        return self._with_bias(self.partial(x)).astype(x.dtype)

    def partial(self, x: Float[Array, "T i"]) -> Float[Array, "T o"]:
        """This device's product alone, in float32: without bias or sum over devices."""
        return self.kernels.linear(x, self.weight.get_value())

    def _with_bias(self, out: Float[Array, "T o"]) -> Float[Array, "T o"]:
        return out if self.bias is None else out + self.bias[...]


class ColumnLinear(Linear):
    """A product whose output rows are divided over the tensor axis, several checkpoint tensors fused in one weight."""

    def __init__(self, in_features: int, layout: Layout, options: BuildOptions, bias: bool = False):
        super().__init__(in_features, layout.rows, options, bias, axes=(TENSOR, None), layout=layout)


class RowLinear(Linear):
    """A product whose inputs are divided over the tensor axis; the partial results are added in float32."""

    def __init__(self, in_features: int, out_features: int, options: BuildOptions, bias: bool = False):
        super().__init__(in_features, out_features, options, bias, axes=(None, TENSOR))

    def __call__(self, x: Float[Array, "T i"]) -> Float[Array, "T o"]:
        return self._with_bias(sum_over_tensor(self.partial(x))).astype(x.dtype)
