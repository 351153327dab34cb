"""Paged attention for NVIDIA GPUs: a Pallas kernel for what stands before it, one for decode rows, one for prefill.

`decode` and `prefill` say how those work and what they should cost; `tile` is the inner loop that they share. Before
them heads are normed and rotated, and keys and values stored in their pages, by one kernel: a program per (token, KV
head) has the query heads that share the KV head, its key and its value. It costs a read and a write of each; the pages
are updated in place. Padding tokens write nothing.
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
from jaxllm.pallas_kernels.gpu.decode import decode_attention
from jaxllm.pallas_kernels.gpu.expand import round_to_even, to_e4m3
from jaxllm.pallas_kernels.gpu.prefill import prefill_attention
from jaxllm.pallas_kernels.gpu.tile import NOTHING_PER_HEAD, AttentionSpec, PerHead
from jaxllm.pallas_kernels.metadata import StepMetadata
from jaxllm.pallas_kernels.pages import LARGEST_CODE, QUANTIZED, SCALE_BYTES, Pages, write_pages
from jaxllm.pallas_kernels.products import RootMeanSquare, Unsummed


def paged_attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"] | None,
    pages: Pages,
    meta: StepMetadata,
    *,
    scale: float,
    window: int | None = None,
    chunked: bool = False,
    softcap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
    slopes: Float[Array, "H"] | None = None,
    value_dim: int | None = None,
    angles: Any = None,
    norms: tuple[RootMeanSquare, RootMeanSquare] | None = None,
    unsummed: Unsummed | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T H Dv"], Pages]:
    """Norms and rotates heads where that is asked for, writes the pages, then attends; see `kernels.PagedAttention`.

    Queries that come without new keys are neither normed nor rotated. Where queries, keys and values are one product by
    parts of its inputs, `unsummed`, the kernel that rotates them adds these up.

    Accumulates in float32; the dots take the query's dtype (bfloat16, float16 or float32), and pages of another dtype
    are cast to it as they are read. `interpret` runs the kernels as XLA operations, on any platform.
    """
    _, heads, head_dim = q.shape
    _, kv_heads, page_size, _ = pages[0].shape
    latent_dim = None if v is not None else value_dim or head_dim
    quantized = pages[0].dtype in QUANTIZED.values()
    spec = AttentionSpec(
        heads, kv_heads, head_dim, page_size, q.dtype, scale, window, softcap, latent_dim, quantized, chunked
    )
    per_head = PerHead(sinks, slopes)
    if v is None:
        pages = write_pages(pages, k, v, meta)
    elif k.shape[1]:
        q, pages = rotate_and_store(q, k, v, pages, meta, spec, angles, norms, unsummed, interpret=interpret)
    return attend_to_pages(q, pages, meta, spec, per_head, interpret=interpret), pages


def attend_to_pages(
    q: Float[Array, "T H D"],
    pages: Pages,
    meta: StepMetadata,
    spec: AttentionSpec,
    per_head: PerHead = NOTHING_PER_HEAD,
    *,
    interpret: bool = False,
) -> Float[Array, "T H Dv"]:
    """Attention once all that is new lies in the pages."""
    tokens = q.shape[0]
    # Decode rows are the first rows: in a mixed batch row i < num_decodes is still sequence i's.
    rows = min(tokens, meta.context_len.shape[0])
    decoded = decode_attention(q[:rows], pages, meta, spec, per_head, interpret=interpret)
    if meta.decode_only:
        return decoded

    token = jnp.arange(tokens)[:, None, None]
    prefilled = prefill_attention(q, pages, meta, spec, per_head, interpret=interpret)
    decoded = jnp.pad(decoded, ((0, tokens - rows), (0, 0), (0, 0)))
    is_prefill = meta.seq_ids[:, None, None] < meta.context_len.shape[0]
    return jnp.where(token < meta.num_decodes, decoded, jnp.where(is_prefill, prefilled, 0))


LARGEST = float(jnp.finfo(jnp.float32).max)


def rotate_and_store(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    pages: Pages,
    meta: StepMetadata,
    spec: AttentionSpec,
    angles: Any,
    norms: tuple[RootMeanSquare, RootMeanSquare] | None,
    unsummed: Unsummed | None = None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "T H D"], Pages]:
    """The queries and the pages with the new keys and values; without `angles` heads are not rotated.

    What is not finite is stored as zero; see `pages.write_pages`. With `unsummed`, q, k and v are the sum of its parts,
    and those are read in their place.
    """
    tokens = q.shape[0]
    # The segments of one product lie side by side already: joined again they are that product, and nothing is copied.
    joined = jnp.concatenate([segment.reshape(tokens, -1) for segment in (q, k, v)], axis=1)
    qkv = joined[None] if unsummed is None else unsummed.parts
    tables = [
        *(() if angles is None else (angles.cos, angles.sin)),
        *(() if norms is None else (n.weight for n in norms)),
    ]
    flat = [buffer.reshape(-1, buffer.shape[-1]) for buffer in pages]
    arrays = [meta.positions, meta.seq_ids, meta.page_table, qkv, *tables, *flat]
    rotated, *flat = pl.pallas_call(
        functools.partial(
            _store_kernel,
            spec=spec,
            num_seqs=meta.page_table.shape[0],
            rotary_dim=0 if angles is None else 2 * angles.cos.shape[1],
            interleaved=angles is not None and angles.interleaved,
            eps=None if norms is None else tuple(norm.eps for norm in norms),
        ),
        out_shape=[
            jax.ShapeDtypeStruct((tokens * spec.heads, spec.head_dim), q.dtype),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat),
        ],
        grid=(tokens, spec.kv_heads),
        input_output_aliases={len(arrays) - 2: 1, len(arrays) - 1: 2},
        interpret=interpret,
        compiler_params=triton_compiler_params(num_warps=2, num_stages=1),
        name="rotate_and_store",
    )(*arrays)
    return rotated.reshape(q.shape), tuple(x.reshape(buffer.shape) for x, buffer in zip(flat, pages, strict=True))


def _store_kernel(
    positions_ref: Any, seq_ids_ref: Any, page_table_ref: Any, qkv_ref: Any, *refs: Any, spec: AttentionSpec,
    num_seqs: int, rotary_dim: int, interleaved: bool, eps: tuple[float, ...] | None,
) -> None:  # fmt: skip
    *tables, _k_pages, _v_pages, q_out, k_pages, v_pages = refs
    angle_refs, weight_refs = (tables[:2], tables[2:]) if rotary_dim else ((), tables)
    token, kv_head = pl.program_id(0), pl.program_id(1)
    dim = jnp.arange(spec.parts[0].padded)
    inside = dim < spec.head_dim
    partner, sign, angle = rotation_partner(dim, rotary_dim, interleaved)
    rotates = dim < rotary_dim

    def load(head: Array, channel: Array, mask: Array) -> Array:
        at = head * spec.head_dim + channel[None, :]
        first, *rest = (triton_load(qkv_ref.at[n, token, at], mask=mask, other=0) for n in range(qkv_ref.shape[0]))
        return sum(rest, first).astype(spec.dtype).astype(jnp.float32)

    def prepared(head: Array, live: Array, which: int) -> Array:
        """Heads `head [n, 1]`, normed and rotated, float32."""
        mask = live & inside[None, :]
        x = load(head, dim, mask)
        factor = lax.rsqrt(jnp.sum(x * x, axis=1) / spec.head_dim + eps[which])[:, None] if eps else None

        def normed(x: Array, channel: Array, mask: Array) -> Array:
            if factor is None:
                return x
            weight = triton_load(weight_refs[which].at[channel], mask=mask, other=0)
            return (x * factor * weight[None, :]).astype(spec.dtype).astype(jnp.float32)

        x = normed(x, dim, inside)
        if not rotary_dim:
            return x
        cos, sin = (triton_load(ref.at[token, angle], mask=rotates, other=0) for ref in angle_refs)
        other = normed(load(head, partner, live & rotates[None, :]), partner, rotates)
        return jnp.where(rotates[None, :], x * cos[None, :] + other * (sin * sign)[None, :], x)

    seq = seq_ids_ref[token]

    @pl.when(seq < num_seqs)
    def _() -> None:
        in_group = jnp.arange(pl.next_power_of_2(spec.group))[:, None]
        live = in_group < spec.group
        heads = kv_head * spec.group + in_group
        out_at = q_out.at[token * spec.heads + heads, dim[None, :]]
        triton_store(out_at, prepared(heads, live, 0).astype(spec.dtype), mask=live & inside[None, :])

        position = positions_ref[token]
        page = page_table_ref[seq, lax.div(position, spec.page_size)]
        row = (page * spec.kv_heads + kv_head) * spec.page_size + lax.rem(position, spec.page_size)
        alone = jnp.zeros((1, 1), jnp.int32)
        key = prepared(spec.heads + kv_head + alone, alone == 0, 1)
        value = load(spec.heads + spec.kv_heads + kv_head + alone, dim, inside[None, :])
        for ref, x in ((k_pages, key), (v_pages, value)):
            store_token(ref, row, [(x, dim, inside)], spec)


def rotation_partner(channel: Array, rotary_dim: int, interleaved: bool) -> tuple[Array, Array, Array]:
    """The channel that each one is rotated with, the sign of its part, and the pair's angle, by number."""
    half = rotary_dim // 2
    if interleaved:
        return channel ^ 1, jnp.where(channel % 2 == 0, -1.0, 1.0), lax.div(channel, 2)
    first = channel < half
    partner = jnp.where(first, channel + half, channel - half)
    return partner, jnp.where(first, -1.0, 1.0), jnp.where(first, channel, channel - half)


def store_token(ref: Any, row: Array, parts: Sequence[tuple[Array, Array, Array]], spec: AttentionSpec) -> None:
    """Stores one token's key or value, float32, in a row of pages: numbers, their channels, and which of these are."""
    rounded = [x.astype(spec.dtype).astype(jnp.float32) for x, _, _ in parts]
    finite = [jnp.where(jnp.abs(x) <= LARGEST, x, 0) for x in rounded]
    alone = jnp.zeros((1, 1), jnp.int32)
    if spec.quantized:
        scale = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(x)) for x in finite]) / LARGEST_CODE[ref.dtype]
        byte = jnp.arange(SCALE_BYTES)
        bits = lax.bitcast_convert_type(scale, jnp.int32) >> (8 * byte) & 255
        triton_store(ref.at[row, spec.head_dim + byte], bits.astype(ref.dtype), mask=byte >= 0)
        codes = [x / jnp.where(scale > 0, scale, 1) for x in finite]
        finite = [(to_e4m3(x) if ref.dtype == jnp.uint8 else round_to_even(x)).astype(jnp.int32) for x in codes]
    for x, (_, channel, mask) in zip(finite, parts, strict=True):
        triton_store(ref.at[row + alone, channel[None, :]], x.astype(ref.dtype), mask=mask[None, :])
