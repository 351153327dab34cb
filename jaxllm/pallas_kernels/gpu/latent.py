"""Latent attention on NVIDIA GPUs: what stands before attention over latents, and behind it, in a kernel each.

Before it, two kinds of programs work beside each other. Those of a (block of channels, head, tile of rows) multiply
queries by their head's rows of the matrix that expands latents, read where they lie, once for each tile. Those of a
token norm and rotate its latent, store it, and rotate the rest of its queries; padding tokens write nothing to pages.
Behind it a program of a (head, tile of rows) multiplies by that head's other rows.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxllm.compat import triton_compiler_params, triton_load, triton_store
from jaxllm.pallas_kernels.gpu.attention import attend_to_pages, rotation_partner, store_token
from jaxllm.pallas_kernels.gpu.tile import AttentionSpec, Part
from jaxllm.pallas_kernels.metadata import StepMetadata
from jaxllm.pallas_kernels.pages import QUANTIZED, Pages
from jaxllm.pallas_kernels.products import RootMeanSquare, dot

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
    spec = AttentionSpec(heads, 1, size, buffer.shape[2], q.dtype, scale, None, None, expand.shape[1], quantized)
    absorbed, pages = absorb_and_store(
        q, latent, expand, norm, angles, pages, meta, spec, one_product=one_product, interpret=interpret
    )
    out = attend_to_pages(absorbed, pages, meta, spec, interpret=interpret)
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
    interpret: bool = False,
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
    absorbed, flat = pl.pallas_call(
        functools.partial(
            _kernel,
            spec=spec,
            num_seqs=meta.page_table.shape[0],
            query_dim=query_dim,
            begin=begin,
            tile_rows=tile_rows,
            absorbing=absorbing,
            interleaved=angles is not None and angles.interleaved,
            eps=norm.eps,
        ),
        out_shape=[
            jax.ShapeDtypeStruct((tokens * heads, size), q.dtype),
            jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        ],
        grid=(absorbing + tokens,),
        input_output_aliases={len(arrays) - 1: 1},
        interpret=interpret,
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


def _kernel(
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
