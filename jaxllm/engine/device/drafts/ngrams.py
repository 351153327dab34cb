"""Drafts out of texts, its own first: what followed the last time that one said what a sequence has just said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxllm.engine.device.drafts.drafter import Asked, Ran
from jaxllm.engine.device.keys import Variant
from jaxllm.engine.device.sizes import NgramDrafts
from jaxllm.engine.device.slots import Slots

Anywhere = Array | np.ndarray
"""On the devices, or on the host."""


@dataclass(frozen=True)
class NgramDrafter:
    """Drafts as `rule` says, out of the slots' histories."""

    rule: NgramDrafts

    @property
    def num_tokens(self) -> int:
        """The most drafts for a sequence."""
        return self.rule.num_tokens

    follows_decodes = False
    reads = ()

    def follow(self, step: Ran, caches: Any, before: Slots, slots: Slots) -> Any:
        """A prompt is in the slot's history already."""
        return caches, slots

    def propose(self, caches: Any, slots: Slots, asked: Asked, variant: Variant) -> Any:
        """Caches and slots as they are, drafts, and how many there are."""
        history = slots.history[asked.slot]
        drafts, count = ngram_drafts(history, asked.position, slots.remembered, self.rule)
        return caches, slots, drafts, count


def ngram_drafts(
    history: Int[Anywhere, "S L"],
    position: Int[Anywhere, "S"],
    remembered: Int[Anywhere, "M"],
    rule: NgramDrafts,
    xp: Any = jnp,
) -> tuple[Int[Anywhere, "S K"], Int[Anywhere, "S"]]:
    """`rule.num_tokens` tokens that may follow the one at `position`, and how many of them there are for each sequence.

    They are those behind the longest earlier stretch of text that ends as the sequence does now; of equally long ones
    the last. Where they reach the end of the text they begin again, as a text that repeats itself would. A longer
    stretch of a remembered text is better than one of the sequence's own; what follows it ends where that text does.

    `xp` is what works with the arrays: `jax.numpy`, or `numpy` on the host.

    Worked example, for drafts of 4: in `5 1 2 3 4 1 2` the end `1 2` stood before `3 4 1 2`, which is what comes back.
    """
    back = xp.arange(rule.longest)
    last = xp.take_along_axis(history, xp.maximum(position[:, None] - back, 0), axis=1)
    last = xp.where(back <= position[:, None], last, -2)  # neither a token nor the -1 between remembered texts
    at, ahead = xp.arange(history.shape[1]), xp.arange(rule.num_tokens)
    length = _matched(history, last, at < position[:, None], xp, ring=False)
    score = xp.where(length >= rule.shortest, length * history.shape[1] + at, -1)
    end, own = xp.argmax(score, axis=1), xp.max(length, axis=1)
    period = xp.maximum(position - end, 1)
    drafts = xp.take_along_axis(history, end[:, None] + 1 + ahead % period[:, None], axis=1)
    count = xp.where(score.max(axis=1) >= 0, rule.num_tokens, 0)
    if not rule.remembered:
        return drafts, count
    size = remembered.shape[0]
    length = _matched(remembered[None] - 1, last, xp.roll(remembered, -1)[None] > 0, xp, ring=True)
    end = xp.argmax(length * size + xp.arange(size), axis=1)
    others = length.max(axis=1)
    following = remembered[(end[:, None] + 1 + ahead) % size] - 1
    there = xp.cumprod(following >= 0, axis=1)
    better = (others >= rule.shortest) & (others > xp.where(count > 0, own, 0))
    return xp.where(better[:, None], xp.maximum(following, 0), drafts), xp.where(better, there.sum(axis=1), count)


def _matched(
    texts: Int[Anywhere, "N L"], last: Int[Anywhere, "S n"], counts: Bool[Anywhere, "N2 L"], xp: Any, *, ring: bool
) -> Int[Anywhere, "S L"]:
    """How many of a sequence's last tokens, of which `last` has the newest first, end at each place that counts.

    The end of a ring stands before its beginning.
    """
    at = xp.arange(texts.shape[1])
    same = xp.broadcast_to(counts, (last.shape[0], texts.shape[1]))
    length = xp.zeros(same.shape, xp.int32)
    for back in range(last.shape[1]):
        same = same & (xp.roll(texts, back, axis=1) == last[:, back : back + 1]) & (ring | (at >= back))
        length += same
    return length
