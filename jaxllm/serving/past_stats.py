"""Counters of a model that outlive its engines: each new engine counts from zero."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import msgspec

from jaxllm.engine.messages import EngineStats

GAUGES = frozenset({
    "num_running", "num_waiting", "num_preparing", "num_pages", "num_free_pages", "page_size", "compiles_pending",
    "ready",
})  # fmt: skip
"""What an engine says of the moment; all else it counts."""


def added(past: EngineStats, now: EngineStats) -> EngineStats:
    """The state of `now`, with what both have counted."""
    counted = [name for name in EngineStats.__struct_fields__ if name not in GAUGES]
    return msgspec.structs.replace(now, **{name: _sum(getattr(past, name), getattr(now, name)) for name in counted})


def counted(stats: EngineStats) -> EngineStats:
    """What stays of an engine that has ended: its counters."""
    return added(stats, EngineStats())


def _sum(one: Any, other: Any) -> Any:
    """[1, 2] and [3] -> [4, 2]; {"a": 1} and {"a": 2, "b": 3} -> {"a": 3, "b": 3}"""
    if isinstance(one, list):
        return [a + b for a, b in zip_longest(one, other, fillvalue=0)]
    if isinstance(one, dict):
        return {key: one.get(key, 0) + other.get(key, 0) for key in one | other}
    return one + other
