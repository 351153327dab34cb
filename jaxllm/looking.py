"""What a process tells of itself while it runs: its threads, its memory, its devices.

Profiles are in pprof's format: https://github.com/google/pprof/blob/main/proto/profile.proto
"""

from __future__ import annotations

import asyncio
import gzip
import io
import sys
import tempfile
import threading
import time
import traceback
import tracemalloc
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, Literal, NamedTuple

from jaxllm.errors import InvalidRequestError

What = Literal["profile", "python_heap", "device_heap", "stacks", "trace"]

_NUMBER, _BIG, _TEXT = "int64", "uint64", "string"
_MESSAGES: Mapping[str, Mapping[str, tuple[int, str, bool]]] = {
    "Profile": {
        "sample_type": (1, "ValueType", True), "sample": (2, "Sample", True), "location": (4, "Location", True),
        "function": (5, "Function", True), "string_table": (6, _TEXT, True), "time_nanos": (9, _NUMBER, False),
        "duration_nanos": (10, _NUMBER, False), "period_type": (11, "ValueType", False),
        "period": (12, _NUMBER, False), "default_sample_type": (14, _NUMBER, False),
    },
    "ValueType": {"type": (1, _NUMBER, False), "unit": (2, _NUMBER, False)},
    "Sample": {"location_id": (1, _BIG, True), "value": (2, _NUMBER, True), "label": (3, "Label", True)},
    "Label": {"key": (1, _NUMBER, False), "str": (2, _NUMBER, False)},
    "Location": {"id": (1, _BIG, False), "line": (4, "Line", True)},
    "Line": {"function_id": (1, _BIG, False), "line": (2, _NUMBER, False)},
    "Function": {
        "id": (1, _BIG, False), "name": (2, _NUMBER, False), "filename": (4, _NUMBER, False),
        "start_line": (5, _NUMBER, False),
    },
}  # fmt: skip
"""Message -> its fields that are written here: (number, kind, whether it is repeated)."""


class CodeLine(NamedTuple):
    """A line of code that runs, or that has allocated memory."""

    function: str
    file: str
    first_line: int
    line: int


class ValueKind(NamedTuple):
    """A value's meaning and unit: ("cpu", "nanoseconds")."""

    type: str
    unit: str


class Sample(NamedTuple):
    """Values of one stack, one for each kind; the stack's innermost place is the first."""

    stack: Sequence[CodeLine]
    values: Sequence[int]
    labels: Mapping[str, str] = {}


RATE = 100
"""Samples a second."""
FOREIGN = "a thread of C++"
SAMPLES, WALL, CPU = ValueKind("samples", "count"), ValueKind("wall", "nanoseconds"), ValueKind("cpu", "nanoseconds")
OBJECTS, SPACE = ValueKind("inuse_objects", "count"), ValueKind("inuse_space", "bytes")

_busy = threading.Lock()


def look(what: What, seconds: float) -> bytes:
    """The answer about this process; some take `seconds`. Raises InvalidRequestError if it is not available."""
    match what:
        case "stacks":
            return stacks().encode()
        case "python_heap":
            return python_heap()
        case "device_heap":
            return device_heap()
    if not _busy.acquire(blocking=False):
        raise InvalidRequestError("a profile or a trace of this process is being made; ask again when it is done")
    try:
        return profile(seconds) if what == "profile" else trace(seconds)
    finally:
        _busy.release()


def trace(seconds: float) -> bytes:
    """A zip of the files of JAX's profiler: a trace for Perfetto and one for XProf."""
    check_jax()
    import jax

    with tempfile.TemporaryDirectory(prefix="jaxllm-trace-") as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            time.sleep(seconds)
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file():
                    archive.write(path, path.name)
        return packed.getvalue()


def profile(seconds: float) -> bytes:
    """A profile of all Python threads but the calling one, in pprof's format.

    Each sample says how much time has passed since the one before (wall) and, on Linux, for how much of that its thread
    ran on a processor (cpu). Time that a Python thread spends in C++ belongs to the line that called it.
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
            stack = tuple((each.f_code, line or 0) for each, line in traceback.walk_stack(frame))
            values = stacks.setdefault((names.get(ident, FOREIGN), stack), [0, 0, 0])
            values[0] += 1
            values[1] += now - last
            if ident in before and ident in used:
                values[2] += used[ident] - before[ident]
        last = now
    kinds = [SAMPLES, WALL, CPU] if has_cpu else [SAMPLES, WALL]
    samples = []
    for (name, stack), values in stacks.items():
        lines = [CodeLine(code.co_qualname, code.co_filename, code.co_firstlineno, line) for code, line in stack]
        samples.append(Sample(lines, values[: len(kinds)], {"thread": name}))
    shown, seconds = CPU if has_cpu else WALL, (last - start) / 1e9
    return encode(kinds, samples, shown=shown, began=began, seconds=seconds, period=(WALL, int(1e9 / RATE)))


def stacks(loop: asyncio.AbstractEventLoop | None = None) -> str:
    """The stack of every thread, and of the waiting tasks of an event loop."""
    names, parts = _names(), []
    for ident, frame in sys._current_frames().items():
        runs = "".join(traceback.format_stack(frame))
        parts.append(f"Thread {names.get(ident, FOREIGN)} ({ident}):\n{runs}")
    for task in asyncio.all_tasks(loop) if loop is not None else ():
        waits = "".join("".join(traceback.format_stack(frame, 1)) for frame in task.get_stack())
        parts.append(f"Task {task.get_name()}:\n{waits}")
    return "\n".join(parts)


def _names() -> dict[int | None, str]:
    return {thread.ident: thread.name for thread in threading.enumerate()}


def _processor_times() -> dict[int, int]:
    """Nanoseconds that each thread has run on a processor; empty if the system does not tell."""
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


def python_heap() -> bytes:
    """Python's objects by where they were made, in pprof's format. Raises InvalidRequestError if untraced."""
    if not tracemalloc.is_tracing():
        raise InvalidRequestError(
            "Python's memory is not traced in this process; start the server with PYTHONTRACEMALLOC=10 in its "
            "environment, which makes Python slower"
        )
    began = time.time()
    samples = []
    for made in tracemalloc.take_snapshot().statistics("traceback"):
        innermost_first = reversed(made.traceback)
        stack = [CodeLine(frame.filename, frame.filename, 0, frame.lineno) for frame in innermost_first]
        samples.append(Sample(stack, [made.count, made.size]))
    return encode([OBJECTS, SPACE], samples, shown=SPACE, began=began, seconds=0)


def device_heap() -> bytes:
    """Arrays and executables on the devices by where they were made, in pprof's format. Raises InvalidRequestError."""
    check_jax()
    import jax

    return jax.profiler.device_memory_profile()


def check_jax() -> None:
    if "jax" not in sys.modules:
        raise InvalidRequestError("this process does not use JAX; name one that does, as process=MODEL")


def encode(
    kinds: Sequence[ValueKind],
    samples: Iterable[Sample],
    *,
    shown: ValueKind,
    began: float,
    seconds: float,
    period: tuple[ValueKind, int] | None = None,
) -> bytes:
    """A compressed profile in pprof's format.

    Args:
        shown: the kind that a reader shows first.
        began: its start, in seconds since the epoch; it lasted `seconds`.
        period: how much of a kind lies between two samples.
    """
    profile = _profile_class()()
    texts = _Table()
    texts.number("")
    for kind in kinds:
        profile.sample_type.add(type=texts.number(kind.type), unit=texts.number(kind.unit))
    functions, places = _Table(), _Table()
    for sample in samples:
        added = profile.sample.add(value=sample.values)
        added.location_id.extend(places.number(place) + 1 for place in sample.stack)
        for key, value in sample.labels.items():
            added.label.add(key=texts.number(key), str=texts.number(value))
    for number, place in enumerate(places, 1):
        function = functions.number(place[:3]) + 1
        profile.location.add(id=number).line.add(function_id=function, line=place.line)
    for number, (name, file, first_line) in enumerate(functions, 1):
        profile.function.add(id=number, name=texts.number(name), filename=texts.number(file), start_line=first_line)
    profile.time_nanos, profile.duration_nanos = int(began * 1e9), int(seconds * 1e9)
    profile.default_sample_type = texts.number(shown.type)
    if period is not None:
        profile.period_type.type, profile.period_type.unit = map(texts.number, period[0])
        profile.period = period[1]
    profile.string_table.extend(texts)
    return gzip.compress(profile.SerializeToString())


class _Table(dict[Any, int]):
    """Values in the order in which they were first asked for."""

    def number(self, value: Any) -> int:
        return self.setdefault(value, len(self))


@cache
def _profile_class() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    kinds = {_NUMBER: field.TYPE_INT64, _BIG: field.TYPE_UINT64, _TEXT: field.TYPE_STRING}
    file = descriptor_pb2.FileDescriptorProto(name="profile.proto", package="perftools.profiles", syntax="proto3")
    for message, members in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for member, (number, kind, repeated) in members.items():
            label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            added = described.field.add(name=member, number=number, label=label)
            if kind in kinds:
                added.type = kinds[kind]
            else:
                added.type, added.type_name = field.TYPE_MESSAGE, f".perftools.profiles.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("perftools.profiles.Profile"))
