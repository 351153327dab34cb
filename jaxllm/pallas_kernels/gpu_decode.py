"""Paged attention of decode rows on NVIDIA GPUs: flash-decoding in Pallas, lowered through Triton.

One program per (sequence, KV head, split): the query heads that share the KV head are the rows of one tile, padded to
the 16 that a tensor-core dot needs. Each split takes an equal share of the sequence's own blocks of keys, from the
window's first to the context's last, so that a short context beside a long one still spreads over all splits. Splits
leave float32 partials that XLA combines; with one split the kernel writes the output itself.

Decode reads each live key and value once: `2 * context * K * D * itemsize` bytes a sequence and layer (4 KiB a token
for Llama-3-8B in bf16) at `H / K` times 2 FLOPs a byte, far below any GPU's balance: memory bandwidth is the limit,
and the padded rows of the dot are free. Partials add `rows * splits * H * D * 8` bytes (write and read), which the
number of splits keeps small: it falls to 1 once sequences and KV heads fill the GPU.

The number of splits depends on the bucket's shape, and float32 rounding on the number of splits: bitwise equality of a
request's logits across buckets needs a fixed `splits`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxllm.compat import triton_compiler_params, triton_load, triton_store
from jaxllm.pallas_kernels.gpu_tile import AttentionSpec, attend, cdiv, first_key, start_softmax
from jaxllm.pallas_kernels.metadata import StepMetadata
from jaxllm.pallas_kernels.pages import Pages

TARGET_PROGRAMS = 256
"""Programs that fill a large GPU: about two on each of an H100's 132 multiprocessors."""
MIN_BLOCKS_PER_SPLIT = 4
MAX_SPLITS = 32


def choose_splits(rows: int, max_context: int, spec: AttentionSpec) -> int:
    """Splits per sequence that fill the GPU, while each has a few blocks of the longest possible context to do."""
    reach = max_context if spec.window is None else min(max_context, spec.window)
    wanted = cdiv(TARGET_PROGRAMS, rows * spec.kv_heads)
    return max(1, min(wanted, reach // (MIN_BLOCKS_PER_SPLIT * spec.block_k), MAX_SPLITS))


def decode_attention(
    q: Float[Array, "R H D"],
    pages: Pages,
    meta: StepMetadata,
    spec: AttentionSpec,
    sinks: Float[Array, "H"] | None,
    *,
    splits: int | None = None,
    interpret: bool = False,
) -> Float[Array, "R H D"]:
    """Attention of the decode rows, row i being sequence i's one query; rows from `num_decodes` on are undefined."""
    rows, heads, head_dim = q.shape
    splits = splits or choose_splits(rows, meta.page_table.shape[1] * spec.page_size, spec)
    tile_rows = max(16, pl.next_power_of_2(spec.group))
    if splits == 1:
        out_shape: Any = jax.ShapeDtypeStruct((rows * heads, head_dim), q.dtype)
    else:
        partial_rows = splits * rows * heads
        statistic = jax.ShapeDtypeStruct((partial_rows,), jnp.float32)
        out_shape = (jax.ShapeDtypeStruct((partial_rows, head_dim), jnp.float32), statistic, statistic)
    out = pl.pallas_call(
        functools.partial(_decode_kernel, spec=spec, rows=rows, splits=splits, tile_rows=tile_rows),
        out_shape=out_shape,
        grid=(rows, spec.kv_heads, splits),
        interpret=interpret,
        compiler_params=triton_compiler_params(num_warps=4, num_stages=2),
        name="paged_attention_decode",
    )(
        meta.num_decodes.reshape(1),
        meta.context_len,
        meta.page_table,
        q.reshape(rows * heads, head_dim),
        *(buffer.reshape(-1, head_dim) for buffer in pages),
        *(() if sinks is None else (sinks,)),
    )
    if splits == 1:
        return out.reshape(q.shape)
    acc, m, l = (partial.reshape(splits, rows, heads, -1) for partial in out)  # noqa: E741
    weights = jnp.exp2(m - jnp.max(m, axis=0))
    return (jnp.sum(acc * weights, axis=0) / jnp.sum(l * weights, axis=0)).astype(q.dtype)


def _decode_kernel(
    num_decodes_ref: Any,
    context_len_ref: Any,
    page_table_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    *sinks_and_outputs: Any,
    spec: AttentionSpec,
    rows: int,
    splits: int,
    tile_rows: int,
) -> None:
    sinks_ref, outputs = (sinks_and_outputs[0], sinks_and_outputs[1:]) if spec.has_sinks else (None, sinks_and_outputs)
    seq, kv_head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)

    @pl.when(seq < num_decodes_ref[0])
    def _() -> None:
        group_row = jnp.arange(tile_rows)
        dims = jnp.arange(spec.padded_dim)
        in_group = group_row < spec.group
        tile_mask = in_group[:, None] & (dims < spec.head_dim)[None, :]
        head = kv_head * spec.group + group_row
        q = triton_load(q_ref.at[(seq * spec.heads + head)[:, None], dims[None, :]], mask=tile_mask, other=0)

        context_len = context_len_ref[seq]
        position = context_len - 1
        key_start = first_key(position, spec.window)
        first_block = key_start // spec.block_k
        end_block = cdiv(context_len, spec.block_k)
        share = cdiv(end_block - first_block, splits)
        begin = first_block + split * share

        sinks = None if sinks_ref is None else triton_load(sinks_ref.at[head], mask=in_group, other=0)
        state = start_softmax(tile_rows, spec, sinks)
        # A sink counts once, in the first split.
        state = state._replace(l=jnp.where(split == 0, state.l, 0.0))
        state = attend(
            q,
            jnp.full((tile_rows,), position),
            kv_head,
            lambda index, mask: triton_load(page_table_ref.at[seq, index], mask=mask, other=0),
            k_ref,
            v_ref,
            (key_start, context_len),
            (begin, jnp.minimum(begin + share, end_block)),
            state,
            spec,
        )
        out_row = (split * rows + seq) * spec.heads + head
        out_at = outputs[0].at[out_row[:, None], dims[None, :]]
        if splits == 1:
            triton_store(out_at, state.normalized().astype(q.dtype), mask=tile_mask)
        else:
            triton_store(out_at, state.acc, mask=tile_mask)
            triton_store(outputs[1].at[out_row], state.m, mask=in_group)
            triton_store(outputs[2].at[out_row], state.l, mask=in_group)
