"""State-space duality (Dao & Gu 2024, arXiv:2405.21060) over packed sequences, in plain XLA.

Each head keeps a matrix of its sequence and lets it fade: token `t` makes of it
`state_t = exp(dt_t * a) * state_(t-1) + dt_t * x_t B_t'` and reads `y_t = state_t C_t + skip * x_t`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.metadata import StepMetadata
from jaxllm.pallas_kernels.states import along, einsum, kept_length, read_state, write_state

CHUNK = 64
"""Tokens that `chunked` takes into one product of matrices."""

States = Float[Array, "S G J P N"]


class SSDInputs(NamedTuple):
    """What one step's tokens put into their sequences' states and read from them, in float32.

    Heads share what is put in and read out: the first `H // G` of them the first of `G` groups, and so on.

    Attributes:
        x: a vector for each head.
        dt: how far each head moves on; not negative.
        a: how fast each head's state fades; negative.
        b, c: what a group's heads put `x` at, and read from.
        skip: how much of `x` each head passes on beside the state.
    """

    x: Float[Array, "T H P"]
    dt: Float[Array, "T H"]
    a: Float[Array, "H"]
    b: Float[Array, "T G N"]
    c: Float[Array, "T G N"]
    skip: Float[Array, "H"]


def recurrent(
    inputs: SSDInputs, buffer: Float[Array, "B H P N"], meta: StepMetadata
) -> tuple[Float[Array, "T H P"], Float[Array, "B H P N"]]:
    """One token after the other, so that a result does not depend on where a sequence's chunks end.

    Returns what the heads read, and the buffer with the states after this step and those that are to be kept.
    """
    past = _by_group(read_state(buffer, meta.state_rows), inputs)
    if meta.decode_only:
        return _decoded(inputs, past, buffer, meta)
    tokens = grouped(inputs)
    first, lengths = meta.query_start, kept_length(meta.state_rows, meta)
    rows = len(past)

    def run(token: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        y, after, kept = carry
        seq = meta.seq_ids[token]
        new, read = moved_on(after[seq], *(part[token] for part in tokens))
        keeps = token + 1 - first[seq] == lengths[seq]
        return y.at[token].set(read), after.at[seq].set(new), kept.at[jnp.where(keeps, seq, rows)].set(new)

    kept = jnp.concatenate([past, past[:1]])  # a row more, for what is not kept
    y, after, kept = lax.fori_loop(0, first[-1], run, (jnp.zeros_like(tokens.x), past, kept))
    return finished(y, inputs), write_state(buffer, after, kept[:-1], meta.state_rows)


def chunked(
    inputs: SSDInputs, buffer: Float[Array, "B H P N"], meta: StepMetadata
) -> tuple[Float[Array, "T H P"], Float[Array, "B H P N"]]:
    """As `recurrent`, by products over chunks that end at multiples of `CHUNK`: steps that end there change nothing."""
    past = _by_group(read_state(buffer, meta.state_rows), inputs)
    if meta.decode_only:
        return _decoded(inputs, past, buffer, meta)
    tokens = grouped(inputs)
    padded = _Tokens(*(jnp.pad(part, [(0, CHUNK)] + [(0, 0)] * (part.ndim - 1)) for part in tokens))
    first, length = meta.query_start, jnp.diff(meta.query_start)
    lengths = kept_length(meta.state_rows, meta)
    into = (meta.context_len - length) % CHUNK  # how far into a chunk each sequence is already
    decodes = jnp.arange(len(length)) < meta.num_decodes
    pieces = jnp.where(decodes, 0, -(-(into + length) // CHUNK) * (length > 0))
    ends = jnp.cumsum(pieces)

    def run(piece: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        y, after, kept = carry
        seq = jnp.searchsorted(ends, piece, side="right")
        border = (piece - ends[seq] + pieces[seq]) * CHUNK - into[seq]
        begin, end = jnp.maximum(border, 0), jnp.minimum(border + CHUNK, length[seq])
        at = first[seq] + begin
        here = _Tokens(*(lax.dynamic_slice_in_dim(part, at, CHUNK) for part in padded))
        read = _chunk_read(after[seq], here)
        keeps = (begin < lengths[seq]) & (lengths[seq] <= end)
        kept = lax.cond(
            keeps, lambda: kept.at[seq].set(_chunk_state(after[seq], here, lengths[seq] - begin)), lambda: kept
        )
        new = _chunk_state(after[seq], here, end - begin)
        return lax.dynamic_update_slice_in_dim(y, read, at, 0), after.at[seq].set(new), kept

    token = _Tokens(*(padded_part[first[:-1]] for padded_part in padded))
    moved, read = jax.vmap(moved_on)(past, *token)
    after = jnp.where(along(decodes, past), moved, past)
    y = jnp.zeros_like(padded.x).at[jnp.where(decodes, first[:-1], len(padded.x))].set(read, mode="drop")
    y, after, kept = lax.fori_loop(0, ends[-1], run, (y, after, after))
    return finished(y[: len(inputs.x)], inputs), write_state(buffer, after, kept, meta.state_rows)


class _Tokens(NamedTuple):
    """Inputs by group, and the logarithm of how far each token lets the states fade."""

    x: Float[Array, "*T G J P"]
    """Times `dt`."""
    b: Float[Array, "*T G N"]
    c: Float[Array, "*T G N"]
    fade: Float[Array, "*T G J"]


def grouped(inputs: SSDInputs) -> _Tokens:
    groups = inputs.b.shape[1]
    x = inputs.x * inputs.dt[:, :, None]
    fade = inputs.dt * inputs.a
    tokens, heads, dim = x.shape
    return _Tokens(
        x.reshape(tokens, groups, heads // groups, dim),
        inputs.b,
        inputs.c,
        fade.reshape(tokens, groups, heads // groups),
    )


def _by_group(states: Float[Array, "S H P N"], inputs: SSDInputs) -> States:
    return states.reshape(states.shape[0], inputs.b.shape[1], -1, *states.shape[2:])


def moved_on(
    state: Float[Array, "G J P N"],
    x: Float[Array, "G J P"],
    b: Float[Array, "G N"],
    c: Float[Array, "G N"],
    fade: Float[Array, "G J"],
) -> tuple[Float[Array, "G J P N"], Float[Array, "G J P"]]:
    """A state after one token, and what the token reads."""
    new = state * jnp.exp(fade)[..., None, None] + x[..., None] * b[:, None, None]
    return new, (new * c[:, None, None]).sum(-1)


def _decoded(
    inputs: SSDInputs, past: States, buffer: Float[Array, "B H P N"], meta: StepMetadata
) -> tuple[Float[Array, "T H P"], Float[Array, "B H P N"]]:
    after, y = jax.vmap(moved_on)(past, *grouped(inputs))
    return finished(y, inputs), write_state(buffer, after, after, meta.state_rows)


def _chunk_read(state: Float[Array, "G J P N"], tokens: _Tokens) -> Float[Array, "L G J P"]:
    total = jnp.cumsum(tokens.fade, axis=0)
    place = jnp.arange(len(total))
    earlier = (place[:, None] >= place)[:, :, None, None]
    between = jnp.exp(jnp.where(earlier, total[:, None] - total[None, :], -jnp.inf))
    scores = einsum("lgn,mgn->lmg", tokens.c, tokens.b)[..., None] * between
    before = einsum("lgn,grpn->lgrp", tokens.c, state) * jnp.exp(total)[..., None]
    return einsum("lmgr,mgrp->lgrp", scores, tokens.x) + before


def _chunk_state(state: Float[Array, "G J P N"], tokens: _Tokens, count: Int[Array, ""]) -> Float[Array, "G J P N"]:
    live = jnp.arange(len(tokens.fade)) < count
    total = jnp.cumsum(jnp.where(along(live, tokens.fade), tokens.fade, 0), axis=0)
    left = jnp.where(along(live, total), jnp.exp(total[-1] - total), 0)
    new = einsum("mgrp,mgn->grpn", tokens.x * left[..., None], tokens.b)
    return state * jnp.exp(total[-1])[..., None, None] + new


def finished(y: Float[Array, "T G J P"], inputs: SSDInputs) -> Float[Array, "T H P"]:
    return y.reshape(inputs.x.shape) + inputs.skip[:, None] * inputs.x
