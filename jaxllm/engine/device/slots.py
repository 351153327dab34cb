"""What the device remembers of every running sequence between steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxllm.requests.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from jaxllm.text.bad_words import MAX_SPELLING_LENGTH, MAX_SPELLINGS

MAX_BLOCKED = MAX_STOP_TOKEN_IDS + 32
"""Stop token ids plus the model's own end-of-sequence ids."""
MASK_BITS = 32
"""Tokens in one word of a mask."""


def mask_words(vocab_size: int) -> int:
    """Words of a mask with one bit a token, lowest bit first."""
    return -(-vocab_size // MASK_BITS)


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
    allowed: Int[Array, "slots V/32"]
    """One bit a token: those that allowed_token_ids leaves."""
    bad_words: Int[Array, "slots W 16"]
    """Token sequences that may not be generated, ending at the last column, -1 before them; the last token of an unused
    row is the vocabulary's size."""


class SlotUpdate(NamedTuple):
    """One slot's rows, written when a request that needs them is admitted."""

    slot: Int[Array, ""]
    history: Int[Array, "L"]
    bias_ids: Int[Array, "B"]
    bias_values: Float[Array, "B"]
    blocked_ids: Int[Array, "M"]
    allowed: Int[Array, "V/32"]
    bad_words: Int[Array, "W 16"]


def slot_shapes(num_slots: int, max_model_len: int, vocab_size: int) -> Slots:
    """Abstract arrays for `num_slots` sequences."""

    def shape(*row: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct((num_slots + 1, *row), dtype)

    return Slots(
        history=shape(max_model_len + 1),
        bias_ids=shape(MAX_LOGIT_BIAS),
        bias_values=shape(MAX_LOGIT_BIAS, dtype=jnp.float32),
        blocked_ids=shape(MAX_BLOCKED),
        allowed=shape(mask_words(vocab_size)),
        bad_words=shape(MAX_SPELLINGS, MAX_SPELLING_LENGTH),
    )


def set_slot(slots: Slots, update: SlotUpdate) -> Slots:
    """Overwrite one slot."""

    def put(rows: jax.Array, row: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(rows, row[None], (update.slot, *(0 for _ in row.shape)))

    return Slots(*(put(rows, row) for rows, row in zip(slots, update[1:], strict=True)))
