"""Where the threads of this process are: now, and over some seconds as a profile."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from types import CodeType, FrameType

from jaxllm.looking import pprof
from jaxllm.looking.pprof import CodeLine, Sample, ValueKind

RATE = 100
"""Samples a second."""
FOREIGN = "a thread of C++"
"""The name of those that Python has not started."""
SAMPLES, WALL, CPU = ValueKind("samples", "count"), ValueKind("wall", "nanoseconds"), ValueKind("cpu", "nanoseconds")


def profile(seconds: float) -> bytes:
    """A profile of all Python threads but the one that calls this, in pprof's format.

    Each sample says how much time has passed since the one before it (wall) and, on Linux, for how much of that its
    thread ran on a processor (cpu): most threads wait most of the time. What C++ code does in threads of its own is not
    seen; the time that a Python thread spends in C++ belongs to the line that has called it.
    """
    began, start = time.time(), time.monotonic_ns()
    end, last = start + int(seconds * 1e9), start
    stacks: dict[tuple[str, tuple[tuple[CodeType, int], ...]], list[int]] = {}
    used = _processor_times()
    has_cpu = bool(used)
    while last < end:
        time.sleep(min(1 / RATE, (end - last) / 1e9))
        now, before, used = time.monotonic_ns(), used, _processor_times()
        names = _names()
        for ident, frame in sys._current_frames().items():
            if ident == threading.get_ident():
                continue
            values = stacks.setdefault((names.get(ident, FOREIGN), tuple(_walk(frame))), [0, 0, 0])
            values[0] += 1
            values[1] += now - last
            if ident in before and ident in used:
                values[2] += used[ident] - before[ident]
        last = now
    kinds = [SAMPLES, WALL, CPU] if has_cpu else [SAMPLES, WALL]
    samples = (
        Sample([_place(code, line) for code, line in stack], values[: len(kinds)], {"thread": name})
        for (name, stack), values in stacks.items()
    )
    shown = CPU if has_cpu else WALL
    return pprof.encode(
        kinds, samples, shown=shown, began=began, seconds=(last - start) / 1e9, period=(WALL, int(1e9 / RATE))
    )


def stacks(loop: asyncio.AbstractEventLoop | None = None) -> str:
    """What every thread does now, and what the tasks of an event loop wait for."""
    names, parts = _names(), []
    for ident, frame in sys._current_frames().items():
        what = "".join(traceback.format_stack(frame))
        parts.append(f"Thread {names.get(ident, FOREIGN)} ({ident}):\n{what}")
    for task in asyncio.all_tasks(loop) if loop is not None else ():
        what = "".join("".join(traceback.format_stack(frame, 1)) for frame in task.get_stack())
        parts.append(f"Task {task.get_name()}:\n{what}")
    return "\n".join(parts)


def _walk(frame: FrameType | None) -> Iterable[tuple[CodeType, int]]:
    while frame is not None:
        yield frame.f_code, frame.f_lineno or 0
        frame = frame.f_back


def _place(code: CodeType, line: int) -> CodeLine:
    return CodeLine(code.co_qualname, code.co_filename, code.co_firstlineno, line)


def _names() -> dict[int | None, str]:
    return {thread.ident: thread.name for thread in threading.enumerate()}


def _processor_times() -> dict[int, int]:
    """Nanoseconds that each thread has used of a processor; nothing where the system does not tell."""
    if sys.platform != "linux":
        return {}
    found = {}
    for thread in threading.enumerate():
        if thread.ident is None or thread.native_id is None:
            continue
        clock = ~thread.native_id << 3 | 6  # that of a thread's time: MAKE_THREAD_CPUCLOCK(id, CPUCLOCK_SCHED) in Linux
        with suppress(OSError):  # the thread has ended meanwhile
            found[thread.ident] = time.clock_gettime_ns(clock)
    return found
