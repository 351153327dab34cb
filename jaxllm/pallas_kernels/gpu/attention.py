"""Paged attention for NVIDIA GPUs: Pallas kernels for what stands before it and after it; `flash` is between them.

Before it one kernel norms and rotates heads and stores keys and values in their pages, in place: a program per (token,
KV head) has the query heads that share the KV head, its key and its value. Padding tokens write nothing.

Before latent attention, two kinds of programs work beside each other. Those of a (block of channels, head, tile of
rows) multiply queries by their head's rows of the matrix that expands latents. Those of a token norm and rotate its
latent, store it, and rotate the rest of its queries. Afterwards programs multiply by each head's other rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxllm.compat import triton_compiler_params, triton_load, triton_store
from jaxllm.pallas_kernels import reference
from jaxllm.pallas_kernels.gpu.expand import round_to_even, to_e4m3
from jaxllm.pallas_kernels.gpu.flash import attend_to_pages
from jaxllm.pallas_kernels.gpu.tile import AttentionSpec, Part, PerHead
from jaxllm.pallas_kernels.metadata import StepMetadata
from jaxllm.pallas_kernels.pages import LARGEST_CODE, QUANTIZED, SCALE_BYTES, Pages, write_pages
from jaxllm.pallas_kernels.products import RootMeanSquare, Unsummed, dot
from jaxllm.pallas_kernels.reference import AttentionOptions, Options


def paged_attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"] | None,
    pages: Pages,
    meta: StepMetadata,
    *,
    angles: Any = None,
    norms: tuple[RootMeanSquare, RootMeanSquare] | None = None,
    unsummed: Unsummed | None = None,
    interpret: bool = False,
    **given: Unpack[AttentionOptions],
) -> tuple[Float[Array, "T H Dv"], Pages]:
    """Norms and rotates heads where that is asked for, writes the pages, then attends; see `reference.paged_attention`.

    Queries that come without new keys are neither normed nor rotated. With `unsummed`, a product by parts of its inputs
    that is queries, keys and values, the kernel that rotates them adds the parts up. Sums are float32; dots take the
    query's dtype, and pages of another one are cast to it as they are read.
    """
    _, heads, head_dim = q.shape
    _, kv_heads, page_size, _ = pages[0].shape
    options = Options(**given)
    latent_dim = None if v is not None else options.value_dim or head_dim
    spec = AttentionSpec(
        heads, kv_heads, head_dim, page_size, q.dtype, options.scale, options.window, options.softcap, latent_dim,
        quantized=pages[0].dtype in QUANTIZED.values(), chunked=options.chunked, interpret=interpret,
    )  # fmt: skip
    per_head = PerHead(options.sinks, options.slopes)
    if v is None:
        pages = write_pages(pages, k, v, meta)
    elif k.shape[1]:
        q, pages = rotate_and_store(q, k, v, pages, meta, spec, angles, norms, unsummed)
    if options.visible_until is not None:  # a step with images alone pays for it
        assert v is not None, "no model of latent attention sees later tokens"
        return reference.paged_attention(q, k[:, :0], v[:, :0], pages, meta, **given)
    return attend_to_pages(q, pages, meta, spec, per_head), pages


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
) -> tuple[Float[Array, "T H D"], Pages]:
    """The queries and the pages with the new keys and values; without `angles` heads are not rotated.

    What is not finite is stored as zero; see `pages.write_pages`. With `unsummed`, q, k and v are the sum of its parts,
    and those are read in their place.
    """
    tokens = q.shape[0]
    # The segments of one product lie side by side already: joined again they are that product, and nothing is copied.
    joined = jnp.concatenate([segment.reshape(tokens, -1) for segment in (q, k, v)], axis=1)
    qkv = joined[None] if unsummed is None else unsummed.parts
    rotation = () if angles is None else (angles.cos, angles.sin)
    tables = [*rotation, *(norm.weight for norm in norms or ())]
    flat = [buffer.reshape(-1, buffer.shape[-1]) for buffer in pages]
    arrays = [meta.positions, meta.seq_ids, meta.page_table, qkv, *tables, *flat]
    rotated, *flat = pl.pallas_call(
        functools.partial(
            _store_kernel, spec=spec, num_seqs=meta.page_table.shape[0],
            rotary_dim=0 if angles is None else 2 * angles.cos.shape[1],
            interleaved=angles is not None and angles.interleaved, eps=tuple(norm.eps for norm in norms or ()),
        ),
        out_shape=[
            jax.ShapeDtypeStruct((tokens * spec.heads, spec.head_dim), q.dtype),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat),
        ],
        grid=(tokens, spec.kv_heads),
        input_output_aliases={len(arrays) - 2: 1, len(arrays) - 1: 2},
        interpret=spec.interpret,
        compiler_params=triton_compiler_params(num_warps=2, num_stages=1),
        name="rotate_and_store",
    )(*arrays)  # fmt: skip
    return rotated.reshape(q.shape), tuple(x.reshape(buffer.shape) for x, buffer in zip(flat, pages, strict=True))


def _store_kernel(
    positions_ref: Any, seq_ids_ref: Any, page_table_ref: Any, qkv_ref: Any, *refs: Any, spec: AttentionSpec,
    num_seqs: int, rotary_dim: int, interleaved: bool, eps: tuple[float, ...],
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


MAX_TILE_ROWS = 64
BLOCK = 128
"""Channels of the latent that a program multiplies by at a time."""
BLOCK_OUT = 64
"""Channels of a value that a program makes."""
HEADS = 16
"""Heads whose channels are rotated together."""


def latent_attention(
    q: Float[Array, "T H d"],
    latent: Float[Array, "T D"],
    expand: Float[Array, "o L"],
    norm: RootMeanSquare,
    angles: Any,
    pages: Pages,
    meta: StepMetadata,
    *,
    scale: float,
    one_product: bool,
    interpret: bool = False,
) -> tuple[Float[Array, "T H Dv"], Pages]:
    """See `Kernels.latent_attention`; `expand` is the weight itself."""
    heads, size = q.shape[1], latent.shape[1]
    (buffer,) = pages
    quantized = buffer.dtype in QUANTIZED.values()
    spec = AttentionSpec(
        heads, 1, size, buffer.shape[2], q.dtype, scale, None, None, expand.shape[1], quantized, interpret=interpret
    )
    absorbed, pages = absorb_and_store(q, latent, expand, norm, angles, pages, meta, spec, one_product=one_product)
    out = attend_to_pages(absorbed, pages, meta, spec)
    still = q.shape[2] - (size - spec.value_dim)
    return expand_heads(out, expand, still, interpret=interpret), pages


def absorb_and_store(
    q: Float[Array, "T H d"],
    latent: Float[Array, "T D"],
    expand: Float[Array, "o L"],
    norm: RootMeanSquare,
    angles: Any,
    pages: Pages,
    meta: StepMetadata,
    spec: AttentionSpec,
    *,
    one_product: bool,
) -> tuple[Float[Array, "T H D"], Pages]:
    """Queries in the space of latents, and the pages with the new ones.

    A head's first rows of `expand`, as many as its queries have channels that are not rotated, are what absorbs them.
    """
    tokens, heads, query_dim = q.shape
    size, latent_dim, (buffer,) = latent.shape[1], expand.shape[1], pages
    queries, begin = q.reshape(tokens, -1), 0
    if one_product:
        # Its parts lie side by side already: joined again they are that product, and nothing is copied.
        begin = queries.shape[1]
        queries = latent = jnp.concatenate([queries, latent], axis=1)
    tile_rows = _tile_rows(tokens)
    absorbing = pl.cdiv(latent_dim, BLOCK) * heads * pl.cdiv(tokens, tile_rows)
    flat = buffer.reshape(-1, buffer.shape[-1])
    tables = [norm.weight, *(() if angles is None else (angles.cos, angles.sin))]
    arrays = [meta.positions, meta.seq_ids, meta.page_table, queries, latent, expand, *tables, flat]
    static: dict[str, Any] = {
        "spec": spec, "num_seqs": meta.page_table.shape[0], "query_dim": query_dim, "begin": begin,
        "tile_rows": tile_rows, "absorbing": absorbing, "interleaved": angles is not None and angles.interleaved,
        "eps": norm.eps,
    }  # fmt: skip
    absorbed, flat = pl.pallas_call(
        functools.partial(_absorb_kernel, **static),
        out_shape=[jax.ShapeDtypeStruct((tokens * heads, size), q.dtype), jax.ShapeDtypeStruct(flat.shape, flat.dtype)],
        grid=(absorbing + tokens,),
        input_output_aliases={len(arrays) - 1: 1},
        interpret=spec.interpret,
        compiler_params=triton_compiler_params(num_warps=4, num_stages=1),
        name="absorb_and_store",
    )(*arrays)
    return absorbed.reshape(tokens, heads, size), (flat.reshape(buffer.shape),)


def expand_heads(
    x: Float[Array, "T H L"], expand: Float[Array, "o L"], skipped: int, *, interpret: bool = False
) -> Float[Array, "T H Dv"]:
    """Each head's `x` times all of that head's rows of `expand` but the first `skipped`."""
    tokens, heads, _ = x.shape
    size = expand.shape[0] // heads - skipped
    tile_rows = _tile_rows(tokens)
    out = pl.pallas_call(
        functools.partial(_expand_kernel, heads=heads, skipped=skipped, size=size, tile_rows=tile_rows),
        out_shape=jax.ShapeDtypeStruct((tokens * heads, size), x.dtype),
        grid=(pl.cdiv(size, BLOCK_OUT), heads, pl.cdiv(tokens, tile_rows)),
        interpret=interpret,
        compiler_params=triton_compiler_params(num_warps=4, num_stages=3),
        name="expand_heads",
    )(x.reshape(tokens * heads, -1), expand)
    return out.reshape(tokens, heads, size)


def _expand_kernel(
    x_ref: Any, expand_ref: Any, out_ref: Any, *, heads: int, skipped: int, size: int, tile_rows: int
) -> None:
    block, head, tile = (pl.program_id(axis) for axis in range(3))
    token = tile * tile_rows + jnp.arange(tile_rows)
    inside = token < x_ref.shape[0] // heads
    row = jnp.where(inside, token * heads + head, x_ref.shape[0])
    channel = block * BLOCK_OUT + jnp.arange(BLOCK_OUT)
    known = channel < size
    latents = x_ref.shape[1]

    def body(index: Array, acc: Array) -> Array:
        at = index * BLOCK + jnp.arange(BLOCK)
        x = triton_load(x_ref.at[row[:, None], at[None, :]], mask=inside[:, None] & (at < latents)[None, :], other=0)
        weights = triton_load(
            expand_ref.at[(head * (skipped + size) + skipped + channel)[:, None], at[None, :]],
            mask=known[:, None] & (at < latents)[None, :],
            other=0,
        )
        return acc + dot(x.astype(weights.dtype), weights)

    acc = lax.fori_loop(0, pl.cdiv(latents, BLOCK), body, jnp.zeros((tile_rows, BLOCK_OUT), jnp.float32))
    triton_store(
        out_ref.at[row[:, None], channel[None, :]], acc.astype(out_ref.dtype), mask=inside[:, None] & known[None, :]
    )


def _tile_rows(tokens: int) -> int:
    return min(MAX_TILE_ROWS, max(16, pl.next_power_of_2(tokens)))


def _absorb_kernel(
    positions_ref: Any, seq_ids_ref: Any, page_table_ref: Any, queries_ref: Any, latent_ref: Any, expand_ref: Any,
    norm_ref: Any, *refs: Any, spec: AttentionSpec, num_seqs: int, query_dim: int, begin: int, tile_rows: int,
    absorbing: int, interleaved: bool, eps: float,
) -> None:  # fmt: skip
    *angle_refs, _pages, out_ref, pages_ref = refs
    program = pl.program_id(0)
    tokens = queries_ref.shape[0]
    kept, rotary = spec.parts[0], Part(spec.value_dim, spec.head_dim - spec.value_dim)
    still = query_dim - rotary.size

    @pl.when(program < absorbing)
    def _() -> None:
        blocks = pl.cdiv(kept.size, BLOCK)
        block, head = lax.rem(program, blocks), lax.rem(lax.div(program, blocks), spec.heads)
        token = lax.div(program, blocks * spec.heads) * tile_rows + jnp.arange(tile_rows)
        inside = token < tokens
        channel = jnp.arange(max(16, pl.next_power_of_2(still)))
        column = block * BLOCK + jnp.arange(BLOCK)
        q = triton_load(
            queries_ref.at[token[:, None], (head * query_dim + channel)[None, :]],
            mask=inside[:, None] & (channel < still)[None, :],
            other=0,
        )
        rows = triton_load(
            expand_ref.at[(head * (expand_ref.shape[0] // spec.heads) + channel)[:, None], column[None, :]],
            mask=(channel < still)[:, None] & (column < kept.size)[None, :],
            other=0,
        )
        out = dot(q.astype(rows.dtype), rows, contract=0)
        at = jnp.where(inside, token * spec.heads + head, out_ref.shape[0])
        mask = inside[:, None] & (column < kept.size)[None, :]
        triton_store(out_ref.at[at[:, None], column[None, :]], out.astype(spec.dtype), mask=mask)

    token = program - absorbing
    seq = seq_ids_ref[jnp.maximum(token, 0)]

    @pl.when((token >= 0) & (seq < num_seqs))
    def _() -> None:
        channel = jnp.arange(rotary.padded)
        partner, sign, angle = rotation_partner(channel, rotary.size, interleaved)
        rotates = channel < rotary.size

        def rotated(ref: Any, first: Array, live: Array) -> Array:
            """The rotary channels, of which the first are at places `first [n]` of the token's row, float32."""
            mask = live[:, None] & rotates[None, :]
            x, other = (
                triton_load(ref.at[token, first[:, None] + at[None, :]], mask=mask, other=0).astype(jnp.float32)
                for at in (channel, partner)
            )
            if not angle_refs:
                return x
            cos, sin = (triton_load(ref.at[token, angle], mask=rotates, other=0) for ref in angle_refs)
            return x * cos[None, :] + other * (sin * sign)[None, :]

        def rotate_queries(index: Array, carry: Array) -> Array:
            head = index * HEADS + jnp.arange(HEADS)
            live = head < spec.heads
            at = jnp.where(live, token * spec.heads + head, out_ref.shape[0])[:, None]
            x = rotated(queries_ref, head * query_dim + still, live).astype(spec.dtype)
            mask = live[:, None] & rotates[None, :]
            triton_store(out_ref.at[at, rotary.start + channel[None, :]], x, mask=mask)
            return carry

        lax.fori_loop(0, pl.cdiv(spec.heads, HEADS), rotate_queries, 0)

        dim = jnp.arange(kept.padded)
        inside = dim < kept.size
        x = triton_load(latent_ref.at[token, begin + dim], mask=inside, other=0).astype(jnp.float32)
        weight = triton_load(norm_ref.at[dim], mask=inside, other=0)
        x = x * lax.rsqrt(jnp.sum(x * x) / kept.size + eps) * weight
        key = rotated(latent_ref, jnp.full((1,), begin + kept.size), jnp.full((1,), True))
        position = positions_ref[token]
        page = page_table_ref[seq, lax.div(position, spec.page_size)]
        row = page * spec.page_size + lax.rem(position, spec.page_size)
        store_token(pages_ref, row, [(x[None, :], dim, inside), (key, rotary.start + channel, rotates)], spec)
