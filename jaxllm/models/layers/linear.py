"""Matrix products with weights stored `[out, in]`, as checkpoints have them."""

from __future__ import annotations

from itertools import accumulate

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.models.layers.params import param, weight
from jaxllm.models.options import BuildOptions
from jaxllm.pallas_kernels import Norm
from jaxllm.sharding.collectives import sum_over_tensor, tensor_size
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

    def __call__(self, x: Float[Array, "T i"], norm: Norm | None = None) -> Float[Array, "T o"]:
        """The product with `x`, or with `norm(x)`."""
        if self.bias is None:
            return self.kernels.linear(x, self.weight.get_value(), norm, dtype=x.dtype)
        return self._with_bias(self.partial(x, norm)).astype(x.dtype)

    def partial(self, x: Float[Array, "T i"], norm: Norm | None = None) -> Float[Array, "T o"]:
        """This device's product alone, in float32: without bias or sum over devices."""
        return self.kernels.linear(x, self.weight.get_value(), norm)

    def _with_bias(self, out: Float[Array, "T o"]) -> Float[Array, "T o"]:
        return out if self.bias is None else out + self.bias[...]


class ColumnLinear(Linear):
    """A product whose output rows are divided over the tensor axis, several checkpoint tensors fused in one weight."""

    def __init__(self, in_features: int, layout: Layout, options: BuildOptions, bias: bool = False):
        super().__init__(in_features, layout.rows, options, bias, axes=(TENSOR, None), layout=layout)
        self.sizes = tuple(segment.rows // segment.shards for segment in layout.segments)

    def segments(self, x: Float[Array, "T i"], norm: Norm | None = None) -> list[Float[Array, "T o"]]:
        """The product, a tensor's rows at a time."""
        if self.bias is None:
            parts = self.kernels.segments(x, self.weight.get_value(), norm)
            if parts is not None and len(parts) == len(self.sizes):
                return [part.astype(x.dtype) for part in parts]
        return jnp.split(self(x, norm), list(accumulate(self.sizes))[:-1], axis=-1)


class RowLinear(Linear):
    """A product whose inputs are divided over the tensor axis; the partial results are added in float32."""

    def __init__(self, in_features: int, out_features: int, options: BuildOptions, bias: bool = False):
        super().__init__(in_features, out_features, options, bias, axes=(None, TENSOR))

    def __call__(
        self, x: Float[Array, "T i"], norm: Norm | None = None, residual: Float[Array, "T o"] | None = None
    ) -> Float[Array, "T o"]:
        """The sum of the devices' products, added to `residual` if there is one."""
        if self.bias is None and tensor_size() == 1:
            return self.kernels.linear(x, self.weight.get_value(), norm, residual, x.dtype)
        out = self._with_bias(sum_over_tensor(self.partial(x, norm))).astype(x.dtype)
        return out if residual is None else residual + out
