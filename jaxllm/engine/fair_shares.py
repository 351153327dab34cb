"""What each group gets of a step and of the slots where several want more than there is: as much as any other."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxllm.engine.request import Request

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
        """Whether there is more than one."""
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
    """Which running request is put back so that a waiting one can run: the last of the group that has most.

    That group must have at least two more running than the candidate's, so that nobody gives way in turn, and none
    gives way to a less urgent one. `running` is in order.
    """
    counts = Counter(request.group for request in running)
    enough = counts[candidate.group] + 2
    return _last_of_most([r for r in running if r.priority >= candidate.priority and counts[r.group] >= enough], counts)


def preempted_first(running: Sequence[Request], index: int) -> Request:
    """Which running request is put back when pages run out: the last of the group that has most, of the least urgent.

    Requests before `index` have their place in the step that is being made. Where one group runs it is the last of all.
    """
    lowest = running[-1].priority
    counts = Counter(request.group for request in running if request.priority == lowest)
    found = _last_of_most([request for request in running[index:] if request.priority == lowest], counts)
    assert found is not None, "the last is one of them"
    return found


def _last_of_most(candidates: Sequence[Request], counts: Counter[str]) -> Request | None:
    most = max((counts[request.group] for request in candidates), default=0)
    return next((request for request in reversed(candidates) if counts[request.group] == most), None)
