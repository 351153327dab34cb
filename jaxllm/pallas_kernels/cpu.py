"""The C++ kernels' part in a layer: products of weights in tiles with what stands around them, and attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm import cpu_kernels
from jaxllm.pallas_kernels import products
from jaxllm.pallas_kernels.grouped_matmul import tiles as reference_grouped_matmul
from jaxllm.pallas_kernels.metadata import StepMetadata
from jaxllm.pallas_kernels.norms import Norm, RootMeanSquare
from jaxllm.pallas_kernels.pages import Pages

ACTIVATIONS = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}
"""Names in configs -> names of the kernels."""


def linear(
    x: Float[Array, "T i"],
    weight: Any,
    norm: Norm | None = None,
    residual: Float[Array, "T o"] | None = None,
    dtype: Any = jnp.float32,
) -> Float[Array, "T o"]:
    """`weight.matmul(norm(x)) + residual` in one pass where the weight lies in tiles."""
    matrices = weight.matrices
    if matrices is None:
        if len(x) > 1:
            return products.linear(x, weight, norm, residual, dtype)
        x = jnp.repeat(x, 2, axis=0)  # one row is no product of matrices to XLA
        residual = None if residual is None else jnp.repeat(residual, 2, axis=0)
        return products.linear(x, weight, norm, residual, dtype)[:1]
    x, native = _before(x, norm)
    if len(matrices) == 1:
        return cpu_kernels.linears(x, matrices, norm=native, residual=residual)[0].astype(dtype)
    out = jnp.concatenate(cpu_kernels.linears(x, matrices, norm=native), axis=-1)
    return (out if residual is None else out + residual).astype(dtype)


def segments(x: Float[Array, "T i"], weight: Any, norm: Norm | None) -> tuple[jax.Array, ...] | None:
    """The products of a fused weight's parts, not joined; None where it is no such weight."""
    matrices = weight.matrices
    if matrices is None:
        return None
    x, native = _before(x, norm)
    return cpu_kernels.linears(x, matrices, norm=native)


def gated_mlp(
    x: Float[Array, "T i"],
    gate_up: Any,
    down: Any,
    activation: str,
    norm: Norm | None,
    residual: Float[Array, "T o"] | None,
    dtype: Any,
) -> Float[Array, "T o"] | None:
    """The three products and what is between them in one pass; None where there is no kernel for it."""
    first, second = gate_up.matrices, down.matrices
    if first is None or second is None or activation not in ACTIVATIONS:
        return None
    if len(first) != 2 or len(second) != 1 or second[0].inputs != first[0].rows:
        return None
    x, native = _before(x, norm)
    gate, up = first
    out = cpu_kernels.mlp(x, gate, up, second[0], ACTIVATIONS[activation], norm=native, residual=residual)
    return out.astype(dtype)


def most_likely(x: Float[Array, "R i"], weight: Any, rows: int) -> Int[Array, "R"] | None:
    """The greatest of the first `rows` products without any lying in memory; None where the weight is not in tiles."""
    matrices = weight.matrices
    if matrices is None or len(matrices) != 1:
        return None
    return cpu_kernels.argmax(x, matrices[0]._replace(rows=rows))


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    pages: Pages,
    meta: StepMetadata,
    *,
    angles: Any = None,
    norms: tuple[RootMeanSquare, RootMeanSquare] | None = None,
    **options: Any,
) -> tuple[jax.Array, Pages]:
    """`PagedAttention` of heads that are normed and rotated on the way, where that is asked for."""
    rotary = None if angles is None else cpu_kernels.Rotary(angles.cos, angles.sin, angles.interleaved)
    heads = None if norms is None else cpu_kernels.HeadNorms(norms[0].weight, norms[1].weight, norms[0].eps)
    return cpu_kernels.attention(
        q, k, v, pages, meta.positions, meta.seq_ids, meta.page_table, rotary=rotary, norms=heads, **options
    )


def grouped_matmul(x: Float[Array, "N i"], weights: Any, group_sizes: Int[Array, "X"]) -> Float[Array, "N o"]:
    """Each group of rows by its own matrix; only those that have rows are read."""
    matrices = weights.matrices
    if matrices is None or len(matrices) != 1:
        return reference_grouped_matmul(x, weights, group_sizes)
    return cpu_kernels.grouped_matmul(x, matrices[0], group_sizes)


def _before(x: jax.Array, norm: Norm | None) -> tuple[jax.Array, cpu_kernels.RowNorm | None]:
    """What the kernels take: the norm with `x` as it is, or `x` behind a norm that they do not know."""
    if isinstance(norm, RootMeanSquare):
        return x, cpu_kernels.RowNorm(norm.weight, norm.eps)
    return (x if norm is None else norm(x)), None
