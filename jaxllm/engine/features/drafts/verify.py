"""What a step that tries tokens ahead wants to know of wherever they come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxllm.engine.core.batch import Gathering, between, decode_batch, forward, known_or_sampled, mixed_batch, told
from jaxllm.engine.core.feature import RanModel, Traced, TracedStep
from jaxllm.engine.core.keys import Variant
from jaxllm.engine.core.sampler import Sampled, Settled, choose
from jaxllm.engine.core.slots import Slots
from jaxllm.models.decoder import Decoder
from jaxllm.pallas_kernels import StepMetadata, settle, staying


def with_own(slots: Slots, **rows: Array) -> Slots:
    """Slots with other rows of what drafts keep there."""
    return slots._replace(of=slots.of | {"drafts": slots.of["drafts"] | rows})


class Asked(NamedTuple):
    """The sequences that drafts are wanted for, `num_seqs` of `S`; others are not `live`, and have padding's slot."""

    slot: Int[Array, "S"]
    position: Int[Array, "S"]
    """Of each sequence's last token, which is in its slot's history."""
    most: Int[Array, "S"]
    """How many drafts may be tried, 0 for none."""
    live: Bool[Array, "S"]
    num_seqs: Int[Array, ""]


class Drafter:
    num_tokens: int
    follows_decodes = False
    """It is told of decodes as well, and not of prompts alone."""
    reads: tuple[int, ...] = ()
    """The layers before which it reads the model's states; without any, it reads the last hidden states."""

    def follow(self, step: RanModel, caches: Any, before: Slots, slots: Slots) -> Any:
        """(caches, slots), with what the source keeps of a step whose slots were `before` and are `slots` after it."""
        return caches, slots

    def propose(self, caches: Any, slots: Slots, asked: Asked, variant: Variant, hands: Sequence[Traced]) -> Any:
        """(caches, slots, drafts [S, K], how many of them there are for each sequence)."""
        raise NotImplementedError


def verify(
    model: Callable[[], Decoder], step: TracedStep, *, drafter: Drafter, hands: Sequence[Traced]
) -> tuple[Any, Slots, Sampled]:
    """One token of each sequence and as many drafted ones as are right: caches, slots, and what was sampled.

    Where some of the `S` sequences have a course, drafts and masks are the host's. What is sampled has
    `drafter.num_tokens + 1` rows for each sequence in turn, of which `settled.taken + 1` count. Where no sequence has a
    draft the step is a plain decode.
    """
    x, page_size, caches, slots = step.x, step.sizes.page_size, step.parts["caches"], step.parts["slots"]
    slot, live = x["slot"], jnp.arange(x["slot"].shape[0]) < x["num_decodes"]
    padding = slots.position.shape[0] - 1
    position = jnp.where(live, slots.position[slot], 0)
    last = known_or_sampled(x["tokens"], slots, slot, position)
    table = slots.page_table.at[x["new_pages"][:, 0], x["new_pages"][:, 1]].set(x["new_pages"][:, 2])
    history = slots.history.at[jnp.where(live, slot, padding), position].set(last)
    most = jnp.where(live, jnp.minimum(x["most_ahead"], drafter.num_tokens), 0)
    asked = Asked(slot, position, most, live, x["num_decodes"])
    slots = slots._replace(page_table=table, history=history)
    own = [hand for hand in hands if hand.of_sampler]
    caches, slots, drafts, count = drafter.propose(caches, slots, asked, step.variant, own)
    drafted = jnp.minimum(count, most)
    if "num_given" in x:
        given = jnp.where(live, x["num_given"], 0)
        drafts = jnp.where(given[:, None] > 0, x["drafts"], drafts)
        drafted = jnp.where(given > 0, given, drafted)
    ahead = jnp.arange(drafter.num_tokens)
    tried = ahead < drafted[:, None]
    places = jnp.where(tried, slot[:, None], padding), jnp.where(tried, position[:, None] + 1 + ahead, 0)
    slots = slots._replace(history=slots.history.at[places].set(drafts))

    def with_drafts(caches: Any, slots: Slots) -> Any:
        count = slot.shape[0] * (drafter.num_tokens + 1)
        start = jnp.cumulative_sum(jnp.where(live, 1 + drafted, 0), include_initial=True).astype(jnp.int32)
        none, fields = jnp.zeros((0, 3), jnp.int32), {"slot": slot, "num_seqs": x["num_decodes"]}
        fields |= {"tokens": jnp.full(count, -1), "query_start": start, "num_decodes": jnp.int32(0), "new_pages": none}
        before = slots
        tokens, meta, slots = mixed_batch(fields, slots)
        meta = told(hands, meta, slots)
        hidden, states, caches = _forward(model(), tokens, caches, replace(meta, tentative=True), drafter.reads, hands)
        owner = jnp.append(slot, padding)[meta.seq_ids]
        asked = {"slot": owner, "position": meta.positions}
        if "mask" in x:
            seq = jnp.minimum(meta.seq_ids, slot.shape[0] - 1)
            place = jnp.minimum(jnp.arange(count) - start[seq], drafter.num_tokens)
            asked |= {"mask": x["mask"][seq, place]}
        slots, sampled = choose(model(), hidden, asked, slots, step.variant, hands)
        rows = jnp.minimum(start[:-1, None] + jnp.arange(drafter.num_tokens + 1), count - 1)
        right = tried & (sampled.tokens[rows[:, :-1]] == drafts)
        taken = jnp.cumprod(right, axis=1).sum(axis=1)
        start = jnp.cumulative_sum(jnp.where(live, 1 + taken, 0), include_initial=True).astype(jnp.int32)
        _, stays, after = mixed_batch(fields | {"query_start": start}, before)
        stays = told(hands, stays, after)
        stay = staying(meta, stays)
        caches, slots = settle(caches, stay, stays), slots._replace(position=after.position)
        if drafter.follows_decodes:
            caches, slots = drafter.follow(RanModel(tokens[stay], states[stay], stays), caches, before, slots)
        return caches, slots, _rows(sampled, rows.reshape(-1)), taken

    def without(caches: Any, slots: Slots) -> Any:
        fields = {"num_decodes": x["num_decodes"], "tokens": last, "slot": slot, "new_page": jnp.zeros_like(slot)}
        before = slots
        tokens, meta, slots = decode_batch(fields, slots, page_size)
        meta = told(hands, meta, slots)
        hidden, states, caches = _forward(model(), tokens, caches, meta, drafter.reads, hands)
        if drafter.follows_decodes:
            caches, slots = drafter.follow(RanModel(tokens, states, meta), caches, before, slots)
        asked = {"slot": slot, "position": meta.positions} | ({"mask": x["mask"][:, 0]} if "mask" in x else {})
        slots, sampled = choose(model(), hidden, asked, slots, step.variant, hands)
        rows = jnp.repeat(jnp.arange(slot.shape[0]), drafter.num_tokens + 1)
        return caches, slots, _rows(sampled, rows), jnp.zeros_like(drafted)

    caches, slots, sampled, taken = lax.cond(jnp.any(drafted > 0), with_drafts, without, caches, slots)
    own_rows = slots.of["drafts"]
    slots = with_own(slots, drafted=jnp.minimum(own_rows["drafted"], slots.position))
    return caches, slots, sampled._replace(settled=Settled(drafted, taken))


def _forward(
    model: Decoder, tokens: Any, caches: Any, meta: StepMetadata, reads: tuple[int, ...], hands: Sequence[Traced]
) -> Any:
    gathering = Gathering(reads)
    hidden, caches = forward(model, tokens, caches, meta, hands=[*between(hands, meta), gathering])
    return hidden, gathering.of(reads) if reads else hidden, caches


def _rows(sampled: Sampled, rows: jax.Array) -> Sampled:
    found: Sampled = jax.tree.map(lambda a: a[rows], sampled)
    return found
