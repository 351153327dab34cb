"""What the device remembers of every running sequence between steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxllm.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS

MAX_BLOCKED = MAX_STOP_TOKEN_IDS + 32
"""Stop token ids plus the model's own end-of-sequence ids."""


class Slots(NamedTuple):
    """Per-sequence state, one row a slot; the last row belongs to nobody and takes what padding writes.

    `history[slot, p]` is the token at position `p`. A step writes the tokens it samples, so that the next step can be
    dispatched before the host has seen them; a prompt is written only for requests that need their whole history
    (penalties). `L` is the longest context plus one.
    """

    history: Int[Array, "slots L"]
    bias_ids: Int[Array, "slots B"]
    """Token ids of logit_bias; padded with the vocabulary's size, which nothing matches."""
    bias_values: Float[Array, "slots B"]
    blocked_ids: Int[Array, "slots M"]
    """Ids that min_tokens holds back; padded likewise."""


class SlotUpdate(NamedTuple):
    """One slot's rows, written when a request that needs them is admitted."""

    slot: Int[Array, ""]
    history: Int[Array, "L"]
    bias_ids: Int[Array, "B"]
    bias_values: Float[Array, "B"]
    blocked_ids: Int[Array, "M"]


def slot_shapes(num_slots: int, max_model_len: int) -> Slots:
    """Abstract arrays for `num_slots` sequences."""

    def shape(width: int, dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((num_slots + 1, width), dtype)

    return Slots(
        shape(max_model_len + 1, jnp.int32),
        shape(MAX_LOGIT_BIAS, jnp.int32),
        shape(MAX_LOGIT_BIAS, jnp.float32),
        shape(MAX_BLOCKED, jnp.int32),
    )


def set_slot(slots: Slots, update: SlotUpdate) -> Slots:
    """Overwrite one slot."""

    def put(rows: jax.Array, row: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(rows, row[None], (update.slot, 0))

    return Slots(*(put(rows, row) for rows, row in zip(slots, update[1:], strict=True)))
