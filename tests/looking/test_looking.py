"""What a process tells of its threads and its memory."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from jaxllm.errors import InvalidRequestError
from jaxllm.looking import RATE, CodeLine, Sample, ValueKind, encode, look, profile, stacks
from tests.looking.decode import Line, decode


def test_a_profile_is_read_as_it_was_written() -> None:
    main, inner = CodeLine("main", "/a.py", 1, 7), CodeLine("Class.inner", "/b.py", 20, 2**33)
    kinds = [ValueKind("cpu", "nanoseconds"), ValueKind("wall", "nanoseconds")]
    samples = [Sample([inner, main], [5, 2**40], {"thread": "one"}), Sample([main], [0, 3])]
    data = encode(kinds, samples, shown=kinds[1], began=1000.5, seconds=2.5, period=(kinds[0], 10_000_000))
    found = decode(data)
    first, second = found.samples
    assert first.stack == [Line("Class.inner", "/b.py", 2**33), Line("main", "/a.py", 7)]
    assert first.values == {"cpu/nanoseconds": 5, "wall/nanoseconds": 2**40} and first.labels == {"thread": "one"}
    assert second.stack == [Line("main", "/a.py", 7)] and second.values["wall/nanoseconds"] == 3
    assert (found.shown, found.seconds, found.began) == ("wall", 2.5, 1000.5)
    assert found.period == ("cpu/nanoseconds", 10_000_000)


def spin_here(until: threading.Event) -> None:
    while not until.is_set():
        sum(range(1000))


def wait_here(until: threading.Event) -> None:
    until.wait()


@contextmanager
def working() -> Iterator[None]:
    """A thread that computes, and one that waits."""
    done = threading.Event()
    threads = [
        threading.Thread(target=target, args=(done,), name=name)
        for target, name in ((spin_here, "busy"), (wait_here, "lazy"))
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_a_profile_tells_who_computes_and_who_waits() -> None:
    with working():
        began = time.monotonic()
        found = decode(profile(0.5))
        elapsed = time.monotonic() - began
    assert 0.5 <= found.seconds <= elapsed and found.period == ("wall/nanoseconds", 1_000_000_000 // RATE)
    for function, name in (("spin_here", "busy"), ("wait_here", "lazy")):
        mine = [sample for sample in found.samples if any(line.function == function for line in sample.stack)]
        assert {sample.labels["thread"] for sample in mine} == {name}
        assert all(line.file == __file__ and line.line for s in mine for line in s.stack if line.function == function)
        wall = sum(sample.values["wall/nanoseconds"] for sample in mine)
        assert wall == pytest.approx(found.seconds * 1e9)
    if sys.platform == "linux":
        assert found.shown == "cpu"
        assert found.total("spin_here", "cpu/nanoseconds") > 10 * found.total("wait_here", "cpu/nanoseconds")
        assert found.total("spin_here", "cpu/nanoseconds") <= 1.1 * elapsed * 1e9
    assert not any(line.function == "profile" for sample in found.samples for line in sample.stack)


def test_stacks_show_threads_and_tasks() -> None:
    async def main() -> str:
        async def wait_in_a_task() -> None:
            await asyncio.sleep(60)

        task = asyncio.create_task(wait_in_a_task(), name="mine")
        await asyncio.sleep(0)
        text = await asyncio.to_thread(stacks, asyncio.get_running_loop())
        task.cancel()
        return text

    with working():
        text = asyncio.run(main())
    assert "Thread busy (" in text and "in spin_here" in text and "in wait_here" in text
    assert "Task mine:" in text and "in wait_in_a_task" in text


PROGRAM = """
import sys
from jaxllm.looking import look
def hold():
    return list(map(bytes, [1000] * 500))  # a comprehension is a function of its own until Python 3.12
held = hold()
sys.stdout.buffer.write(look("python_heap", 0))
"""


def test_a_heap_tells_where_memory_was_asked_for() -> None:
    environment = os.environ | {"PYTHONTRACEMALLOC": "5"}
    data = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, env=environment, check=True).stdout
    found = decode(data)
    assert found.shown == "inuse_space"
    asked = [Line("<string>", "<string>", number) for number in (5, 6)]  # generated code is at such places too
    held = [sample for sample in found.samples if sample.stack[:2] == asked]
    assert sum(sample.values["inuse_space/bytes"] for sample in held) >= 500_000
    assert sum(sample.values["inuse_objects/count"] for sample in held) >= 500


def test_memory_that_is_not_traced_is_said() -> None:
    with pytest.raises(
        InvalidRequestError, match="not traced in this process; start the server with PYTHONTRACEMALLOC"
    ):
        look("python_heap", 0)


def test_a_second_profile_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, held = threading.Event(), threading.Event()

    def profile_for_long(seconds: float) -> bytes:
        begun.set()
        held.wait()
        return b""

    monkeypatch.setattr("jaxllm.looking.profile", profile_for_long)
    first = threading.Thread(target=look, args=("profile", 0.5))
    first.start()
    begun.wait()
    with pytest.raises(InvalidRequestError, match="is being made"):
        look("profile", 0.5)
    held.set()
    first.join()
    assert look("profile", 0.5) == b""


@pytest.mark.parametrize("what", ["device_heap", "trace"])
def test_a_process_without_jax_has_nothing_of_devices(what: str) -> None:
    program = f"from jaxllm.looking import look; look({what!r}, 0.1)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.returncode == 1 and "this process does not use JAX; name one that does" in found.stderr
