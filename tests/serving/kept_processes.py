"""Processes that render templates, check bodies and compile grammars, handed on from one application to the next.

Each takes a fifth of a second to start, and there are hundreds of applications.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from jaxllm import own_process
from jaxllm.own_process import AskedProcesses, Process


@contextmanager
def keeping_processes() -> Iterator[None]:
    """What is closed here leaves the processes that wait for a question to whoever next needs one of their kind."""
    kept: defaultdict[tuple[str, ...], deque[Process]] = defaultdict(deque)
    take, close = AskedProcesses._take, AskedProcesses.close

    def kind(pool: AskedProcesses) -> tuple[str, ...]:
        return (pool._module, *pool._arguments)

    def taken(pool: AskedProcesses) -> tuple[Process, bool]:
        with pool._lock:
            if not pool._idle and kept[kind(pool)]:
                pool._idle.append(kept[kind(pool)].pop())
        return take(pool)

    def closed(pool: AskedProcesses) -> None:
        with pool._lock:
            kept[kind(pool)].extend(pool._idle)
            pool._idle.clear()
        close(pool)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AskedProcesses, "_take", taken)
        patch.setattr(AskedProcesses, "close", closed)
        yield
    for processes in kept.values():
        own_process._end_all(list(processes))
