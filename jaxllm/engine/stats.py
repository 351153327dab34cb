"""Sums of what engines say of themselves: of one after the other, and of several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from jaxllm.engine.messages import EngineStats

GAUGES = frozenset({
    "num_running", "num_waiting", "num_preparing", "num_pages", "num_free_pages", "num_host_pages", "num_disk_pages",
    "page_size", "compiles_pending", "ready", "running_adapters", "waiting_adapters",
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
    total = EngineStats()
    for one in stats:
        total = added(one, total)
    return total


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
