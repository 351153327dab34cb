"""A step's batch on the device: what every layer is told of it, and the model over it."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxllm.engine.core.feature import Fields, RanModel, Traced
from jaxllm.engine.core.slots import Slots, settings
from jaxllm.models.caches import Cache
from jaxllm.models.decoder import Decoder
from jaxllm.models.layers.hands import Hand
from jaxllm.pallas_kernels import Late, StepMetadata, with_late


def decode_batch(x: Fields, slots: Slots, page_size: int) -> tuple[Int[Array, "S"], StepMetadata, Slots]:
    """One token of each sequence: the tokens, the batch, and the slots as they are afterwards.

    A page that a sequence gains is its next: of this position, or of the first after it that begins a page.

    Worked example, page_size 4: slots 0 and 5 run, their next positions are 8 and 2; slot 0 begins its third page.

        sent          num_decodes 2   slot [0, 5]   new_page [7, 0]   tokens [-1, -1]
        page_table    [[3, 9, 7], [5, 0, 0]]     row 2 of slot 0 is new
        positions     [8, 2]                     afterwards the slots say 9 and 3
    """
    rows = x["slot"].shape[0]
    row = jnp.arange(rows)
    live = row < x["num_decodes"]
    slot = x["slot"]
    position = jnp.where(live, slots.position[slot], 0)
    gains = x["new_page"] > 0
    nobody = slots.position.shape[0] - 1
    table = slots.page_table.at[jnp.where(gains, slot, nobody), -(-position // page_size)].set(x["new_page"])
    tokens = known_or_sampled(x["tokens"], slots, slot, position)
    meta = StepMetadata(
        positions=position,
        seq_ids=jnp.where(live, row, rows),
        query_start=jnp.minimum(jnp.arange(rows + 1), x["num_decodes"]),
        context_len=jnp.where(live, position + 1, 0),
        page_table=jnp.where(live[:, None], table[slot], 0),
        num_decodes=x["num_decodes"],
        num_seqs=x["num_decodes"],
        rotary_lengths=jnp.maximum(settings(slots, slot)["rotary_len"], position + 1),
        decode_only=True,
        slots=slot,
    )
    after = slots.position.at[slot].set(jnp.where(live, position + 1, 0))
    return tokens, meta, slots._replace(position=after, page_table=table)


def mixed_batch(x: Fields, slots: Slots) -> tuple[Int[Array, "T"], StepMetadata, Slots]:
    """Chunks of several sequences: the tokens, the batch, and the slots as they are afterwards.

    Afterwards the slots' history holds the tokens that the host sent as well as those that steps have sampled.
    """
    slot, start = x["slot"], x["query_start"]
    count, seqs, nobody = x["tokens"].shape[0], slot.shape[0], slots.position.shape[0] - 1
    table = slots.page_table.at[x["new_pages"][:, 0], x["new_pages"][:, 1]].set(x["new_pages"][:, 2])
    live = jnp.arange(seqs) < x["num_seqs"]
    begin = jnp.where(live, slots.position[slot], 0)
    end = begin + jnp.diff(start)
    token = jnp.arange(count)
    seq_ids = jnp.searchsorted(start[1:], token, side="right").astype(jnp.int32)
    seq = jnp.minimum(seq_ids, seqs - 1)
    positions = jnp.where(seq_ids < seqs, begin[seq] + token - start[seq], 0)
    tokens = known_or_sampled(x["tokens"], slots, slot[seq], positions)
    meta = StepMetadata(
        positions=positions,
        seq_ids=seq_ids,
        query_start=start,
        context_len=jnp.where(live, end, 0),
        page_table=jnp.where(live[:, None], table[slot], 0),
        num_decodes=x["num_decodes"],
        num_seqs=x["num_seqs"],
        rotary_lengths=jnp.maximum(settings(slots, slot)["rotary_len"][seq], positions + 1),
        decode_only=False,
        slots=slot,
    )
    after = slots.position.at[slot].set(jnp.where(live, end, 0))
    history = slots.history.at[jnp.where(seq_ids < seqs, slot[seq], nobody), positions].set(tokens)
    return tokens, meta, slots._replace(position=after, page_table=table, history=history)


def whole_texts(x: Fields) -> tuple[Int[Array, "T"], StepMetadata]:
    """Whole texts for an encoder, which keeps nothing: the tokens and the batch."""
    start = x["query_start"]
    token, seqs = jnp.arange(x["tokens"].shape[0]), len(start) - 1
    seq_ids = jnp.searchsorted(start[1:], token, side="right").astype(jnp.int32)
    seq = jnp.minimum(seq_ids, seqs - 1)
    lengths = jnp.diff(start)
    positions = jnp.where(seq_ids < seqs, token - start[seq], 0)
    meta = StepMetadata(
        positions=positions,
        seq_ids=seq_ids,
        query_start=start,
        context_len=lengths,
        page_table=jnp.zeros((seqs, 1), jnp.int32),
        num_decodes=jnp.int32(0),
        num_seqs=x["num_seqs"],
        rotary_lengths=lengths[seq],
        decode_only=False,
    )
    return x["tokens"], meta


def known_or_sampled(tokens: jax.Array, slots: Slots, slot: jax.Array, position: jax.Array) -> jax.Array:
    """Tokens the host sent, and for each -1 the one that an earlier step left in the slot's history."""
    return jnp.where(tokens >= 0, tokens, slots.history[slot, position])


def forward(
    model: Decoder,
    tokens: jax.Array,
    caches: tuple[Cache, ...],
    meta: StepMetadata,
    first: int = 0,
    handed: tuple[jax.Array, ...] = (),
    hands: Sequence[Hand] = (),
) -> tuple[jax.Array, tuple[Cache, ...]]:
    """The model's hidden states, and all caches: its own begin with the `first`, and the others stay as they are.

    `handed` is what the stage before has given, where the model is a later one.
    """
    end = first + len(model.config.caches)
    hidden, kept = model(tokens, caches[first:end], meta, handed[0] if handed else None, hands)
    return hidden, (*caches[:first], *kept, *caches[end:])


class Gathering(Hand):
    """The residual stream in front of some layers."""

    def __init__(self, layers: Sequence[int]):
        self.layers_read = layers
        self._found: dict[int, jax.Array] = {}

    def before(self, index: int, x: jax.Array, late: Late | None) -> None:
        if index in self.layers_read:
            self._found[index] = with_late(x, late)

    def of(self, layers: Sequence[int]) -> jax.Array:
        """The streams in front of these layers, side by side."""
        return jnp.concatenate([self._found[layer] for layer in layers], axis=-1)


def run(
    model: Decoder,
    tokens: jax.Array,
    caches: tuple[Cache, ...],
    meta: StepMetadata,
    hands: Sequence[Traced],
    before: Slots,
    slots: Slots,
    handed: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, tuple[Cache, ...], Slots]:
    """The model's hidden states, all caches, and the slots, which were `before`, after features have seen it run."""
    gathering = Gathering(sorted({layer for hand in hands for layer in hand.reads or ()}))
    inside = [*between(hands, meta), *([gathering] if gathering.layers_read else [])]
    hidden, caches = forward(model, tokens, caches, meta, handed=handed, hands=inside)
    for hand in hands:
        if hand.reads is not None:
            read = gathering.of(hand.reads) if hand.reads else hidden
            caches, slots = hand.ran(RanModel(tokens, read, meta), caches, before, slots)
    return hidden, caches, slots


def told(hands: Sequence[Traced], meta: StepMetadata, slots: Slots) -> StepMetadata:
    """The metadata that layers get of a step, with the features' additions."""
    for hand in hands:
        meta = hand.metadata(meta, slots)
    return meta


def between(hands: Sequence[Traced], meta: StepMetadata) -> list[Hand]:
    """The hands of features that work between layers."""
    return [found for hand in hands if (found := hand.hand(meta)) is not None]
