"""Causal depthwise convolutions over packed sequences, whose last inputs are a state of each sequence."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.metadata import StepMetadata
from jaxllm.pallas_kernels.states import kept_length, read_state, write_state


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

    Returns:
        The convolution, and the buffer with the states after this step and those that are to be kept.
    """
    assert meta.states is not None, "a model with states is run with their rows"
    u = u.astype(jnp.float32)
    past = read_state(buffer, meta.states)
    out = _convolve(u, past, taps, meta)
    kept = _last_inputs(u, past, meta, kept_length(meta.states, meta))
    after = _last_inputs(u, past, meta, jnp.diff(meta.query_start))
    out = out if bias is None else out + bias
    return out if activation is None else activation(out), write_state(buffer, after, kept, meta.states)


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
    """The last `r` inputs of each sequence once `length` of its tokens in this step have run."""
    reach = past.shape[1]
    place = length[:, None] - reach + jnp.arange(reach)  # in this step's tokens; before them where negative
    new = u[jnp.clip(meta.query_start[:-1, None] + place, 0, u.shape[0] - 1)]
    old = jnp.take_along_axis(past, jnp.clip(reach + place, 0, reach - 1)[:, :, None], axis=1)
    return jnp.where((place >= 0)[:, :, None], new, old)
