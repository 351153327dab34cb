"""Paged attention of prefill chunks on NVIDIA GPUs: FlashAttention-2 over pages in Pallas, lowered through Triton.

One program per (tile, KV head). A tile is `block_q` consecutive query tokens of one sequence times the `H / K` query
heads that share the KV head, packed as rows (row r is token r // group, head r % group), so that each key read from
memory serves the whole group and a small chunk still fills the tensor cores. A few XLA operations on the batch's
metadata lay the tiles out; they depend on no activation, so XLA computes them once for all layers of a step.

A chunk of n tokens ending at context c costs about `4 * H * D * (n * c - n² / 2)` FLOPs and reads
`2 * c * K * D * itemsize` bytes for each of its tiles (mostly from L2): with 128 rows a tile, 128 FLOPs a byte, so
compute is the limit from D = 64 up. Work is not split along the keys: one short chunk over a very long prefix has few
programs and leaves a large GPU partly idle.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from jaxllm.compat import triton_compiler_params, triton_load, triton_store
from jaxllm.pallas_kernels.gpu.tile import (
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

MAX_TILE_ROWS = 128
TILE_BYTES = 32 * 1024
"""The query tile shares shared memory with the blocks of keys and values; its float32 accumulator fills registers."""


def choose_tile_rows(tokens: int, spec: AttentionSpec) -> int:
    """Rows of the query tile: as many as fit TILE_BYTES, and no more than the step has.

    Half as many where keys are expanded from codes or filled up to a power of two, which takes registers as well.
    """
    part = spec.parts[0]
    fitting = min(MAX_TILE_ROWS, TILE_BYTES // (part.padded * jnp.dtype(spec.dtype).itemsize))
    wanted = min(fitting >> (spec.quantized or part.size < part.padded), pl.next_power_of_2(tokens * spec.tile_heads))
    return max(16, pl.next_power_of_2(spec.tile_heads), wanted)


def _warps(tile_rows: int, spec: AttentionSpec) -> int:
    """Enough of them that a thread's share of the sums, and of codes that are expanded, fits into its registers."""
    part = spec.parts[0]
    return 8 if tile_rows >= 128 or part.padded >= 256 or part.size < part.padded or spec.quantized else 4


def prefill_tiles(meta: StepMetadata, tokens: int, block_q: int) -> Int[Array, "tiles 4"]:
    """Cuts the prefill chunks into tiles of at most `block_q` tokens: rows (sequence, first token, tokens, position).

    The first token is an index into the batch, the position is that token's. Tiles left over have 0 tokens.

    Worked example, block_q 2, one decode row, then chunks of 3 and 2 tokens that follow 4 and 0 cached ones:

        query_start [0, 1, 4, 6], context_len [9, 7, 2]  ->  [1, 1, 2, 4], [1, 3, 1, 6], [2, 4, 2, 0]
    """
    num_seqs = meta.context_len.shape[0]
    seq = jnp.arange(num_seqs)
    query_len = meta.query_start[1:] - meta.query_start[:-1]
    is_prefill = (seq >= meta.num_decodes) & (seq < meta.num_seqs)
    ends = jnp.cumsum(jnp.where(is_prefill, -(-query_len // block_q), 0))

    num_tiles = tokens // block_q + min(num_seqs, tokens)
    tile = jnp.arange(num_tiles)
    owner = jnp.minimum(jnp.searchsorted(ends, tile, side="right", method="compare_all"), num_seqs - 1)
    begin = jnp.where(owner > 0, ends[owner - 1], 0)
    offset = (tile - begin) * block_q
    count = jnp.where(tile < ends[-1], jnp.clip(query_len[owner] - offset, 0, block_q), 0)
    position = meta.context_len[owner] - query_len[owner] + offset
    return jnp.stack([owner, meta.query_start[owner] + offset, count, position], axis=1).astype(jnp.int32)


def prefill_attention(
    q: Float[Array, "T H D"],
    pages: Pages,
    meta: StepMetadata,
    spec: AttentionSpec,
    per_head: PerHead,
    *,
    interpret: bool = False,
) -> Float[Array, "T H Dv"]:
    """Attention of the prefill rows; decode and padding rows of the result are undefined.

    A chunk's query tokens are the last of its context: token i of n has position `context_len - n + i`.
    """
    tokens, heads, head_dim = q.shape
    tile_rows = choose_tile_rows(tokens, spec)
    tiles = prefill_tiles(meta, tokens, tile_rows // spec.tile_heads)
    out = pl.pallas_call(
        functools.partial(_prefill_kernel, spec=spec, per_head=per_head.names, tile_rows=tile_rows),
        out_shape=jax.ShapeDtypeStruct((tokens * heads, spec.value_dim), q.dtype),
        grid=(tiles.shape[0], spec.head_tiles),
        interpret=interpret,
        compiler_params=triton_compiler_params(num_warps=_warps(tile_rows, spec), num_stages=2),
        name="paged_attention_prefill",
    )(
        tiles,
        meta.page_table,
        q.reshape(tokens * heads, head_dim),
        *(buffer.reshape(-1, buffer.shape[-1]) for buffer in pages),
        *per_head.arrays,
    )
    return out.reshape(tokens, heads, spec.value_dim)


def _prefill_kernel(
    tiles_ref: Any, page_table_ref: Any, q_ref: Any, *refs: Any, spec: AttentionSpec, per_head: Sequence[str],
    tile_rows: int,
) -> None:  # fmt: skip
    *inputs, out_ref = refs
    page_refs, head_refs = inputs[: spec.buffers], inputs[spec.buffers :]
    tile, head_tile = pl.program_id(0), pl.program_id(1)
    seq, first_token, count, first_position = (tiles_ref[tile, column] for column in range(4))

    @pl.when(count > 0)
    def _() -> None:
        row = jnp.arange(tile_rows)
        dims = jnp.arange(spec.parts[0].padded)
        token = lax.div(row, spec.tile_heads)
        kv_head, head, known = spec.heads_of(head_tile, lax.rem(row, spec.tile_heads))
        live = (token < count) & known
        q_row = (first_token + token) * spec.heads + head

        own = load_per_head(per_head, head_refs, head, live)
        key_start = first_key(first_position, spec)
        key_stop = first_position + count
        state = attend(
            load_queries(q_ref, q_row, live, spec),
            first_position + token,
            kv_head,
            lambda index, mask: triton_load(page_table_ref.at[seq, index], mask=mask, other=0),
            page_refs,
            (key_start, key_stop),
            (lax.div(key_start, spec.block_k), cdiv(key_stop, spec.block_k)),
            start_softmax(tile_rows, spec, own.sinks),
            spec,
            own.slopes,
        )
        mask = live[:, None] & (dims < spec.value_dim)[None, :]
        triton_store(out_ref.at[q_row[:, None], dims[None, :]], state.normalized().astype(spec.dtype), mask=mask)
