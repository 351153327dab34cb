"""Where the time of a request goes: waiting, prefill, decode."""

from __future__ import annotations

import time
from dataclasses import dataclass

from jaxllm.engine.messages import TokenDelta


@dataclass
class Phases:
    """How long each took, in seconds; None is what has not been measured yet.

    Attributes:
        queue: from the request's arrival to the first step that ran it.
        prefill: from there to its first token.
        decode: from there to its last token so far.
        padding: its share of the padding rows that its steps ran, once a sequence of it has ended.
        num_answers: the sequences that `decode` is of.
    """

    queue: float | None = None
    prefill: float | None = None
    decode: float | None = None
    padding: float | None = None
    num_answers: int = 0

    def __add__(self, other: Phases) -> Phases:
        return Phases(
            _sum(self.queue, other.queue),
            _sum(self.prefill, other.prefill),
            _sum(self.decode, other.decode),
            _sum(self.padding, other.padding),
            self.num_answers + other.num_answers,
        )


@dataclass
class Clock:
    """When a request came, when its first sequence began to run, and when its first and its last token so far came.

    Seconds since the epoch.
    """

    arrival: float
    scheduled: float | None = None
    first: float | None = None
    last: float | None = None
    padding: float | None = None

    def on_delta(self, delta: TokenDelta) -> None:
        now = time.time()
        self.scheduled = self.scheduled or delta.first_scheduled_time
        if delta.token_ids:
            self.first, self.last = self.first or now, now
        if delta.finish_reason is not None:
            self.padding = _sum(self.padding, delta.padding)

    def phases(self, num_answers: int) -> Phases:
        """Of a request with that many sequences."""
        return Phases(
            _between(self.arrival, self.scheduled),
            _between(self.scheduled, self.first),
            _between(self.first, self.last),
            self.padding,
            num_answers,
        )


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(end - start, 0.0)


def _sum(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else one + other
