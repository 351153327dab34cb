"""Matrix products with weights stored `[out, in]`, as checkpoints have them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxllm.models.layers.params import param
from jaxllm.sharding.collectives import sum_over_tensor
from jaxllm.sharding.layout import Layout
from jaxllm.sharding.mesh import TENSOR


def matmul(x: Float[Array, "T i"], weight: Float[Array, "o i"]) -> Float[Array, "T o"]:
    """`x @ weight.T`, accumulated and returned in float32.

    A float32 result is also what keeps XLA:CPU on its fast path for bfloat16 weights.
    """
    precision = lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    return lax.dot_general(
        x.astype(weight.dtype),
        weight,
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


class ColumnLinear(nnx.Module):
    """A product whose output rows are divided over the tensor axis, several checkpoint tensors fused in one weight."""

    def __init__(self, in_features: int, layout: Layout, dtype: Any, bias: bool = False):
        self.weight = param((layout.rows, in_features), dtype, (TENSOR, None), layout)
        self.bias = param((layout.rows,), jnp.float32, (TENSOR,), layout) if bias else None

    def __call__(self, x: Float[Array, "T i"]) -> Float[Array, "T o"]:
        out = matmul(x, self.weight[...])
        if self.bias is not None:
            out = out + self.bias[...]
        return out.astype(x.dtype)


class RowLinear(nnx.Module):
    """A product whose inputs are divided over the tensor axis; the partial results are added in float32."""

    def __init__(self, in_features: int, out_features: int, dtype: Any, bias: bool = False):
        self.weight = param((out_features, in_features), dtype, (None, TENSOR))
        self.bias = param((out_features,), jnp.float32) if bias else None

    def __call__(self, x: Float[Array, "T i"]) -> Float[Array, "T o"]:
        out = sum_over_tensor(matmul(x, self.weight[...]))
        if self.bias is not None:
            out = out + self.bias[...]
        return out.astype(x.dtype)
