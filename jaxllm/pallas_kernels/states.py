"""How layers read and write the state that they keep of each sequence."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.metadata import StateRows, StepMetadata


def read_state(buffer: Float[Array, "N *n"], rows: StateRows) -> Float[Array, "S *n"]:
    """The state of each sequence before this step's tokens; zero where the sequence begins."""
    found = buffer[rows.read]
    return jnp.where(rows.begins.reshape(-1, *(1,) * (found.ndim - 1)), 0, found)


def kept_length(rows: StateRows, meta: StepMetadata) -> Int[Array, "S"]:
    """How many of this step's tokens each kept state has behind it."""
    length = jnp.diff(meta.query_start)
    return jnp.clip(rows.kept_tokens - (meta.context_len - length), 0, length)


def write_state(
    buffer: Float[Array, "N *n"], after: Float[Array, "S *n"], kept: Float[Array, "S *n"], rows: StateRows
) -> Float[Array, "N *n"]:
    """The buffer with each sequence's state after this step's tokens, and the one that is to be kept of it."""
    where = jnp.concatenate([rows.written, rows.kept])
    return buffer.at[where].set(jnp.concatenate([after, kept]).astype(buffer.dtype))
