"""Whose turn it is, and how much of a step each group of requests gets."""

from __future__ import annotations

import bisect
import heapq
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jaxllm.engine.core.request import Request


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
        """The groups of which a request waits."""
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
        """The request's group has been given that many. Nothing is counted while no request of its priority waits."""
        lane = self._levels.get(request.priority, {}).get(request.group)
        if lane is not None:
            lane.served += tokens


RECENT_SECONDS = 60.0

Sharers = tuple[int, str]
"""A priority and a group: only requests of equal priority share."""


class RecentGroups:
    """Groups that have sent requests within the last minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._last: dict[str, float] = {}

    def note(self, group: str) -> None:
        """A request of this group has come."""
        now = self._clock()
        self._last = {known: at for known, at in self._last.items() if at > now - RECENT_SECONDS} | {group: now}

    @property
    def are_several(self) -> bool:
        """More than one group has sent requests."""
        oldest = self._clock() - RECENT_SECONDS
        return len(self._last) > 1 and sum(at > oldest for at in self._last.values()) > 1


def divided(wanted: Mapping[str, int], total: int) -> dict[str, int]:
    """As much as each wants, and alike to those for which there is less; at least 1.

    Worked example: of 210, {"a": 10, "b": 500, "c": 500} get {"a": 10, "b": 100, "c": 100}.
    """
    shares, left = {}, total
    smallest_first = sorted(wanted, key=lambda group: wanted[group])
    for at, group in enumerate(smallest_first):
        shares[group] = max(min(wanted[group], left // (len(wanted) - at)), 1)
        left -= shares[group]
    return shares


def prompt_shares(
    running: Iterable[tuple[Request, int]], admissible: Iterable[Request], budget: int
) -> dict[Sharers, int]:
    """The most prompt tokens that a step of `budget` tokens runs of each group; empty where no two want some.

    Args:
        running: requests with how many of their tokens could run.
        admissible: waiting requests that could start in this step; what they could do without is not kept from others.
    """
    wanted: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for request, tokens in running:
        if tokens > 1:
            wanted[request.priority][request.group] += tokens
        else:
            budget -= tokens
    for request in admissible:
        wanted[request.priority][request.group] += len(request.token_ids)
    shares: dict[Sharers, int] = {}
    for priority, groups in wanted.items():
        if len(groups) > 1:
            shares |= {(priority, group): share for group, share in divided(groups, budget).items()}
    return shares


def in_turn(heads: Sequence[Request], running: Iterable[Request]) -> Sequence[Request]:
    """The first requests of groups in the order in which they are admitted: `heads` are by the groups' turns.

    A group with at least two fewer running than another comes before its turn, in the order of the turns: it may have
    been given more tokens lately, but has less of what a running request keeps.
    """
    if len(heads) < 2:
        return heads
    counts = Counter(request.group for request in running)
    most = max(counts.values(), default=0)
    return sorted(heads, key=lambda head: counts[head.group] + 2 > most)


def gives_way(running: Sequence[Request], candidate: Request) -> Request | None:
    """The running request that is put back so that a waiting one can run: the last of the group that has most.

    That group must have at least two more running than the candidate's, so that groups do not give way in turn, and no
    request gives way to a less urgent one. `running` is in order.
    """
    counts = Counter(request.group for request in running)
    enough = counts[candidate.group] + 2
    return _last_of_most([r for r in running if r.priority >= candidate.priority and counts[r.group] >= enough], counts)


def preempted_first(running: Sequence[Request], index: int) -> Request:
    """The running request that is put back when pages run out: the last of the group that has most, of the least
    urgent.

    Requests before `index` have their place in the step that is being made. If only one group runs, it is the last of
    all.
    """
    lowest = running[-1].priority
    counts = Counter(request.group for request in running if request.priority == lowest)
    found = _last_of_most([request for request in running[index:] if request.priority == lowest], counts)
    assert found is not None, "the last is one of them"
    return found


def _last_of_most(candidates: Sequence[Request], counts: Counter[str]) -> Request | None:
    most = max((counts[request.group] for request in candidates), default=0)
    return next((request for request in reversed(candidates) if counts[request.group] == most), None)
