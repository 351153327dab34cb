"""Paged attention of decode rows on NVIDIA GPUs: flash-decoding in Pallas, lowered through Triton.

A sequence's blocks of keys are cut into splits of a fixed number of blocks, or of more where that would be over
MAX_SPLITS: the cut depends on the sequence alone, so that a request's logits depend on no bucket and no batch-mate.
The (sequence, split) pairs of all rows are one list, and the programs of a KV head take turns at it: a long context
among short ones spreads over the whole GPU. Nothing of that is sent by the host: each program finds its pairs from the
context lengths. Splits leave float32 partials, which a second, small kernel combines; rows that are not live come out
of it as zeros.

A program has the query heads that share the KV head as the rows of one tile, padded to the 16 that a tensor-core dot
needs. Decode reads each live key and value once: `2 * context * K * D * itemsize` bytes a sequence and layer (4 KiB a
token for Llama-3-8B in bf16) at `H / K` times 2 FLOPs a byte, far below any GPU's balance: memory bandwidth is the
limit, and the padded rows of the dot are free. Partials add `splits * H * D * 8` bytes a row (write and read).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxllm.compat import triton_compiler_params, triton_load, triton_store
from jaxllm.pallas_kernels.gpu.tile import (
    MASKED,
    AttentionSpec,
    PerHead,
    attend,
    cdiv,
    first_key,
    load_per_head,
    load_queries,
    start_softmax,
)
from jaxllm.pallas_kernels.metadata import StepMetadata
from jaxllm.pallas_kernels.pages import Pages

TARGET_PROGRAMS = 528
"""Four on each of an H100's 132 multiprocessors."""
SPLIT_BLOCKS = 2
"""Blocks of keys in a split."""
MAX_SPLITS = 32
"""Of one sequence."""


def most_splits(max_context: int, spec: AttentionSpec) -> int:
    """Splits of the longest sequence."""
    reach = max_context if spec.window is None else min(max_context, spec.window + spec.block_k)
    return min(MAX_SPLITS, cdiv(cdiv(reach, spec.block_k), SPLIT_BLOCKS))


def decode_attention(
    q: Float[Array, "R H D"],
    pages: Pages,
    meta: StepMetadata,
    spec: AttentionSpec,
    per_head: PerHead,
    *,
    interpret: bool = False,
) -> Float[Array, "R H Dv"]:
    """Attention of the decode rows, row i being sequence i's one query; rows from `num_decodes` on are zero."""
    rows, heads, head_dim = q.shape
    splits = most_splits(meta.page_table.shape[1] * spec.page_size, spec)
    statistic = jax.ShapeDtypeStruct((rows * splits * heads,), jnp.float32)
    partials = pl.pallas_call(
        functools.partial(_decode_kernel, spec=spec, per_head=per_head.names, rows=rows, splits=splits),
        out_shape=(jax.ShapeDtypeStruct((rows * splits * heads, spec.value_dim), jnp.float32), statistic, statistic),
        grid=(spec.head_tiles, min(rows * splits, cdiv(TARGET_PROGRAMS, spec.head_tiles))),
        interpret=interpret,
        compiler_params=triton_compiler_params(num_warps=spec.decode_warps, num_stages=3),
        name="paged_attention_decode",
    )(
        meta.num_decodes.reshape(1),
        meta.context_len,
        meta.page_table,
        q.reshape(rows * heads, head_dim),
        *(buffer.reshape(-1, buffer.shape[-1]) for buffer in pages),
        *per_head.arrays,
    )
    out = pl.pallas_call(
        functools.partial(_combine_kernel, spec=spec, splits=splits),
        out_shape=jax.ShapeDtypeStruct((rows * heads, spec.value_dim), q.dtype),
        grid=(rows, heads),
        interpret=interpret,
        compiler_params=triton_compiler_params(num_warps=4, num_stages=1),
        name="paged_attention_combine",
    )(meta.num_decodes.reshape(1), meta.context_len, *partials)
    return out.reshape(rows, heads, spec.value_dim)


def _blocks(context_len: Array, spec: AttentionSpec) -> tuple[Array, Array]:
    """The first block of keys that a sequence's query sees, and how many there are."""
    first = lax.div(first_key(jnp.maximum(context_len - 1, 0), spec), spec.block_k)
    return first, cdiv(context_len, spec.block_k) - first


def _split_blocks(blocks: Array) -> Array:
    """Blocks in each split of a sequence of so many."""
    return jnp.maximum(SPLIT_BLOCKS, cdiv(blocks, MAX_SPLITS))


def _decode_kernel(
    num_decodes_ref: Any, context_len_ref: Any, page_table_ref: Any, q_ref: Any, *refs: Any, spec: AttentionSpec,
    per_head: Sequence[str], rows: int, splits: int,
) -> None:  # fmt: skip
    *inputs, acc_ref, m_ref, l_ref = refs
    page_refs, head_refs = inputs[: spec.buffers], inputs[spec.buffers :]
    head_tile, program = pl.program_id(0), pl.program_id(1)
    row = jnp.arange(pl.next_power_of_2(rows))
    contexts = triton_load(context_len_ref.at[row], mask=(row < rows) & (row < num_decodes_ref[0]), other=0)
    _, blocks = _blocks(contexts, spec)
    counts = cdiv(blocks, _split_blocks(blocks))  # a row that is not live has none
    ends = jnp.cumsum(counts)

    tile_rows = max(16, pl.next_power_of_2(spec.tile_heads))
    kv_head, head, live_head = spec.heads_of(head_tile, jnp.arange(tile_rows))
    dims = jnp.arange(spec.parts[0].padded)

    def body(turn: Array, carry: Array) -> Array:
        item = program + turn * pl.num_programs(1)
        seq = jnp.sum((ends <= item).astype(jnp.int32))
        split = item - jnp.sum(jnp.where(row < seq, counts, 0))
        context_len = context_len_ref[seq]
        first, blocks = _blocks(context_len, spec)
        share = _split_blocks(blocks)
        begin = first + split * share
        position = context_len - 1

        own = load_per_head(per_head, head_refs, head, live_head)
        state = start_softmax(tile_rows, spec, own.sinks)
        # A sink counts once, in the first split.
        state = state._replace(l=jnp.where(split == 0, state.l, 0.0))
        state = attend(
            load_queries(q_ref, seq * spec.heads + head, live_head, spec),
            jnp.full((tile_rows,), position),
            kv_head,
            lambda index, mask: triton_load(page_table_ref.at[seq, index], mask=mask, other=0),
            page_refs,
            (first_key(position, spec), context_len),
            (begin, jnp.minimum(begin + share, first + blocks)),
            state,
            spec,
            own.slopes,
        )
        out_row = (seq * splits + split) * spec.heads + head
        mask = live_head[:, None] & (dims < spec.value_dim)[None, :]
        triton_store(acc_ref.at[out_row[:, None], dims[None, :]], state.acc, mask=mask)
        triton_store(m_ref.at[out_row], state.m, mask=live_head)
        triton_store(l_ref.at[out_row], state.l, mask=live_head)
        return carry

    mine = cdiv(jnp.maximum(jnp.sum(counts) - program, 0), pl.num_programs(1))
    lax.fori_loop(0, mine, body, 0)


def _combine_kernel(
    num_decodes_ref: Any, context_len_ref: Any, acc_ref: Any, m_ref: Any, l_ref: Any, out_ref: Any, *,
    spec: AttentionSpec, splits: int,
) -> None:  # fmt: skip
    row, head = pl.program_id(0), pl.program_id(1)
    _, blocks = _blocks(context_len_ref[row], spec)
    count = jnp.where(row < num_decodes_ref[0], cdiv(blocks, _split_blocks(blocks)), 0)
    split = jnp.arange(pl.next_power_of_2(splits))
    dims = jnp.arange(spec.parts[0].padded)
    live = split < count
    at = (row * splits + split) * spec.heads + head
    m = triton_load(m_ref.at[at], mask=live, other=MASKED)
    weights = jnp.exp2(m - jnp.max(m, axis=0))
    total = jnp.sum(weights * triton_load(l_ref.at[at], mask=live, other=0), axis=0)
    inside = dims < spec.value_dim
    acc = triton_load(acc_ref.at[at[:, None], dims[None, :]], mask=live[:, None] & inside[None, :], other=0)
    out = jnp.sum(acc * weights[:, None], axis=0) / jnp.where(total == 0, 1, total)
    triton_store(out_ref.at[row * spec.heads + head, dims], out.astype(spec.dtype), mask=inside)
