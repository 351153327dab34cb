"""Attention among the tokens of whole texts that lie end to end in a step: no pages, later tokens seen too; plain XLA.

Queries go a tile at a time, whatever texts they are of, and each tile visits the keys of those texts only. So texts
need no padding between them, and short ones share a tile.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float

from jaxllm.pallas_kernels.metadata import StepMetadata
from jaxllm.pallas_kernels.reference import NEGATIVE, Options, Softmax

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
    """Each token attends to its whole text, or with a `window` to the tokens that are less than that far away.

    All of a text is in the step. Padding comes out zero.
    """
    tokens, _, dim = q.shape
    size = min(TILE, tokens)
    options = Options(scale, window, softcap, None, dim)
    behind = -tokens % size
    q, k, v = (jnp.pad(x, ((0, behind), (0, 0), (0, 0))) for x in (q, k, v))
    seqs = meta.context_len.shape[0]
    seq_ids = jnp.pad(meta.seq_ids, (0, behind), constant_values=seqs)
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

        start = options.start(queries.shape[1:3], None)
        found = lax.fori_loop(first // size, (last + size - 1) // size, block, start).finish()
        return out.at[i].set(found)

    out = lax.fori_loop(0, (live + size - 1) // size, tile, jnp.zeros(queries.shape, jnp.float32))
    out = rearrange(out, "n kv (group t) dim -> (n t) (kv group) dim", t=size)[:tokens]
    return jnp.where(meta.live[:, None, None], out, 0).astype(q.dtype)
