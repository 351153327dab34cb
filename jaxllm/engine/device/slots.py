"""What the device remembers of every running sequence between steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxllm.engine.device.packing import SETTING_FLOATS, SETTING_INTS, admit_packing, recall_packing
from jaxllm.engine.masks import mask_words
from jaxllm.engine.settings import Adjustments
from jaxllm.requests.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from jaxllm.text.bad_words import MAX_SPELLING_LENGTH, MAX_SPELLINGS

MAX_BLOCKED = MAX_STOP_TOKEN_IDS + 32
"""Stop token ids plus the model's own end-of-sequence ids."""


class Slots(NamedTuple):
    """Per-sequence state, one row a slot; the last row belongs to nobody and takes what padding writes.

    A step reads here what it was told before: it is sent only what changed. `position` is the next token's to be run,
    `page_table[slot, i]` the page of positions `i * page_size` and on, `settings_*` what packing.py lays out.

    `history[slot, p]` is the token at position `p`. A step writes the tokens it samples, so that the next step can be
    dispatched before the host has seen them; a prompt is written only where the whole history is read (penalties).
    `L` is the longest context plus one.
    """

    history: Int[Array, "slots L"]
    position: Int[Array, "slots"]
    drafted: Int[Array, "slots"]
    """How many tokens of the sequence a draft model has run, where there is one; at most `position`."""
    hidden: Float[Array, "slots E"]
    """The model's hidden state of the last token that it has run, where drafts are made of it; else `E` is 0."""
    hidden_after: Int[Array, "slots"]
    """After how many tokens `hidden` is the state; 0 where there is none, as in a sequence that goes on from a cached
    prefix."""
    page_table: Int[Array, "slots P"]
    setting_ints: Int[Array, "slots I"]
    setting_floats: Float[Array, "slots F"]
    adapter_scales: Float[Array, "slots N"]
    """How much of each adapter on the devices is added."""
    bias_ids: Int[Array, "slots B"]
    """Token ids of logit_bias; padded with the vocabulary's size, which nothing matches."""
    bias_values: Float[Array, "slots B"]
    blocked_ids: Int[Array, "slots M"]
    """Ids that min_tokens holds back; padded likewise."""
    allowed: Int[Array, "slots words"]
    """One bit a token: those that allowed_token_ids leaves."""
    bad_words: Int[Array, "slots W 16"]
    """Token sequences that may not be generated, ending at the last column, -1 before them; the last token of an unused
    row is the vocabulary's size."""
    remembered: Int[Array, "M"]
    """No slot's: texts that drafts are looked for in, each token plus one, a 0 behind each text. They go in a ring."""


def slot_shapes(
    num_slots: int,
    max_model_len: int,
    pages_per_seq: int,
    vocab_size: int,
    adapter_places: int = 0,
    remembered: int = 0,
    hidden: int = 0,
) -> Slots:
    """Abstract arrays for `num_slots` sequences."""

    def array(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def shape(*row: int, dtype: Any = jnp.int32) -> Any:
        return array(num_slots + 1, *row, dtype=dtype)

    return Slots(
        history=shape(max_model_len + 1),
        position=shape(),
        drafted=shape(),
        hidden=shape(hidden, dtype=jnp.float32),
        hidden_after=shape(),
        page_table=shape(pages_per_seq),
        setting_ints=shape(SETTING_INTS.size),
        setting_floats=shape(SETTING_FLOATS.size, dtype=jnp.float32),
        adapter_scales=shape(adapter_places, dtype=jnp.float32),
        bias_ids=shape(MAX_LOGIT_BIAS),
        bias_values=shape(MAX_LOGIT_BIAS, dtype=jnp.float32),
        blocked_ids=shape(MAX_BLOCKED),
        allowed=shape(mask_words(vocab_size)),
        bad_words=shape(MAX_SPELLINGS, MAX_SPELLING_LENGTH),
        remembered=array(remembered),
    )


def admit(slots: Slots, ints: Int[Array, "n"], floats: Float[Array, "F"]) -> Slots:
    """A request takes its slot; `ints` as `admit_packing` lays them out, and `floats` are settings, then scales."""
    x = admit_packing(slots.page_table.shape[1]).unpack(ints)
    rows = {
        "position": x["position"],
        "drafted": x["position"],
        "hidden_after": jnp.zeros_like(x["position"]),
        "page_table": x["page_table"],
        "setting_ints": x["settings"],
    }
    settings, scales = floats[: SETTING_FLOATS.size], floats[SETTING_FLOATS.size :]
    return _put(slots, x["slot"], **rows, setting_floats=settings, adapter_scales=scales)


def adjust(slots: Slots, adjustments: Adjustments) -> Slots:
    """What adjusts the logits of the request that took the slot."""
    return _put(slots, adjustments.slot[0], **{k: v for k, v in adjustments._asdict().items() if k != "slot"})


def remember(slots: Slots, slot: Int[Array, "1"], history: Int[Array, "L"]) -> Slots:
    """The tokens of the request that took the slot, up to those that steps will write."""
    return _put(slots, slot[0], history=history)


def took(slots: Slots, slot: Int[Array, "R"], tokens: Int[Array, "R"]) -> Slots:
    """The next token of each slot, which another stage has sampled."""
    return slots._replace(history=slots.history.at[slot, slots.position[slot]].set(tokens))


def recall(slots: Slots, ints: Int[Array, "n"]) -> Slots:
    """A part of a text takes the place of the oldest that is remembered; `ints` as `recall_packing` lays them out."""
    x, size = recall_packing().unpack(ints), slots.remembered.shape[0]
    at = jnp.arange(x["tokens"].shape[0])
    places = jnp.where(at < x["count"], (x["place"] + at) % size, size)
    return slots._replace(remembered=slots.remembered.at[places].set(x["tokens"], mode="drop"))


def settings(slots: Slots, slot: Int[Array, "R"]) -> dict[str, jax.Array]:
    """The settings of each of `R` slots, by name."""
    ints, floats = slots.setting_ints[slot], slots.setting_floats[slot]
    return SETTING_INTS.unpack(ints) | SETTING_FLOATS.unpack(floats)


def _put(slots: Slots, slot: Int[Array, ""], **rows: jax.Array) -> Slots:
    def put(old: jax.Array, row: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(old, row[None], (slot, *(0 for _ in row.shape)))

    return slots._replace(**{name: put(getattr(slots, name), row) for name, row in rows.items()})
