"""Drafts out of texts, its own first: what followed the last time that one said what a sequence has just said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxllm.engine.device.drafts.drafter import Asked, Ran
from jaxllm.engine.device.keys import Variant
from jaxllm.engine.device.sizes import NgramDrafts
from jaxllm.engine.device.slots import Slots


@dataclass(frozen=True)
class NgramDrafter:
    """Drafts as `rule` says, out of the slots' histories."""

    rule: NgramDrafts

    @property
    def num_tokens(self) -> int:
        """The most drafts for a sequence."""
        return self.rule.num_tokens

    follows_decodes = False

    def follow(self, step: Ran, caches: Any, before: Slots, slots: Slots) -> Any:
        """A prompt is in the slot's history already."""
        return caches, slots

    def propose(self, caches: Any, slots: Slots, asked: Asked, variant: Variant) -> Any:
        """Caches and slots as they are, drafts, and how many there are."""
        history = slots.history[asked.slot]
        drafts, count = ngram_drafts(history, asked.position, slots.remembered, self.rule)
        return caches, slots, drafts, count


def ngram_drafts(
    history: Int[Array, "S L"], position: Int[Array, "S"], remembered: Int[Array, "M"], rule: NgramDrafts
) -> tuple[Int[Array, "S K"], Int[Array, "S"]]:
    """`rule.num_tokens` tokens that may follow the one at `position`, and how many of them there are for each sequence.

    They are those behind the longest earlier stretch of text that ends as the sequence does now; of equally long ones
    the last. Where they reach the end of the text they begin again, as a text that repeats itself would. A longer
    stretch of a remembered text is better than one of the sequence's own; what follows it ends where that text does.

    Worked example, for drafts of 4: in `5 1 2 3 4 1 2` the end `1 2` stood before `3 4 1 2`, which is what comes back.
    """
    back = jnp.arange(rule.longest)
    last = jnp.take_along_axis(history, jnp.maximum(position[:, None] - back, 0), axis=1)
    last = jnp.where(back <= position[:, None], last, -2)  # neither a token nor the -1 between remembered texts
    at, ahead = jnp.arange(history.shape[1]), jnp.arange(rule.num_tokens)
    length = _matched(history, last, at < position[:, None], ring=False)
    score = jnp.where(length >= rule.shortest, length * history.shape[1] + at, -1)
    end, own = jnp.argmax(score, axis=1), jnp.max(length, axis=1)
    period = jnp.maximum(position - end, 1)
    drafts = jnp.take_along_axis(history, end[:, None] + 1 + ahead % period[:, None], axis=1)
    count = jnp.where(score.max(axis=1) >= 0, rule.num_tokens, 0)
    if not rule.remembered:
        return drafts, count
    size = remembered.shape[0]
    length = _matched(remembered[None] - 1, last, jnp.roll(remembered, -1)[None] > 0, ring=True)
    end = jnp.argmax(length * size + jnp.arange(size), axis=1)
    others = length.max(axis=1)
    following = remembered[(end[:, None] + 1 + ahead) % size] - 1
    there = jnp.cumprod(following >= 0, axis=1)
    better = (others >= rule.shortest) & (others > jnp.where(count > 0, own, 0))
    return jnp.where(better[:, None], jnp.maximum(following, 0), drafts), jnp.where(better, there.sum(axis=1), count)


def _matched(
    texts: Int[Array, "N L"], last: Int[Array, "S n"], counts: Bool[Array, "N2 L"], *, ring: bool
) -> Int[Array, "S L"]:
    """How many of a sequence's last tokens, of which `last` has the newest first, end at each place that counts.

    The end of a ring stands before its beginning.
    """
    at = jnp.arange(texts.shape[1])
    same = jnp.broadcast_to(counts, (last.shape[0], texts.shape[1]))
    length = jnp.zeros(same.shape, jnp.int32)
    for back in range(last.shape[1]):
        same &= (jnp.roll(texts, back, axis=1) == last[:, back : back + 1]) & (ring | (at >= back))
        length += same
    return length
