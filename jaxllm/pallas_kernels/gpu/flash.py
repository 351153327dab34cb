"""Paged attention over pages that hold all that is new, on NVIDIA GPUs: Pallas, lowered through Triton.

Decode rows run as flash-decoding. A sequence's blocks of keys are cut into splits of a fixed number of blocks, or of
more where that would be over MAX_SPLITS: the cut depends on the sequence alone, so that a request's logits depend on no
bucket and no batch-mate. The (sequence, split) pairs of all rows are one list, which each program finds from the
context lengths; the programs of a KV head take turns at it, so that a long context among short ones spreads over the
whole GPU. Splits leave float32 partials, which a second, small kernel combines. A program has the query heads that
share the KV head as the rows of one tile, padded to the 16 that a tensor-core dot needs. Each live key and value is
read once: `2 * context * K * D * itemsize` bytes a sequence and layer, at `H / K` times 2 FLOPs a byte: memory
bandwidth is the limit, and the padded rows of the dot are free.

Prefill chunks run as FlashAttention-2, one program per (tile, KV head). A tile is some consecutive query tokens of one
sequence times the `H / K` query heads that share the KV head, packed as rows (row r is token r // group, head
r % group), so that each key read from memory serves the whole group and a small chunk still fills the tensor cores. A
chunk of n tokens ending at context c costs about `4 * H * D * (n * c - n² / 2)` FLOPs and reads
`2 * c * K * D * itemsize` bytes for each of its tiles (mostly from L2): with 128 rows a tile, 128 FLOPs a byte, so
compute is the limit from D = 64 up. Work is not split along the keys: one short chunk over a very long prefix leaves a
large GPU partly idle.
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
from jaxllm.pallas_kernels.gpu.tile import MASKED, AttentionSpec, PerHead, Tile, attend, cdiv, first_key
from jaxllm.pallas_kernels.metadata import StepMetadata, prefill_tiles
from jaxllm.pallas_kernels.pages import Pages


def attend_to_pages(
    q: Float[Array, "T H D"], pages: Pages, meta: StepMetadata, spec: AttentionSpec, per_head: PerHead = PerHead()
) -> Float[Array, "T H Dv"]:
    """Attention once all that is new lies in the pages."""
    tokens = q.shape[0]
    # Decode rows are the first rows: in a mixed batch row i < num_decodes is still sequence i's.
    rows = min(tokens, meta.context_len.shape[0])
    decoded = decode_attention(q[:rows], pages, meta, spec, per_head)
    if meta.decode_only:
        return decoded

    token = jnp.arange(tokens)[:, None, None]
    prefilled = prefill_attention(q, pages, meta, spec, per_head)
    decoded = jnp.pad(decoded, ((0, tokens - rows), (0, 0), (0, 0)))
    is_prefill = meta.seq_ids[:, None, None] < meta.context_len.shape[0]
    return jnp.where(token < meta.num_decodes, decoded, jnp.where(is_prefill, prefilled, 0))


TARGET_PROGRAMS = 528
"""Four on each of an H100's 132 multiprocessors."""
SPLIT_BLOCKS = 2
MAX_SPLITS = 32


def decode_attention(
    q: Float[Array, "R H D"], pages: Pages, meta: StepMetadata, spec: AttentionSpec, per_head: PerHead = PerHead()
) -> Float[Array, "R H Dv"]:
    """Attention of the decode rows, row i being sequence i's one query; rows from `num_decodes` on are zero."""
    rows, heads, _ = q.shape
    reach = meta.page_table.shape[1] * spec.page_size
    reach = reach if spec.window is None else min(reach, spec.window + spec.block_k)
    splits = min(MAX_SPLITS, cdiv(cdiv(reach, spec.block_k), SPLIT_BLOCKS))
    given = _given(q, pages, meta, per_head)
    statistic = jax.ShapeDtypeStruct((rows * splits * heads,), jnp.float32)
    partials = pl.pallas_call(
        functools.partial(_decode_kernel, spec=spec, names=tuple(given), rows=rows, splits=splits),
        out_shape=(jax.ShapeDtypeStruct((rows * splits * heads, spec.value_dim), jnp.float32), statistic, statistic),
        grid=(spec.head_tiles, min(rows * splits, cdiv(TARGET_PROGRAMS, spec.head_tiles))),
        interpret=spec.interpret,
        compiler_params=triton_compiler_params(num_warps=spec.decode_warps, num_stages=3),
        name="paged_attention_decode",
    )(meta.num_decodes.reshape(1), meta.context_len, *given.values())
    out = pl.pallas_call(
        functools.partial(_combine_kernel, spec=spec, splits=splits),
        out_shape=jax.ShapeDtypeStruct((rows * heads, spec.value_dim), q.dtype),
        grid=(rows, heads),
        interpret=spec.interpret,
        compiler_params=triton_compiler_params(num_warps=4, num_stages=1),
        name="paged_attention_combine",
    )(meta.num_decodes.reshape(1), meta.context_len, *partials)
    return out.reshape(rows, heads, spec.value_dim)


def _given(q: Float[Array, "n H D"], pages: Pages, meta: StepMetadata, per_head: PerHead) -> dict[str, Array]:
    rows, *flat = (array.reshape(-1, array.shape[-1]) for array in (q, *pages))
    own = {name: numbers for name, numbers in per_head._asdict().items() if numbers is not None}
    buffers = {f"pages {index}": buffer for index, buffer in enumerate(flat)}
    return {"page_table": meta.page_table, "q": rows, **buffers, **own}


def _blocks(context_len: Array, spec: AttentionSpec) -> tuple[Array, Array]:
    first = lax.div(first_key(jnp.maximum(context_len - 1, 0), spec), spec.block_k)
    return first, cdiv(context_len, spec.block_k) - first


def _split_blocks(blocks: Array) -> Array:
    return jnp.maximum(SPLIT_BLOCKS, cdiv(blocks, MAX_SPLITS))


def _decode_kernel(
    num_decodes_ref: Any, context_len_ref: Any, *refs: Any, spec: AttentionSpec, names: Sequence[str], rows: int,
    splits: int,
) -> None:  # fmt: skip
    *inputs, acc_ref, m_ref, l_ref = refs
    given = dict(zip(names, inputs, strict=True))
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
        positions = jnp.full((tile_rows,), position)
        state = attend(
            Tile(seq, kv_head, seq * spec.heads + head, head, live_head, positions),
            given,
            (first_key(position, spec), context_len),
            (begin, jnp.minimum(begin + share, first + blocks)),
            spec,
            counts_sinks=split == 0,  # they count once
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


MAX_TILE_ROWS = 128
TILE_BYTES = 32 * 1024
"""The query tile shares shared memory with the blocks of keys and values; its float32 accumulator fills registers."""


def choose_tile_rows(tokens: int, spec: AttentionSpec) -> int:
    """Rows of the query tile: as many as fit TILE_BYTES and the step has; half for codes or padded channels."""
    part = spec.parts[0]
    fitting = min(MAX_TILE_ROWS, TILE_BYTES // (part.padded * jnp.dtype(spec.dtype).itemsize))
    wanted = min(fitting >> (spec.quantized or part.size < part.padded), pl.next_power_of_2(tokens * spec.tile_heads))
    return max(16, pl.next_power_of_2(spec.tile_heads), wanted)


def _warps(tile_rows: int, spec: AttentionSpec) -> int:
    """Enough of them that a thread's share of the sums, and of codes that are expanded, fits into its registers."""
    part = spec.parts[0]
    return 8 if tile_rows >= 128 or part.padded >= 256 or part.size < part.padded or spec.quantized else 4


def prefill_attention(
    q: Float[Array, "T H D"], pages: Pages, meta: StepMetadata, spec: AttentionSpec, per_head: PerHead = PerHead()
) -> Float[Array, "T H Dv"]:
    """Attention of the prefill rows; decode and padding rows of the result are undefined.

    A chunk's query tokens are the last of its context: token i of n has position `context_len - n + i`.
    """
    tokens, heads, _ = q.shape
    tile_rows = choose_tile_rows(tokens, spec)
    tiles = prefill_tiles(meta, tokens, tile_rows // spec.tile_heads)
    given = _given(q, pages, meta, per_head)
    out = pl.pallas_call(
        functools.partial(_prefill_kernel, spec=spec, names=tuple(given), tile_rows=tile_rows),
        out_shape=jax.ShapeDtypeStruct((tokens * heads, spec.value_dim), q.dtype),
        grid=(tiles.shape[0], spec.head_tiles),
        interpret=spec.interpret,
        compiler_params=triton_compiler_params(num_warps=_warps(tile_rows, spec), num_stages=2),
        name="paged_attention_prefill",
    )(tiles, *given.values())
    return out.reshape(tokens, heads, spec.value_dim)


def _prefill_kernel(tiles_ref: Any, *refs: Any, spec: AttentionSpec, names: Sequence[str], tile_rows: int) -> None:
    *inputs, out_ref = refs
    given = dict(zip(names, inputs, strict=True))
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

        key_start = first_key(first_position, spec)
        key_stop = first_position + count
        state = attend(
            Tile(seq, kv_head, q_row, head, live, first_position + token),
            given,
            (key_start, key_stop),
            (lax.div(key_start, spec.block_k), cdiv(key_stop, spec.block_k)),
            spec,
        )
        mask = live[:, None] & (dims < spec.value_dim)[None, :]
        triton_store(out_ref.at[q_row[:, None], dims[None, :]], state.normalized().astype(spec.dtype), mask=mask)
