"""Drafts out of texts, a sequence's own first: what followed the last time that one said what it has just said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxllm.engine.core.feature import Course, Feature, Surroundings, Traced
from jaxllm.engine.core.keys import Variant
from jaxllm.engine.core.packing import Packing
from jaxllm.engine.core.request import Request
from jaxllm.engine.core.slots import Slots
from jaxllm.engine.features.drafts.rules import DraftRule, NgramDrafts
from jaxllm.engine.features.drafts.verify import Asked, Drafter

Anywhere = Array | np.ndarray
"""On the devices, or on the host."""


@dataclass(frozen=True)
class NgramDrafter(Drafter):
    """Drafts as `rule` says, out of the slots' histories, which have all prompts, and of `remembered` texts."""

    num_tokens: int
    rule: NgramDrafts
    remembered: Int[Array, "M"]

    def propose(self, caches: Any, slots: Slots, asked: Asked, variant: Variant, hands: Sequence[Traced]) -> Any:
        history = slots.history[asked.slot]
        drafts, count = ngram_drafts(history, asked.position, self.remembered, self.rule)
        return caches, slots, drafts, count


def ngram_drafts(
    history: Int[Anywhere, "S L"],
    position: Int[Anywhere, "S"],
    remembered: Int[Anywhere, "M"],
    rule: NgramDrafts,
    xp: Any = jnp,
) -> tuple[Int[Anywhere, "S K"], Int[Anywhere, "S"]]:
    """`rule.num_tokens` tokens that may follow the one at `position`, and how many of them there are for each sequence.

    They follow the longest earlier stretch of text that ends as the sequence does now; of equally long ones the last.
    Where they reach the end of the text they begin again, as a text that repeats itself would. A longer stretch of a
    remembered text is better than one of the sequence's own; what follows it ends where that text does. `xp` works with
    the arrays: `jax.numpy`, or `numpy` on the host.

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
    """How many last tokens (newest first in `last`) end at each place; a ring's end precedes its beginning."""
    at = xp.arange(texts.shape[1])
    same = xp.broadcast_to(counts, (last.shape[0], texts.shape[1]))
    length = xp.zeros(same.shape, xp.int32)
    for back in range(last.shape[1]):
        same = same & (xp.roll(texts, back, axis=1) == last[:, back : back + 1]) & (ring | (at >= back))
        length += same
    return length


RECALLED_AT_ONCE = 512
"""A longer text is remembered in parts."""


RECALL_PACKING = Packing(place=(), count=(), tokens=(RECALLED_AT_ONCE,))
"""A part of a text to remember: `count` of the tokens, each plus one and a 0 at the text's end, from `place` on."""


class RememberedTexts:
    """A ring of `size` tokens, in which a new text takes the place of the oldest."""

    def __init__(self, size: int):
        self._size, self._place = size, 0
        self.tokens = np.zeros(size, np.int32)

    def add(self, tokens: Sequence[int]) -> Iterator[np.ndarray]:
        """What the device is told of a text, as vectors of RECALL_PACKING; of a longer one the end is kept."""
        if not self._size or not tokens:
            return
        text = np.append(np.asarray(tokens[-(self._size - 1) :], np.int32) + 1, np.int32(0))
        for start in range(0, len(text), RECALLED_AT_ONCE):
            part = text[start : start + RECALLED_AT_ONCE]
            ints, x = RECALL_PACKING.new()
            x["place"][...], x["count"][...] = self._place, len(part)
            x["tokens"][: len(part)] = part
            self.tokens[(self._place + np.arange(len(part))) % self._size] = part
            self._place = (self._place + len(part)) % self._size
            yield ints


SHORTEST, LONGEST = 2, 5
"""Tokens of a match, where an engine's own drafts come from a model."""


class Guesses:
    """Fills what a masked step that tries drafts is told of its requests."""

    def __init__(self, drafts: DraftRule, remembered: RememberedTexts, around: Surroundings):
        """Drafts are found as `drafts` says if it reads texts, and in a request's own text if a model makes them."""
        of_text = NgramDrafts(drafts.num_tokens, SHORTEST, LONGEST)
        self._rule = drafts if isinstance(drafts, NgramDrafts) else of_text
        self._remembered, self._around = remembered, around
        self._texts: WeakKeyDictionary[Request, _Text] = WeakKeyDictionary()

    def fill(self, requests: Sequence[Request], x: dict[str, np.ndarray]) -> None:
        """Write the drafts of requests with a course, which the device then makes none for, and all masks.

        Row i of the fields `x` is of request i, all of whose tokens must have been read.
        """
        places, width = x["mask"].shape[1:]
        at: list[Course | None] = [None] * (len(requests) * places)
        for row, request in enumerate(requests):
            course = self._around.core.features.course(request)
            if course is None:
                continue
            assert x["tokens"][row] >= 0, "guesses follow a token that has been read"
            most = min(int(x["most_ahead"][row]), places - 1)
            drafts, courses = self._try(request, course, most)
            x["most_ahead"][row], x["num_given"][row] = 0, len(drafts)
            x["drafts"][row, : len(drafts)] = drafts
            at[row * places : row * places + len(courses)] = courses
        for feature in self._around.core.features.having(Feature.fill_courses):
            feature.fill_courses(at, x["mask"][: len(requests)].reshape(-1, width))

    def _try(self, request: Request, course: Course, most: int) -> tuple[list[int], list[Course]]:
        drafts: list[int] = []
        ahead: list[int] = []
        places = [course]
        while len(drafts) < most:
            ahead = places[-1].forced() or ahead or self._found(request, drafts)
            following = places[-1].after(ahead[0]) if ahead else None
            if following is None:
                break
            drafts.append(ahead[0])
            places.append(following)
            ahead = ahead[1:]
        return drafts, places

    def _found(self, request: Request, drafts: Sequence[int]) -> list[int]:
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = _Text(request.max_total + self._rule.num_tokens)
        history = text.of(request.token_ids, drafts)
        position = np.array([len(history) - 1])
        found, count = ngram_drafts(history[None], position, self._remembered.tokens, self._rule, np)
        return np.asarray(found)[0, : int(count[0])].tolist()


class _Text:
    def __init__(self, most: int):
        self._tokens = np.zeros(most, np.int32)
        self._known = 0

    def of(self, tokens: Sequence[int], further: Sequence[int]) -> np.ndarray:
        """`tokens`, of which those that it was given before are the beginning, and `further` ones, which may change."""
        self._tokens[self._known : len(tokens)] = tokens[self._known :]
        self._known = len(tokens)
        end = self._known + len(further)
        self._tokens[self._known : end] = further
        return self._tokens[:end]
