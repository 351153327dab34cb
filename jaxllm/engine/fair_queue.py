"""Which of the waiting requests is next: by priority, then each group in its turn, then by arrival."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from jaxllm.engine.request import Request


def _order(request: Request) -> tuple[int, float, str]:
    return request.order


@dataclass
class Lane:
    """One group's waiting requests of one priority, by arrival."""

    requests: list[Request] = field(default_factory=list)
    served: int = 0
    """Tokens that it has been given, counted from where it was made even with the others."""
    joined: int = 0
    """When it last began to wait: later ones are greater."""


class FairQueue:
    """Waiting requests. Of the most urgent ones, the group that has been given the fewest tokens is next.

    A group is what belongs together, such as all requests with one API key; where a single one waits, order is by
    arrival alone. This is start-time fair queueing (Goyal et al., 1996), the deficit round robin whose deficits outlive
    a turn: a group that begins to wait is made even with the one that has had least, and comes before it. So who sends
    little is next at once, however many requests of others wait, and nobody can save up turns by sending nothing.
    """

    def __init__(self) -> None:
        self._levels: dict[int, dict[str, Lane]] = {}
        """By priority, then by group. A lane without requests stays as long as others of its priority wait, so that
        what it was given is not forgotten."""
        self._length = 0
        self._joins = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        """All of them by priority and arrival, whoever is next."""
        lanes = (lane.requests for level in self._levels.values() for lane in level.values())
        return heapq.merge(*lanes, key=_order)

    @property
    def groups(self) -> set[str]:
        """Those of which a request waits."""
        return {group for level in self._levels.values() for group, lane in level.items() if lane.requests}

    def add(self, request: Request) -> None:
        """Queue a request in its place: one that was preempted goes back to it."""
        level = self._levels.setdefault(request.priority, {})
        lane = level.setdefault(request.group, Lane())
        if not lane.requests:
            waiting = [other.served for other in level.values() if other.requests]
            lane.served = max(lane.served, min(waiting, default=0))
            self._joins += 1
            lane.joined = self._joins
        bisect.insort(lane.requests, request, key=_order)
        self._length += 1

    def heads(self) -> list[Request]:
        """The first request of each group at the most urgent priority; the one whose turn it is first."""
        return [lane.requests[0] for lane in self._in_turn()]

    def first(self, count: int, tokens: int) -> list[Request]:
        """The first requests of the groups at the most urgent priority: one of each in turn, at most `count`, of each
        group until they have that many tokens together."""
        found: list[Request] = []
        lanes = [(lane, tokens) for lane in self._in_turn()]
        place = 0
        while lanes and len(found) < count:
            of_each = [lane.requests[place] for lane, _ in lanes]
            found += of_each
            place += 1
            left = [(lane, room - len(r.token_ids)) for (lane, room), r in zip(lanes, of_each, strict=True)]
            lanes = [(lane, room) for lane, room in left if room > 0 and place < len(lane.requests)]
        return found[:count]

    def _in_turn(self) -> list[Lane]:
        """The groups with waiting requests at the most urgent priority."""
        level = self._levels[min(self._levels)] if self._levels else {}
        return sorted((lane for lane in level.values() if lane.requests), key=lambda lane: (lane.served, -lane.joined))

    def remove(self, request: Request) -> None:
        """Take out a request, wherever it is."""
        lane = self._levels[request.priority][request.group]
        del lane.requests[bisect.bisect_left(lane.requests, request.order, key=_order)]
        self._length -= 1
        if not any(other.requests for other in self._levels[request.priority].values()):
            del self._levels[request.priority]

    def charge(self, request: Request, tokens: int) -> None:
        """The request's group has been given that many. Nobody counts while none of its priority waits."""
        lane = self._levels.get(request.priority, {}).get(request.group)
        if lane is not None:
            lane.served += tokens
