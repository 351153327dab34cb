"""Kernels for whole sequences of one length, which keep nothing and have a derivative.

Loops whose length is only known while they run, as those of the engine's kernels are, cannot be differentiated in
reverse. Here a step is `S` sequences of `T / S` tokens each, from their first token on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from einops import rearrange, repeat
from jax import lax
from jaxtyping import Array, Float

from jaxllm.pallas_kernels import ssd
from jaxllm.pallas_kernels.delta_rule import Tokens, step, tokens_of
from jaxllm.pallas_kernels.kernels import COMPILED
from jaxllm.pallas_kernels.metadata import StateRows, StepMetadata
from jaxllm.pallas_kernels.pages import Pages
from jaxllm.pallas_kernels.reference import AttentionOptions, Options


def whole_sequences(count: int, length: int) -> StepMetadata:
    """The metadata of `count` sequences of `length` tokens each; each has the state row of its number."""
    rows = jnp.arange(count)
    return StepMetadata(
        positions=jnp.tile(jnp.arange(length), count),
        seq_ids=jnp.repeat(rows, length),
        query_start=jnp.arange(count + 1) * length,
        context_len=jnp.full(count, length),
        page_table=jnp.zeros((count, 1), jnp.int32),
        num_decodes=jnp.int32(0),
        num_seqs=jnp.int32(count),
        rotary_lengths=jnp.full(count * length, length),
        decode_only=False,
        states=StateRows(rows, jnp.ones(count, bool), rows, jnp.full(count, count), jnp.zeros(count, jnp.int32)),
    )


def attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"] | None,
    pages: Pages,
    meta: StepMetadata,
    **given: Unpack[AttentionOptions],
) -> tuple[Float[Array, "T H Dv"], Pages]:
    """See `reference.paged_attention`. Its pages are one, with the step's keys and values: `[1, T, K, D]`."""
    options = Options(**given)
    if k.shape[1]:
        pages = tuple(x[None] for x in (k, v) if x is not None)
    keys, values = pages[0][0], pages[-1][0, ..., : options.value_dim]
    seqs, num_kv, size = len(meta.context_len), keys.shape[1], len(q) // len(meta.context_len)
    queries = rearrange(q, "(seq t) (kv group) dim -> seq kv (group t) dim", seq=seqs, kv=num_kv)
    keys, values = (rearrange(x, "(seq t) kv dim -> seq kv t dim", seq=seqs) for x in (keys, values))
    by_head = (options.sinks, options.slopes)
    sinks, slopes = (None if x is None else jnp.repeat(x.reshape(num_kv, -1), size, axis=1) for x in by_head)
    options = options._replace(sinks=sinks, slopes=slopes, value_dim=values.shape[-1])
    place = jnp.arange(size)
    query = jnp.tile(place, q.shape[1] // num_kv)
    logits = options.mask(options.logits(queries, keys), query[:, None], place)
    out = options.start(queries.shape[:-1]).add(logits, values).finish()
    return rearrange(out, "seq kv (group t) dim -> (seq t) (kv group) dim", t=size).astype(q.dtype), pages


def delta_rule(
    qkv: Float[Array, "T C"],
    decay: Float[Array, "T H"],
    beta: Float[Array, "T H"],
    buffer: Float[Array, "N H Dk Dv"],
    meta: StepMetadata,
    *,
    key_heads: int,
) -> tuple[Float[Array, "T H Dv"], Float[Array, "N H Dk Dv"]]:
    """See `delta_rule.delta_rule`; one token after the other."""
    tokens = tokens_of(qkv, decay, beta, key_heads, buffer.shape[2])
    seqs = len(meta.context_len)

    def run(state: jax.Array, x: Tokens) -> tuple[jax.Array, jax.Array]:
        read, after = step(x, state)
        return after, read

    return _scanned(run, (seqs, *buffer.shape[1:]), tokens), buffer


def state_space(
    inputs: ssd.SSDInputs, buffer: Float[Array, "B H P N"], meta: StepMetadata
) -> tuple[Float[Array, "T H P"], Float[Array, "B H P N"]]:
    """See `ssd.recurrent`."""
    tokens, seqs = ssd.grouped(inputs), len(meta.context_len)
    _, groups, heads, dim = tokens.x.shape

    def run(state: jax.Array, x: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        return jax.vmap(ssd.moved_on)(state, *x)

    read = _scanned(run, (seqs, groups, heads, dim, buffer.shape[-1]), tokens)
    return ssd.finished(read, inputs), buffer


def _scanned(run: Callable[..., Any], shape: tuple[int, ...], tokens: Any) -> Float[Array, "T *n"]:
    by_time = jax.tree.map(lambda x: x.reshape(shape[0], -1, *x.shape[1:]).swapaxes(0, 1), tokens)
    _, read = lax.scan(run, jnp.zeros(shape, jnp.float32), by_time)
    return read.swapaxes(0, 1).reshape(-1, *read.shape[2:])


WHOLE = replace(COMPILED, name="whole", attention=attention, delta_rule=delta_rule, ssd=state_space)
"""Plain XLA, for `whole_sequences`."""


def watched_attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"] | None,
    pages: Pages,
    meta: StepMetadata,
    **given: Unpack[AttentionOptions],
) -> tuple[Float[Array, "T H D"], Pages]:
    """As `attention`, of one sequence. Behind the keys and values its pages have queries `[1, T, H, D]` and
    weights `[1, H, T, T]`: of the layer itself, and then of each later layer that shares its keys.
    """
    assert given.get("value_dim") is None, "latents are not watched"
    earlier = pages[2:]
    out, pages = attention(q, k, v, pages[:2], meta, **given)
    options = Options(**given)
    options = options._replace(slopes=None if options.slopes is None else options.slopes[:, None])
    keys = repeat(pages[0][0], "t kv dim -> (kv group) t dim", group=q.shape[1] // pages[0].shape[2])
    place = jnp.arange(len(q))
    scores = options.mask(options.logits(q.swapaxes(0, 1), keys), place[:, None], place)
    if options.sinks is not None:  # they take a part of each token's attention, and give nothing
        sinks = jnp.broadcast_to(options.sinks[:, None, None], (*scores.shape[:2], 1))
        scores = jnp.concatenate([scores, sinks], axis=-1)
    weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1)[..., : len(q)]
    return out, (*pages, *earlier, q[None], weights[None])


WATCHED = replace(WHOLE, name="watched", attention=watched_attention)
"""Plain XLA, for `whole_sequences` of one sequence."""
