"""The C++ kernels' part in a layer: products of weights in tiles with what stands around them, and attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm import cpu_kernels
from jaxllm.pallas_kernels import products, reference
from jaxllm.pallas_kernels.delta_rule import EPS
from jaxllm.pallas_kernels.metadata import StepMetadata
from jaxllm.pallas_kernels.pages import Pages, stored_as_bits
from jaxllm.pallas_kernels.products import Norm, RootMeanSquare
from jaxllm.pallas_kernels.ssd import SSDInputs
from jaxllm.pallas_kernels.states import kept_length

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


def adapted(
    x: Float[Array, "T i"],
    weight: Any,
    norm: Norm | None,
    residual: Float[Array, "T o"] | None,
    arrays: cpu_kernels.AdapterArrays,
    uses: cpu_kernels.AdapterUses,
) -> tuple[jax.Array, ...] | None:
    """The parts of `norm(x)`'s product with what adapters add, in one pass; None where the weight has other parts."""
    matrices = weight.matrices
    if matrices is None or arrays.a.shape[1] != len(matrices) * arrays.b.shape[1]:
        return None
    x, native = _before(x, norm)
    return cpu_kernels.linears(x, matrices, norm=native, residual=residual, adapters=(arrays, uses))


def gated_mlp(
    x: Float[Array, "T i"],
    gate_up: Any,
    down: Any,
    activation: str,
    norm: Norm | None,
    residual: Float[Array, "T o"] | None,
    dtype: Any,
    adapters: tuple[cpu_kernels.AdapterArrays, cpu_kernels.AdapterArrays, cpu_kernels.AdapterUses] | None = None,
) -> Float[Array, "T o"] | None:
    """The three products and what is between them in one pass; None where there is no kernel for it."""
    first, second = gate_up.matrices, down.matrices
    if first is None or second is None or activation not in ACTIVATIONS:
        return None
    if len(first) != 2 or len(second) != 1 or second[0].inputs != first[0].rows:
        return None
    x, native = _before(x, norm)
    gate, up = first
    kind = ACTIVATIONS[activation]
    out = cpu_kernels.mlp(x, gate, up, second[0], kind, norm=native, residual=residual, adapters=adapters)
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
    """`reference.paged_attention` of heads that are normed and rotated on the way, where that is asked for."""
    rotary = None if angles is None else cpu_kernels.Rotary(angles.cos, angles.sin, angles.interleaved)
    heads = None if norms is None else cpu_kernels.HeadNorms(norms[0].weight, norms[1].weight, norms[0].eps)
    return cpu_kernels.attention(
        q, k, v, pages, meta.positions, meta.seq_ids, meta.page_table, rotary=rotary, norms=heads, **options
    )


OWN_PAGE = 16
"""Tokens of the pages that a step of whole texts writes and reads."""


def packed_attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    meta: StepMetadata,
    **options: Any,
) -> Float[Array, "T H D"]:
    """`reference.packed_attention` over pages of the step's own, in which each token sees up to its text's last."""
    if options["window"] is not None:
        return reference.packed_attention(q, k, v, meta, **options)
    count, lengths = len(q), meta.context_len
    pages = -(-lengths // OWN_PAGE)
    begins = 1 + jnp.cumsum(pages) - pages
    num_pages = 1 + count // OWN_PAGE + len(lengths)
    table = jnp.minimum(begins[:, None] + jnp.arange(-(-count // OWN_PAGE)), num_pages - 1)
    text = jnp.minimum(meta.seq_ids, len(lengths) - 1)
    positions, last = jnp.arange(count) - meta.query_start[text], lengths[text] - 1
    empty = jnp.zeros((num_pages, k.shape[1], OWN_PAGE, k.shape[2]), stored_as_bits(q.dtype))
    places = positions, meta.seq_ids, table
    return cpu_kernels.attention(q, k, v, (empty, empty), *places, visible_until=last, **options)[0]


def causal_conv(
    u: Float[Array, "T C"],
    taps: Float[Array, "C k"],
    bias: Float[Array, "C"] | None,
    buffer: Float[Array, "N r C"],
    meta: StepMetadata,
    activation: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[Float[Array, "T C"], Float[Array, "N r C"]]:
    """`states.causal_conv` in C++, which knows one activation."""
    silu = activation is jax.nn.silu
    more = () if bias is None else (bias.astype(jnp.float32),)
    arrays, attributes = (u, taps.astype(jnp.float32)), {"bias": bias is not None, "silu": silu}
    out, buffer = cpu_kernels.run_states(
        "jaxllm_causal_conv", u.shape, arrays, buffer, _runs(meta), *more, **attributes
    )
    return out if silu or activation is None else activation(out), buffer


def delta_rule(
    qkv: Float[Array, "T C"],
    decay: Float[Array, "T H"],
    beta: Float[Array, "T H"],
    buffer: Float[Array, "N H Dk Dv"],
    meta: StepMetadata,
    *,
    key_heads: int,
) -> tuple[Float[Array, "T H Dv"], Float[Array, "N H Dk Dv"]]:
    """`delta_rule.delta_rule` in C++, token by token."""
    shape, arrays = (len(qkv), buffer.shape[1], buffer.shape[3]), (qkv, decay, beta)
    attributes = {"key_heads": np.int64(key_heads), "epsilon": np.float32(EPS)}
    return cpu_kernels.run_states("jaxllm_delta_rule", shape, arrays, buffer, _runs(meta), **attributes)


def ssd(
    inputs: SSDInputs, buffer: Float[Array, "B H P N"], meta: StepMetadata
) -> tuple[Float[Array, "T H P"], Float[Array, "B H P N"]]:
    """`ssd.recurrent` in C++."""
    return cpu_kernels.run_states("jaxllm_ssd", inputs.x.shape, inputs, buffer, _runs(meta))


def _runs(meta: StepMetadata) -> cpu_kernels.Runs:
    rows = meta.state_rows
    return cpu_kernels.Runs(
        meta.num_seqs.reshape(1),
        meta.query_start,
        rows.read,
        rows.begins,
        rows.written,
        rows.kept,
        kept_length(rows, meta),
    )


def grouped_matmul(x: Float[Array, "N i"], weights: Any, group_sizes: Int[Array, "X"]) -> Float[Array, "N o"]:
    """Each group of rows by its own matrix; only those that have rows are read."""
    matrices = weights.matrices
    if matrices is None or len(matrices) != 1:
        return products.tiles(x, weights, group_sizes)
    return cpu_kernels.grouped_matmul(x, matrices[0], group_sizes)


def _before(x: jax.Array, norm: Norm | None) -> tuple[jax.Array, cpu_kernels.RowNorm | None]:
    """What the kernels take: the norm with `x` as it is, or the result of a norm that they do not know."""
    if isinstance(norm, RootMeanSquare):
        return x, cpu_kernels.RowNorm(norm.weight, norm.eps)
    return (x if norm is None else norm(x)), None
