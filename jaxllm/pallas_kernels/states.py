"""States of sequences: how layers read and write them, the simplest of them, and steps whose tokens may be refused.

A causal depthwise convolution keeps the last inputs of each sequence. Other layers keep matrices (`delta_rule`, `ssd`),
which cannot forget a token. A step of which some tokens may be refused therefore runs its tokens over copies of the
states, one layer's at a time, and keeps what the kernel was given of each token: kilobytes, where a state is megabytes.
Once it is known which tokens stay, the kernel runs those again, over the states themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxllm.pallas_kernels.metadata import StateRows, StepMetadata

einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
"""In float32, which accelerators would shorten its inputs for."""


def along(flags: Bool[Array, "n"], array: Array) -> Bool[Array, "n ..."]:
    """`flags` of the first axis of an array, to be broadcast to it."""
    return flags.reshape(-1, *(1,) * (array.ndim - 1))


def read_state(buffer: Float[Array, "N *n"], rows: StateRows) -> Float[Array, "S *n"]:
    """The state of each sequence before this step's tokens; zero where the sequence begins."""
    found = buffer[rows.read]
    return jnp.where(along(rows.begins, found), 0, found)


def kept_length(rows: StateRows, meta: StepMetadata) -> Int[Array, "S"]:
    """How many of this step's tokens each kept state comes after."""
    length = jnp.diff(meta.query_start)
    return jnp.clip(rows.kept_tokens - (meta.context_len - length), 0, length)


def write_state(
    buffer: Float[Array, "N *n"], after: Float[Array, "S *m"], kept: Float[Array, "S *m"], rows: StateRows
) -> Float[Array, "N *n"]:
    """The buffer with the states after this step, and the kept ones; their axes may be split where its are not."""
    where, states = jnp.concatenate([rows.written, rows.kept]), jnp.concatenate([after, kept])
    return buffer.at[where].set(states.reshape(-1, *buffer.shape[1:]).astype(buffer.dtype))


StateKernel = Callable[..., tuple[jax.Array, jax.Array]]
"""`(*tokens, *constants, buffer, meta) -> (out, buffer)`: what tokens read of the states, and the states after them."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tentative:
    """States as they were before a step, and what its tokens would make of them."""

    buffer: Float[Array, "N *n"]
    tokens: tuple[jax.Array, ...]
    """What the kernel was given of each token, `[T, ...]`."""
    constants: tuple[Any, ...]
    kernel: StateKernel = field(metadata={"static": True})


def run_states(
    kernel: StateKernel,
    tokens: tuple[jax.Array, ...],
    constants: tuple[Any, ...],
    buffer: Float[Array, "N *n"],
    meta: StepMetadata,
) -> tuple[jax.Array, jax.Array | Tentative]:
    """What the tokens read, and the states after them, which in a tentative step are yet to be settled."""
    if not meta.tentative:
        return kernel(*tokens, *constants, buffer, meta)
    count = len(meta.state_rows.read)
    own, nowhere = jnp.arange(count, dtype=jnp.int32), jnp.full(count, count, jnp.int32)
    rows = StateRows(own, meta.state_rows.begins, own, kept=nowhere, kept_tokens=jnp.zeros_like(own))
    out, _ = kernel(*tokens, *constants, buffer[meta.state_rows.read], replace(meta, states=rows))
    return out, Tentative(buffer, tokens, constants, kernel)


def staying(tried: StepMetadata, stays: StepMetadata) -> Int[Array, "T"]:
    """Where the tokens of `stays` are in `tried`: the same step with fewer tokens of each sequence, its first ones."""
    seq = jnp.minimum(stays.seq_ids, len(stays.context_len) - 1)
    place = jnp.arange(len(stays.seq_ids)) - stays.query_start[seq]
    return jnp.clip(tried.query_start[seq] + place, 0, len(place) - 1)


def settle(caches: Any, stay: Int[Array, "T"], stays: StepMetadata) -> Any:
    """The caches after a step of which only the tokens `stay` do, which `stays` describes as a step of their own."""

    def settled(cache: Any) -> Any:
        if not isinstance(cache, Tentative):
            return cache
        tokens = (part[stay] for part in cache.tokens)
        return cache.kernel(*tokens, *cache.constants, cache.buffer, stays)[1]

    return jax.tree.map(settled, caches, is_leaf=lambda cache: isinstance(cache, Tentative))


def causal_conv(
    u: Float[Array, "T C"],
    taps: Float[Array, "C k"],
    bias: Float[Array, "C"] | None,
    buffer: Float[Array, "N r C"],
    meta: StepMetadata,
    activation: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[Float[Array, "T C"], Float[Array, "N r C"]]:
    """Each channel's taps over a token's own input and the `r = k - 1` before it in its sequence, in float32.

    Args:
        taps: the last of each channel is on the token's own input.
        buffer: the last `r` inputs of each sequence, one sequence a row; zeros precede the first token.
        activation: of the result.

    Returns the convolution, and the buffer with the states after this step and those that are to be kept.
    """
    u = u.astype(jnp.float32)
    past = read_state(buffer, meta.state_rows)
    out = _convolve(u, past, taps, meta)
    kept = _last_inputs(u, past, meta, kept_length(meta.state_rows, meta))
    after = _last_inputs(u, past, meta, jnp.diff(meta.query_start))
    out = out if bias is None else out + bias
    return out if activation is None else activation(out), write_state(buffer, after, kept, meta.state_rows)


def _convolve(
    u: Float[Array, "T C"], past: Float[Array, "S r C"], taps: Float[Array, "C k"], meta: StepMetadata
) -> Float[Array, "T C"]:
    reach = past.shape[1]
    seq = jnp.minimum(meta.seq_ids, past.shape[0] - 1)
    place = jnp.arange(u.shape[0]) - meta.query_start[seq]
    total = u * taps[:, reach]
    for back in range(1, reach + 1):
        before = past[seq, jnp.clip(reach + place - back, 0, reach - 1)]
        seen = jnp.where((place >= back)[:, None], jnp.roll(u, back, axis=0), before)
        total += seen * taps[:, reach - back]
    return total


def _last_inputs(
    u: Float[Array, "T C"], past: Float[Array, "S r C"], meta: StepMetadata, length: Int[Array, "S"]
) -> Float[Array, "S r C"]:
    reach = past.shape[1]
    place = length[:, None] - reach + jnp.arange(reach)  # in this step's tokens; before them where negative
    new = u[jnp.clip(meta.query_start[:-1, None] + place, 0, u.shape[0] - 1)]
    old = jnp.take_along_axis(past, jnp.clip(reach + place, 0, reach - 1)[:, :, None], axis=1)
    return jnp.where((place >= 0)[:, :, None], new, old)
