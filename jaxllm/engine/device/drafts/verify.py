"""Several tokens of a sequence in one step: drafts are tried, and taken as far as they are what is sampled anyway.

Every drafted position is an ordinary row: the model's logits there, the request's own penalties over the tokens up to
there, and the random number of that position choose a token. As long as that is the drafted one, the next row has run
behind the right token. So the tokens are those of a decode without drafts, whatever a request asks of the sampler.

What refused tokens have left in pages is overwritten. States of sequences move on over the tokens that were right, once
these are known (see `pallas_kernels/states.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.engine.device.batch import Fields, decode_batch, known_or_sampled, mixed_batch
from jaxllm.engine.device.choice import Sampled, Settled, choose
from jaxllm.engine.device.drafts.drafter import Asked, Drafter, Ran
from jaxllm.engine.device.forward import forward_read
from jaxllm.engine.device.keys import Variant
from jaxllm.engine.device.processing import ProcessLogits
from jaxllm.engine.device.slots import Slots
from jaxllm.models.decoder import Decoder
from jaxllm.pallas_kernels import settle, staying


def verify(
    model: Callable[[], Decoder],
    caches: Any,
    slots: Slots,
    x: Fields,
    *,
    drafter: Drafter,
    variant: Variant,
    page_size: int,
    process: ProcessLogits | None = None,
) -> tuple[Any, Slots, Sampled]:
    """One token of each sequence and as many drafted ones as are right: caches, slots, and what was sampled.

    `x` is as `verify_packing` lays it out, `S` sequences; for a masked variant it has drafts and masks that the host
    made. What is sampled has `drafter.num_tokens + 1` rows for each sequence in turn, of which `settled.taken + 1`
    count. Where no sequence has a draft the step is a plain decode.
    """
    slot, live = x["slot"], jnp.arange(x["slot"].shape[0]) < x["num_decodes"]
    nobody = slots.position.shape[0] - 1
    position = jnp.where(live, slots.position[slot], 0)
    last = known_or_sampled(x["tokens"], slots, slot, position)
    table = slots.page_table.at[x["new_pages"][:, 0], x["new_pages"][:, 1]].set(x["new_pages"][:, 2])
    history = slots.history.at[jnp.where(live, slot, nobody), position].set(last)
    most = jnp.where(live, jnp.minimum(x["most_drafts"], drafter.num_tokens), 0)
    asked = Asked(slot, position, most, live, x["num_decodes"])
    slots = slots._replace(page_table=table, history=history)
    caches, slots, drafts, count = drafter.propose(caches, slots, asked, variant)
    drafted = jnp.minimum(count, most)
    if variant.masked:
        given = jnp.where(live, x["num_given"], 0)
        drafts = jnp.where(given[:, None] > 0, x["drafts"], drafts)
        drafted = jnp.where(given > 0, given, drafted)
    ahead = jnp.arange(drafter.num_tokens)
    tried = ahead < drafted[:, None]
    places = jnp.where(tried, slot[:, None], nobody), jnp.where(tried, position[:, None] + 1 + ahead, 0)
    slots = slots._replace(history=slots.history.at[places].set(drafts))

    def with_drafts(caches: Any, slots: Slots) -> Any:
        count = slot.shape[0] * (drafter.num_tokens + 1)
        start = jnp.cumulative_sum(jnp.where(live, 1 + drafted, 0), include_initial=True).astype(jnp.int32)
        none, fields = jnp.zeros((0, 3), jnp.int32), {"slot": slot, "num_seqs": x["num_decodes"]}
        fields |= {"tokens": jnp.full(count, -1), "query_start": start, "num_decodes": jnp.int32(0), "new_pages": none}
        fields |= _states(x, position + 1 + drafted, page_size)
        before = slots
        tokens, meta, slots = mixed_batch(fields, slots, variant.adapted)
        tentative = replace(meta, tentative=True)
        hidden, states, caches = forward_read(model(), tokens, caches, tentative, drafter.reads)
        owner = jnp.append(slot, nobody)[meta.seq_ids]
        asked = {"slot": owner, "position": meta.positions}
        if variant.masked:
            seq = jnp.minimum(meta.seq_ids, slot.shape[0] - 1)
            place = jnp.minimum(jnp.arange(count) - start[seq], drafter.num_tokens)
            asked |= {"mask": x["mask"][seq, place]}
        slots, sampled = choose(model(), hidden, asked, slots, variant, process)
        rows = jnp.minimum(start[:-1, None] + jnp.arange(drafter.num_tokens + 1), count - 1)
        right = tried & (sampled.tokens[rows[:, :-1]] == drafts)
        taken = jnp.cumprod(right, axis=1).sum(axis=1)
        start = jnp.cumulative_sum(jnp.where(live, 1 + taken, 0), include_initial=True).astype(jnp.int32)
        fields |= {"query_start": start, **_states(x, position + 1 + taken, page_size)}
        _, stays, after = mixed_batch(fields, before)
        stay = staying(meta, stays)
        caches, slots = settle(caches, stay, stays), slots._replace(position=after.position)
        if drafter.follows_decodes:
            caches, slots = drafter.follow(Ran(tokens[stay], states[stay], stays), caches, before, slots)
        return caches, slots, _rows(sampled, rows.reshape(-1)), taken

    def without(caches: Any, slots: Slots) -> Any:
        fields = {"num_decodes": x["num_decodes"], "tokens": last, "slot": slot, "new_page": jnp.zeros_like(slot)}
        fields |= _states(x, position + 1, page_size)
        before = slots
        tokens, meta, slots = decode_batch(fields, slots, page_size, variant.adapted)
        hidden, states, caches = forward_read(model(), tokens, caches, meta, drafter.reads)
        if drafter.follows_decodes:
            caches, slots = drafter.follow(Ran(tokens, states, meta), caches, before, slots)
        asked = {"slot": slot, "position": meta.positions} | ({"mask": x["mask"][:, 0]} if variant.masked else {})
        slots, sampled = choose(model(), hidden, asked, slots, variant, process)
        rows = jnp.repeat(jnp.arange(slot.shape[0]), drafter.num_tokens + 1)
        return caches, slots, _rows(sampled, rows), jnp.zeros_like(drafted)

    caches, slots, sampled, taken = lax.cond(jnp.any(drafted > 0), with_drafts, without, caches, slots)
    slots = slots._replace(drafted=jnp.minimum(slots.drafted, slots.position))
    return caches, slots, sampled._replace(settled=Settled(drafted, taken))


def _states(x: Fields, end: jax.Array, page_size: int) -> Fields:
    """What layers are told of states, if they keep any: one is kept after the last full page of tokens before `end`."""
    if "state_read" not in x:
        return {}
    return {"state_read": x["state_read"], "state_kept": x["state_kept"], "kept_tokens": end // page_size * page_size}


def _rows(sampled: Sampled, rows: jax.Array) -> Sampled:
    found: Sampled = jax.tree.map(lambda a: a[rows], sampled)
    return found
