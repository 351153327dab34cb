"""Which of several engines a request goes to: the one that has its prefix, or the one with the least to do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any

import msgspec

from jaxllm.engine.messages import EngineRequest, EngineStats, TokenDelta

MOST_AHEAD = 4.0
"""A prefix is worth waiting for at most this much more to do than the least busy engine has: see `Replica.load`."""


class Replica:
    """What is known here of one engine: what it has to do, and which prefixes it was sent."""

    def __init__(self, number: int, *, num_pages: int, page_size: int, step_tokens: int):
        self.number = number
        self.page_size = page_size
        self._num_pages = num_pages
        self._step_tokens = step_tokens
        self._nodes: OrderedDict[int, None] = OrderedDict()
        self._pending: dict[str, int] = {}

    @property
    def load(self) -> float:
        """Sequences that run or wait, and one more for each `step_tokens` of their prompts that are to be computed."""
        return len(self._pending) + sum(self._pending.values()) / self._step_tokens

    def matched(self, nodes: Sequence[int]) -> int:
        return next((at for at, node in enumerate(nodes) if node not in self._nodes), len(nodes))

    def begin(self, request: EngineRequest, nodes: Sequence[int]) -> None:
        found = self.matched(nodes)
        self._pending[request.request_id] = len(request.prompt_token_ids) - found * self.page_size
        for node in reversed(nodes):  # the end of a prompt is of less use to others than its beginning
            self._nodes[node] = None
            self._nodes.move_to_end(node)
        while len(self._nodes) > self._num_pages:
            self._nodes.popitem(last=False)

    def computed(self, request_id: str) -> None:
        if request_id in self._pending:
            self._pending[request_id] = 0

    def end(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._pending.pop(request_id, None)

    def forget(self) -> None:
        self._nodes.clear()
        self._pending.clear()


def nodes_of(request: EngineRequest, page_size: int) -> list[int]:
    """A number for each full page of a prompt, which is that of all prompts that are the same up to there."""
    ids, salt, nodes = request.prompt_token_ids, request.cache_salt, []
    node = hash((salt, request.adapters)) if request.adapters else hash(salt)
    for start in range(0, len(ids) - page_size + 1, page_size):
        node = hash((node, *ids[start : start + page_size]))
        nodes.append(node)
    return nodes


Policy = Callable[[EngineRequest, Sequence[Replica]], Replica]
"""Chooses among replicas, of which there is at least one."""


def prefix_first(request: EngineRequest, replicas: Sequence[Replica]) -> Replica:
    """The longest known prefix decides, unless its engine has too much to do; without one, who has the least to do."""
    nodes = nodes_of(request, replicas[0].page_size)
    least = min(replica.load for replica in replicas)
    near = [replica for replica in replicas if replica.load <= least + MOST_AHEAD]
    return max(near, key=lambda replica: (replica.matched(nodes), -replica.load, -len(replica._nodes)))


class ReplicaRouter:
    """Knows which of `replicas` runs each unfinished sequence."""

    def __init__(self, replicas: Sequence[Replica], policy: Policy = prefix_first):
        self.replicas = replicas
        self.owners: dict[str, int] = {}
        self._policy = policy

    def choose(self, request: EngineRequest, among: Sequence[Replica] | None = None) -> Replica:
        return self._policy(request, self.replicas if among is None else among)

    def begin(self, request: EngineRequest, replica: Replica) -> None:
        replica.begin(request, nodes_of(request, replica.page_size))
        self.owners[request.request_id] = replica.number

    def note(self, deltas: Iterable[TokenDelta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None:
                self.forget([delta.request_id])
            elif (owner := self.owners.get(delta.request_id)) is not None:
                self.replicas[owner].computed(delta.request_id)

    def of(self, number: int, request_ids: Iterable[str]) -> list[str]:
        return [name for name in request_ids if self.owners.get(name) == number]

    def forget(self, request_ids: Iterable[str]) -> None:
        for name in request_ids:
            owner = self.owners.pop(name, None)
            if owner is not None:
                self.replicas[owner].end([name])

    def lose(self, number: int) -> list[str]:
        """Another engine takes a replica's place; returns the sequences that it ran."""
        lost = self.of(number, list(self.owners))
        self.replicas[number].forget()
        for name in lost:
            del self.owners[name]
        return lost


GAUGES = frozenset({
    "num_running", "num_waiting", "num_preparing", "num_pages", "num_free_pages", "num_host_pages", "num_disk_pages",
    "resident_bytes", "page_size", "compiles_pending", "ready", "running_adapters", "waiting_adapters",
})  # fmt: skip
"""What an engine says of the moment; all else it counts."""
ALIKE = frozenset({"page_size", "ready"})
"""Gauges that say nothing when they are added up."""


def added(past: EngineStats, now: EngineStats) -> EngineStats:
    """The state of `now`, with what both have counted."""
    names = [name for name in EngineStats.__struct_fields__ if name not in GAUGES]
    return msgspec.structs.replace(now, **{name: _sum([getattr(past, name), getattr(now, name)]) for name in names})


def counted(*stats: EngineStats) -> EngineStats:
    """What stays of engines that have ended: their counters."""
    return reduce(lambda total, one: added(one, total), stats, EngineStats())


def together(past: EngineStats, now: Sequence[EngineStats]) -> EngineStats:
    """Of several engines that run now, with what others counted before them."""
    gauges = {name: _sum([getattr(one, name) for one in now]) for name in GAUGES - ALIKE} if now else {}
    ready = bool(now) and all(one.ready for one in now)
    state = EngineStats(**gauges, page_size=max((one.page_size for one in now), default=0), ready=ready)
    return added(counted(past, *now), state)


def _sum(values: Sequence[Any]) -> Any:
    """[[1, 2], [3]] -> [4, 2]; [{"a": 1}, {"a": 2, "b": 3}] -> {"a": 3, "b": 3}; [1, 2] -> 3"""
    first = values[0]
    if isinstance(first, list):
        return [sum(value[at] for value in values if at < len(value)) for at in range(max(map(len, values)))]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: sum(value.get(key, 0) for value in values) for key in keys}
    return sum(values)
