"""Paged attention in plain XLA: the oracle of the kernels, and the path of a CPU without its own.

Both halves walk the pages block by block with a running softmax (Milakov & Gimelshein 2018, arXiv:1805.02867) and stop
at the longest context they have, so that the cost follows the batch and not the model's maximum. Decode rows go
together, a block of every sequence's pages at a time; prefill rows go one tile of one sequence's queries at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Required, TypedDict, Unpack

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from jaxllm.pallas_kernels.metadata import StepMetadata, prefill_tiles
from jaxllm.pallas_kernels.pages import Pages, from_storage, write_pages
from jaxllm.pallas_kernels.products import precision

DECODE_BLOCK = 128
"""Tokens of KV that decode rows visit at a time."""
DECODE_GROUP = 16
PREFILL_BLOCK = 256
"""Tokens of KV that a tile of queries visits at a time."""
PREFILL_TILE = 128

NEGATIVE = -1e30


class Softmax(NamedTuple):
    """A softmax under way: the greatest logit, the sum of exponentials, and the weighted values so far."""

    top: jax.Array
    total: jax.Array
    values: jax.Array

    def add(self, logits: jax.Array, values: jax.Array) -> Softmax:
        """Take in `logits [..., n]` (masked ones at NEGATIVE) and `values [..., n, D]`."""
        top = jnp.maximum(self.top, logits.max(-1))
        shrink = jnp.exp(self.top - top)
        weights = jnp.where(logits > NEGATIVE, jnp.exp(logits - top[..., None]), 0)
        batch = tuple(range(values.ndim - 2))
        weighted = lax.dot_general(
            weights.astype(values.dtype),
            values,
            (((weights.ndim - 1,), (values.ndim - 2,)), (batch, batch)),
            precision=precision(values),
            preferred_element_type=jnp.float32,
        )
        return Softmax(top, self.total * shrink + weights.sum(-1), self.values * shrink[..., None] + weighted)

    def finish(self) -> jax.Array:
        """The attention output; zero where nothing was visible."""
        return self.values / jnp.where(self.total == 0, 1, self.total)[..., None]


class AttentionOptions(TypedDict, total=False):
    """The keywords of `paged_attention` on every platform."""

    scale: Required[float]
    """Factor on the logits."""
    window: int | None
    """A token at position `i` sees positions `j` with `i - window < j <= i`."""
    chunked: bool
    """It sees those from the last multiple of `window` on instead."""
    softcap: float | None
    """Logits become `softcap * tanh(logits / softcap)`."""
    sinks: Float[Array, "H"] | None
    """One more logit a head, which takes softmax mass and has no value."""
    slopes: Float[Array, "H"] | None
    """What a head's logits fall by with each token between a query and a key, after the cap."""
    visible_until: Int[Array, "T"] | None
    """The last position that each token of a prefill sees, where that is a later one; other sets have no such mask."""
    value_dim: int | None
    """With latent pages, how many channels of a key are its value; all of them if not given."""


class Options(NamedTuple):
    """`AttentionOptions`, with `sinks` and `slopes` for each row of the logits, and a `value_dim` in every case."""

    scale: float
    window: int | None = None
    chunked: bool = False
    softcap: float | None = None
    sinks: jax.Array | None = None
    slopes: jax.Array | None = None
    visible_until: jax.Array | None = None
    value_dim: Any = None

    def start(self, shape: tuple[int, ...]) -> Softmax:
        """An empty softmax, or one that already holds the sinks."""
        zeros = jnp.zeros((*shape, self.value_dim), jnp.float32)
        if self.sinks is None:
            return Softmax(jnp.full(shape, NEGATIVE, jnp.float32), jnp.zeros(shape, jnp.float32), zeros)
        return Softmax(jnp.broadcast_to(self.sinks, shape).astype(jnp.float32), jnp.ones(shape, jnp.float32), zeros)

    def logits(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """`[..., m, D] x [..., n, D] -> [..., m, n]`, scaled and capped."""
        batch = tuple(range(q.ndim - 2))
        last = (q.ndim - 1,)
        out = lax.dot_general(
            q.astype(k.dtype), k, ((last, last), (batch, batch)), precision=precision(k),
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        out = out * self.scale
        return out if self.softcap is None else self.softcap * jnp.tanh(out / self.softcap)

    def mask(self, logits: jax.Array, query: jax.Array, key: jax.Array, until: jax.Array | None = None) -> jax.Array:
        """NEGATIVE wherever the token at position `query` may not see the one at position `key`.

        It sees those up to `until`, if that is given.

        The logits of others fall with the distance by `slopes`.
        """
        if self.slopes is not None:
            logits = logits + self.slopes[..., None] * (key - query)
        visible = key <= (query if until is None else until)
        if self.window is not None:
            visible &= key >= self.first_visible(query) if self.chunked else key > query - self.window
        return jnp.where(visible, logits, NEGATIVE)

    def first_visible(self, query: jax.Array) -> jax.Array:
        """The earliest position that the token at `query` sees."""
        if self.window is None:
            return jnp.zeros_like(query)
        if self.chunked:
            return query - query % self.window
        return jnp.maximum(query - self.window + 1, 0)


def paged_attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"] | None,
    pages: Pages,
    meta: StepMetadata,
    **given: Unpack[AttentionOptions],
) -> tuple[Float[Array, "T H Dv"], Pages]:
    """Write new keys and values into their pages, then attend to everything each token may see.

    Args:
        q, k, v: of the new tokens; query head `h` uses KV head `h // (H // K)`. Without `v` the values are the first
            `value_dim` channels of the keys, which is how latent attention caches them. With no KV heads in `k` and `v`
            nothing is new: another layer has written the pages.
        pages: of the keys and values, or of a latent without `v`, as `Kernels.page_layout` has them; updated in place
            when donated.

    Returns the output in `q`'s dtype (padding rows are zero) and the new pages. Sums run in float32.
    Raises ValueError: `v` and the number of page buffers disagree, or there is a `value_dim` beside `v`.
    """
    options = Options(**given)
    if v is not None and options.value_dim is not None:
        raise ValueError(f"value_dim is {options.value_dim}, but the values come by themselves, in v")
    (tokens, _, dim), num_kv = q.shape, pages[0].shape[1]
    sinks, slopes = (None if x is None else x.reshape(num_kv, -1) for x in (options.sinks, options.slopes))
    options = options._replace(sinks=sinks, slopes=slopes, value_dim=options.value_dim or dim)
    if k.shape[1]:
        pages = write_pages(pages, k, v, meta)
    grouped = rearrange(q, "token (kv group) dim -> token kv group dim", kv=num_kv)
    if meta.decode_only:
        query = jnp.where(jnp.arange(tokens) < meta.num_decodes, meta.positions, -1)
        out = _walk(grouped, meta.page_table, query[:, None], pages, options, DECODE_BLOCK)
    else:
        out = _mixed(grouped, pages, meta, options)
    return rearrange(out, "token kv group dim -> token (kv group) dim").astype(q.dtype), pages


def _walk(
    q: Float[Array, "S K M D"],
    page_table: Int[Array, "S P"],
    query: Int[Array, "S _"],
    pages: Pages,
    options: Options,
    block_tokens: int,
    until: Int[Array, "S _"] | None = None,
) -> Float[Array, "S K M Dv"]:
    """Queries at positions `query`, one for all rows of a sequence or one each, over their sequences' pages.

    A query at -1 sees nothing, and comes out zero.
    """
    page_size = pages[0].shape[2]
    per_block = max(block_tokens // page_size, 1)
    block = per_block * page_size
    page_table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % per_block)))

    def body(i: jax.Array, softmax: Softmax) -> Softmax:
        ids = lax.dynamic_slice_in_dim(page_table, i * per_block, per_block, axis=1)
        keys, *rest = (from_storage(_gather(buffer, ids), q.dtype) for buffer in pages)
        values = [keys, *rest][-1][..., : options.value_dim]
        key = i * block + jnp.arange(block)
        ends = None if until is None else until[:, None, :, None]
        logits = options.mask(options.logits(q, keys), query[:, None, :, None], key, ends)
        return softmax.add(logits, values)

    first = jnp.min(jnp.where(query >= 0, options.first_visible(query), jnp.iinfo(jnp.int32).max)) // block
    last = (jnp.max(query if until is None else until) + block) // block
    out = lax.fori_loop(first, last, body, options.start(q.shape[:-1])).finish()
    return jnp.where(query[:, None, :, None] >= 0, out, 0)


def _mixed(q: Float[Array, "T K G D"], pages: Pages, meta: StepMetadata, options: Options) -> Float[Array, "T K G Dv"]:
    tokens, num_kv, group, _ = q.shape
    tile = min(PREFILL_TILE, tokens)
    rows = min(DECODE_GROUP, tokens, meta.page_table.shape[0])
    padded = jnp.pad(q, ((0, tile), (0, 0), (0, 0), (0, 0)))  # so that a slice near the end never slides back
    positions = jnp.pad(meta.positions, (0, tile))
    later = None if options.visible_until is None else jnp.pad(options.visible_until, (0, tile))
    page_table = jnp.pad(meta.page_table, ((0, rows), (0, 0)))

    def decode_group(i: jax.Array, out: jax.Array) -> jax.Array:
        begin = i * rows
        live = begin + jnp.arange(rows) < meta.num_decodes
        query = jnp.where(live, lax.dynamic_slice_in_dim(positions, begin, rows), -1)[:, None]
        queries, table = (lax.dynamic_slice_in_dim(array, begin, rows) for array in (padded, page_table))
        part = _walk(queries, table, query, pages, options, DECODE_BLOCK)
        return lax.dynamic_update_slice_in_dim(out, part, begin, 0)

    def prefill_tile(i: jax.Array, out: jax.Array) -> jax.Array:
        seq, begin, count, first = tiles[i]
        place = jnp.arange(tile)
        query = jnp.where(place < count, first + place, -1)
        until = None if later is None else jnp.where(place < count, lax.dynamic_slice_in_dim(later, begin, tile), -1)
        queries = lax.dynamic_slice_in_dim(padded, begin, tile)
        part = _prefill_tile(queries, page_table[seq], query, pages, options, until)
        # Rows past the chunk's end belong to the next tile, which comes later and overwrites them; what the last
        # tile leaves in padding rows is zero, as its masked rows saw nothing.
        return lax.dynamic_update_slice_in_dim(out, part, begin, 0)

    tiles = prefill_tiles(meta, tokens, tile)
    out = jnp.zeros((tokens + tile, num_kv, group, options.value_dim), jnp.float32)
    out = lax.fori_loop(0, (meta.num_decodes + rows - 1) // rows, decode_group, out)
    return lax.fori_loop(0, jnp.sum(tiles[:, 2] > 0), prefill_tile, out)[:tokens]


def _prefill_tile(
    q: Float[Array, "B K G D"],
    page_ids: Int[Array, "P"],
    query: Int[Array, "B"],
    pages: Pages,
    options: Options,
    until: Int[Array, "B"] | None = None,
) -> Float[Array, "B K G Dv"]:
    size, _, group, _ = q.shape
    rows = rearrange(q, "size kv group dim -> 1 kv (group size) dim")
    sinks, slopes = (None if x is None else jnp.repeat(x, size, axis=1) for x in (options.sinks, options.slopes))
    options = options._replace(sinks=sinks, slopes=slopes)
    until = None if until is None else jnp.tile(until, group)[None]
    out = _walk(rows, page_ids[None], jnp.tile(query, group)[None], pages, options, PREFILL_BLOCK, until)
    return rearrange(out, "1 kv (group size) dim -> size kv group dim", group=group)


def _gather(pages: Shaped[Array, "N K page D"], ids: Int[Array, "S n"]) -> Shaped[Array, "S K n*page D"]:
    num_pages, num_kv, page_size, dim = pages.shape
    rows = pages.reshape(num_pages * num_kv, page_size * dim)
    index = ids[:, None, :] * num_kv + jnp.arange(num_kv)[None, :, None]
    return rows.at[index].get(mode="promise_in_bounds").reshape(ids.shape[0], num_kv, -1, dim)


TILE = 128
"""Queries that go together, and keys that they visit at a time."""


def packed_attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    meta: StepMetadata,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Array, "T H D"]:
    """Each token attends to its whole text in the step, or to less than `window` tokens; padding gives zeros."""
    tokens, _, dim = q.shape
    size = min(TILE, tokens)
    options = Options(scale, softcap=softcap, value_dim=dim)
    missing = -tokens % size
    q, k, v = (jnp.pad(x, ((0, missing), (0, 0), (0, 0))) for x in (q, k, v))
    seqs = meta.context_len.shape[0]
    seq_ids = jnp.pad(meta.seq_ids, (0, missing), constant_values=seqs)
    queries = rearrange(q, "(n t) (kv group) dim -> n kv (group t) dim", t=size, kv=k.shape[1])
    keys, values = (rearrange(x, "(n t) kv dim -> n kv t dim", t=size) for x in (k, v))
    group = queries.shape[2] // size
    live = meta.query_start[-1]
    place = jnp.arange(size)

    def tile(i: jax.Array, out: jax.Array) -> jax.Array:
        begin = i * size
        end = jnp.minimum(begin + size, live)
        first = meta.query_start[seq_ids[begin]]
        last = meta.query_start[seq_ids[end - 1] + 1]
        if window is not None:
            first, last = jnp.maximum(first, begin - window + 1), jnp.minimum(last, end + window - 1)
        row_seq = jnp.tile(lax.dynamic_slice_in_dim(seq_ids, begin, size), group)[:, None]
        row = jnp.tile(begin + place, group)[:, None]

        def block(j: jax.Array, softmax: Softmax) -> Softmax:
            visible = row_seq == lax.dynamic_slice_in_dim(seq_ids, j * size, size)
            if window is not None:
                visible &= jnp.abs(row - (j * size + place)) < window
            logits = jnp.where(visible, options.logits(queries[i], keys[j]), NEGATIVE)
            return softmax.add(logits, values[j])

        start = options.start(queries.shape[1:3])
        found = lax.fori_loop(first // size, (last + size - 1) // size, block, start).finish()
        return out.at[i].set(found)

    out = lax.fori_loop(0, (live + size - 1) // size, tile, jnp.zeros(queries.shape, jnp.float32))
    out = rearrange(out, "n kv (group t) dim -> (n t) (kv group) dim", t=size)[:tokens]
    return jnp.where(meta.live[:, None, None], out, 0).astype(q.dtype)
