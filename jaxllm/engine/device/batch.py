"""A step's batch on the device: from what the host sent and what the slots hold to what every layer is told."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxllm.engine.device.slots import Slots, settings
from jaxllm.pallas_kernels import StateRows, StepMetadata

Fields = dict[str, Any]
"""A step's input, unpacked; see packing.py."""


def decode_batch(
    x: Fields, slots: Slots, page_size: int, adapted: bool = False
) -> tuple[Int[Array, "S"], StepMetadata, Slots]:
    """One token of each sequence: the tokens, the batch, and the slots as they are afterwards.

    A page that a sequence gains is its next: of this position, or of the first behind it that begins a page.

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
        states=_state_rows(x, slot, nobody, position, position + 1),
        adapter_scales=jnp.where(live[:, None], slots.adapter_scales[slot], 0) if adapted else None,
    )
    after = slots.position.at[slot].set(jnp.where(live, position + 1, 0))
    return tokens, meta, slots._replace(position=after, page_table=table)


def mixed_batch(x: Fields, slots: Slots, adapted: bool = False) -> tuple[Int[Array, "T"], StepMetadata, Slots]:
    """Chunks of several sequences: the tokens, the batch, and the slots as they are afterwards.

    What the host sent is in the slots' history afterwards, beside what steps have sampled.
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
        states=_state_rows(x, slot, nobody, begin, end),
        adapter_scales=(jnp.where((seq_ids < seqs)[:, None], slots.adapter_scales[slot[seq]], 0) if adapted else None),
    )
    after = slots.position.at[slot].set(jnp.where(live, end, 0))
    history = slots.history.at[jnp.where(seq_ids < seqs, slot[seq], nobody), positions].set(tokens)
    return tokens, meta, slots._replace(position=after, page_table=table, history=history)


def whole_texts(x: Fields) -> tuple[Int[Array, "T"], StepMetadata]:
    """Whole texts for an encoder, which keeps nothing: the tokens and the batch."""
    start, second = x["query_start"], x["second_text"]
    token, seqs = jnp.arange(x["tokens"].shape[0]), second.shape[0]
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
        token_types=((second[seq] > 0) & (positions >= second[seq])).astype(jnp.int32),
    )
    return x["tokens"], meta


def _state_rows(x: Fields, slot: jax.Array, nobody: int, begin: jax.Array, end: jax.Array) -> StateRows | None:
    """Rows of the sequences' states: a slot's own has its number; those that are kept come after the last slot's.

    A state is kept by the step that runs the token it comes after, where the host has named one of several.
    """
    if "state_read" not in x:
        return None
    keeps = (x["state_kept"] > 0) & (begin < x["kept_tokens"]) & (x["kept_tokens"] <= end)
    return StateRows(
        read=jnp.where(x["state_read"] > 0, x["state_read"], slot),
        begins=begin == 0,
        written=slot,
        kept=jnp.where(keeps, x["state_kept"], nobody),
        kept_tokens=jnp.where(keeps, x["kept_tokens"], 0),
    )


def known_or_sampled(tokens: jax.Array, slots: Slots, slot: jax.Array, position: jax.Array) -> jax.Array:
    """Tokens the host sent, and for each -1 the one that an earlier step left in the slot's history."""
    return jnp.where(tokens >= 0, tokens, slots.history[slot, position])
