"""How tokens that a step tries ahead are found, and how many are tried with each request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class NgramDrafts:
    """How drafts are found in texts: `num_tokens` of them behind a match of `shortest` to `longest` tokens.

    They are looked for in a sequence's own text, and in the last `remembered` tokens of other texts: answers that were
    predicted, and with `remembers_answers` those that were given.
    """

    num_tokens: int
    shortest: int
    longest: int
    remembered: int = 0
    remembers_answers: bool = False
    by_rows: tuple[tuple[int, int], ...] = ()
    """(rows, most): a step that is padded to so many sequences has room for `most` drafts instead of `num_tokens`."""


@dataclass(frozen=True)
class ModelDrafts:
    """A draft model finds up to `num_tokens` drafts; for `by_rows` see `NgramDrafts`."""

    num_tokens: int
    by_rows: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class ModuleDrafts:
    """A module that reads the model's states finds up to `num_tokens` drafts; for `by_rows` see `NgramDrafts`.

    It reads the states in front of `layers`, or without any the last hidden states, and makes `size` numbers of them.
    """

    num_tokens: int
    layers: tuple[int, ...] = ()
    size: int = 0
    by_rows: tuple[tuple[int, int], ...] = ()


DraftRule = NgramDrafts | ModelDrafts | ModuleDrafts


def with_rows(drafts: DraftRule, rows: int) -> DraftRule:
    """Those of a step that is padded to `rows` sequences."""
    return replace(drafts, num_tokens=dict(drafts.by_rows).get(rows, drafts.num_tokens))


RATE = 0.25
"""How much of what a request's tries are thought to be worth is what the last one was."""
WORTH = 0.4
"""Tokens that a try must bring for the next one to follow at once: its step takes that much longer, or a bit less."""
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
        """The most with `count` requests in a step."""
        return next((most for first, last, most in self._by_batch_size if first <= count <= last), self.most)


class DraftRecord:
    """What has come of one request's tries.

    A request whose tries bring nothing makes a pause before the next one, which is short at first and short again when
    one has brought a token. So a text that does not repeat itself is decoded nearly as without drafts, and one that
    begins to repeat itself is noticed soon.
    """

    def __init__(self, most: int):
        self._gain = min(most / 2, FIRST_GAIN)
        """Tokens that a try brings, as it seems."""
        self._pause = 0
        self._next_pause = 1

    def depth(self, most: int) -> int:
        """How many tokens to try ahead now, at most `most`; 0 in a pause."""
        return 0 if self._pause else min(most, max(1, math.ceil(2 * self._gain)))

    def settle(self, taken: int) -> None:
        """A try has brought so many tokens."""
        self._gain += RATE * (taken - self._gain)
        if taken:
            self._next_pause = 1
        elif self._gain < WORTH:
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)

    def passed(self) -> None:
        """A decode without drafts is under way."""
        self._pause = max(0, self._pause - 1)
