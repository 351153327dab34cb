"""How tokens that a step tries ahead are found, and how many are tried with each request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class DraftRule:
    """Up to `num_tokens` drafts are found."""

    num_tokens: int
    by_rows: tuple[tuple[int, int], ...] = field(default=(), kw_only=True)
    """(rows, most): a step padded to that many sequences has room for `most` drafts instead of `num_tokens`."""

    def with_rows(self, rows: int) -> DraftRule:
        return replace(self, num_tokens=dict(self.by_rows).get(rows, self.num_tokens))


@dataclass(frozen=True)
class NgramDrafts(DraftRule):
    """Drafts follow a match of `shortest` to `longest` tokens in a text.

    They are looked for in a sequence's own text, and in the last `remembered` tokens of other texts: answers that were
    predicted, and with `remembers_answers` those that were given.
    """

    shortest: int
    longest: int
    remembered: int = 0
    remembers_answers: bool = False


@dataclass(frozen=True)
class ModelDrafts(DraftRule):
    """A draft model finds them."""


@dataclass(frozen=True)
class ModuleDrafts(DraftRule):
    """A module reads the states in front of `layers`, or the last hidden states, and makes `size` numbers of them."""

    layers: tuple[int, ...] = ()
    size: int = 0


RATE = 0.25
"""The weight of the last try in what a request's tries are thought to bring."""
WORTH = 0.4
"""Tokens that a try must bring for the next one to follow at once: its step takes about that much longer."""
FIRST_GAIN = 2.0
"""Tokens that a request's first try is expected to bring: a deeper one is tried when it has."""
LONGEST_PAUSE = 4
"""Most decodes without drafts between two tries."""


class DraftDepth:
    """The most tokens that are tried ahead with each request, by how many requests run.

    `by_batch_size` holds (first, last, most): with `first` to `last` requests at most `most`; `most` of all otherwise.
    """

    def __init__(self, most: int, by_batch_size: Sequence[tuple[int, int, int]] = ()):
        self.most = most
        self._by_batch_size = tuple(by_batch_size)

    def with_running(self, count: int) -> int:
        return next((most for first, last, most in self._by_batch_size if first <= count <= last), self.most)


class DraftRecord:
    """What has come of one request's tries.

    Tries that bring nothing are followed by pauses, which are short at first and after a try that has brought a token:
    a text that does not repeat itself costs little, and one that begins to repeat itself is noticed soon.
    """

    def __init__(self, most: int):
        self._gain = min(most / 2, FIRST_GAIN)
        self._pause, self._next_pause = 0, 1

    def depth(self, most: int) -> int:
        """How many tokens to try ahead now, at most `most`; 0 in a pause."""
        return 0 if self._pause else min(most, max(1, math.ceil(2 * self._gain)))

    def settle(self, taken: int) -> None:
        self._gain += RATE * (taken - self._gain)
        if taken:
            self._next_pause = 1
        elif self._gain < WORTH:
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)

    def passed(self) -> None:
        """A decode without drafts is under way."""
        self._pause = max(0, self._pause - 1)
