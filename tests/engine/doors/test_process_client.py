"""The pipe between a front door and an engine in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import psutil
import pytest

from jaxllm import AsyncLLM, EngineConfig, SamplingParams
from jaxllm.engine.doors import engine_process, process_client
from jaxllm.engine.doors.process_client import ProcessClient
from jaxllm.engine.doors.streams import Stream, Streams
from jaxllm.engine.messages import EngineRequest, MemoryRoom
from jaxllm.engine.start.plan import PROCESS_BYTES
from jaxllm.errors import ConfigError, EngineDeadError, InvalidRequestError, QueueFullError
from tests.engine.doors import stand_in
from tests.reference.tiny import write_checkpoint
from tests.support.sizes import FIELDS as SIZES

pytestmark = pytest.mark.programs

FIELDS: dict[str, Any] = SIZES | {"engine_process": True}
PATIENCE = 60.0
FOUR_TOKENS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_checkpoint("llama_gqa", tmp_path_factory.mktemp("tiny"))
    defaults = {"temperature": 1, "top_k": 64, "top_p": 0.95, "do_sample": True, "eos_token_id": [1, 2]}
    (path / "generation_config.json").write_text(json.dumps(defaults))
    return path


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(model=str(directory), **FIELDS)
    yield engine
    engine.shutdown()


def test_the_models_own_sampling_crosses_the_pipe(engine: AsyncLLM) -> None:
    async def run() -> int:
        async with asyncio.timeout(PATIENCE):
            outputs = [output async for output in engine.generate([1, 2, 3])]
        return len(outputs[-1].outputs[0].token_ids)

    assert asyncio.run(run()) >= 1
    assert engine.info.default_sampling.fields() == {"temperature": 1.0, "top_k": 64, "top_p": 0.95}


def test_an_engine_says_what_its_process_holds(engine: AsyncLLM) -> None:
    process = psutil.Process(engine._streams.client._process.pid)  # type: ignore[attr-defined]
    deadline = time.monotonic() + PATIENCE
    while not 0.7 < engine.stats().resident_bytes / process.memory_info().rss < 1.4:
        assert time.monotonic() < deadline, f"{engine.stats().resident_bytes} of {process.memory_info().rss} bytes"
        time.sleep(0.1)
    assert engine.info.kv_cache_memory is not None and engine.info.planned_memory > engine.info.kv_cache_memory


def test_freed_memory_is_given_back_once_after_work_and_when_all_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = [0.0], []
    monkeypatch.setattr(engine_process.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(engine_process.machine, "return_freed_memory", lambda: calls.append(clock[0]))
    rest = engine_process.Rest()
    for at in range(40):  # compiles end at 6, and it works from 10 to 14
        clock[0] = float(at)
        rest.note(10 <= at < 15, at < 6)
    assert calls == [6.0, 20.0]


def test_an_engine_asks_for_room_before_it_takes_any(directory: Path) -> None:
    asked: list[int | None] = []
    engine = AsyncLLM(model=str(directory), room=MemoryRoom(2**30, asked.append), **FIELDS)
    try:
        [nbytes] = asked
        assert nbytes is not None and PROCESS_BYTES + engine.info.kv_cache_memory < nbytes <= 2**30  # type: ignore[operator]
        engine.restart()  # in the same place
        assert len(asked) == 1
    finally:
        engine.shutdown()


def test_an_engine_without_room_ends(directory: Path) -> None:
    before = psutil.Process().children()
    processes = []

    def refuse(nbytes: int | None) -> None:
        processes.extend(child for child in psutil.Process().children() if child not in before)
        raise QueueFullError("there is no room")

    with pytest.raises(QueueFullError, match="there is no room"):
        AsyncLLM(model=str(directory), room=MemoryRoom(None, refuse), **FIELDS)
    assert processes and not any(is_there(process.pid) for process in processes)


def test_an_engine_that_cannot_fit_does_not_ask(directory: Path) -> None:
    asked: list[int | None] = []
    with pytest.raises(ConfigError, match="model_memory is 10 MiB"):
        AsyncLLM(model=str(directory), room=MemoryRoom(10 * 2**20, asked.append), **FIELDS)
    assert not asked


def test_a_mapped_file_that_was_overwritten_is_named(directory: Path) -> None:
    engine = AsyncLLM(model=str(directory), **FIELDS)
    try:
        os.kill(engine._streams.client._process.pid, signal.SIGBUS)  # type: ignore[attr-defined]
        with pytest.raises(EngineDeadError, match=r"exit code -7\): a file that it had mapped, .* by rename"):
            asyncio.run(_one(engine))
    finally:
        engine.shutdown()


async def _one(engine: AsyncLLM) -> None:
    async for _ in engine.stream([1, 2, 3], SamplingParams(max_tokens=90, ignore_eos=True)):
        pass


def test_a_message_that_cannot_be_read_ends_the_engine_loudly_and_it_starts_again(engine: AsyncLLM) -> None:
    async def run() -> int:
        stream = engine.stream([1, 2, 3], SamplingParams(temperature=0, max_tokens=90, ignore_eos=True))
        await anext(stream)
        engine._streams.client._pipe.send_bytes(b"no message")  # type: ignore[attr-defined]
        with pytest.raises(EngineDeadError, match="ValidationError"):
            async with asyncio.timeout(PATIENCE):
                async for _ in stream:
                    pass
        deadline = time.monotonic() + PATIENCE
        while engine.is_dead:
            assert time.monotonic() < deadline, "it did not start again"
            await asyncio.sleep(0.05)
        return len([delta async for _, delta in engine.stream([1, 2, 3], FOUR_TOKENS)])

    assert asyncio.run(run()) == 4


def test_a_request_that_the_engine_could_not_read_is_refused_alone(engine: AsyncLLM) -> None:
    async def run() -> int:
        with pytest.raises(InvalidRequestError, match="priority"):
            await anext(engine.stream([1, 2, 3], FOUR_TOKENS, priority="high"))  # type: ignore[arg-type]
        return len([delta async for _, delta in engine.stream([1, 2, 3], FOUR_TOKENS)])

    assert asyncio.run(run()) == 4


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_client, "SILENT_SECONDS", 2.0)


def endless(tokens: int = 3) -> EngineRequest:
    return EngineRequest(
        request_id="r", prompt_token_ids=[5] * tokens, sampling_params=SamplingParams(max_tokens=10**6, n=1)
    )


def is_there(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_for(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def test_a_stopped_process_is_ended_and_another_takes_its_place(impatient: None) -> None:
    def start(given_up: threading.Event) -> ProcessClient:
        return ProcessClient(EngineConfig(), main=stand_in.paced, given_up=given_up)

    first = start(threading.Event())
    streams = Streams(first, None, start=start, revived=True)
    try:
        pid = first._process.pid
        with Stream(streams, [endless()]) as stream:
            events = iter(stream)
            next(events)
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(EngineDeadError, match="said nothing for 3 seconds and was killed"):
                for _ in events:
                    pass
        assert not is_there(pid)
        wait_for(lambda: not streams.is_dead)
        with Stream(streams, [endless()]) as stream:
            assert next(iter(stream))[0][1].token_ids == [stand_in.TOKEN]
    finally:
        streams.shutdown()


def test_nobody_waits_for_a_process_that_does_not_read_and_it_can_be_ended() -> None:
    client = ProcessClient(EngineConfig(), main=stand_in.paced)
    os.kill(client._process.pid, signal.SIGSTOP)
    longest = 0.0
    for _ in range(20):  # 2 MB, of which a pipe takes a tenth
        began = time.monotonic()
        client.add(endless(100_000))
        client.abort(["r"])
        longest = max(longest, time.monotonic() - began)
    assert longest < 5
    began = time.monotonic()
    client.shutdown()
    assert time.monotonic() - began < process_client.STOP_SECONDS + 20
    assert not is_there(client._process.pid)


def test_a_long_step_is_no_death_and_neither_is_c_code_that_keeps_python_from_running(impatient: None) -> None:
    client = ProcessClient(EngineConfig(), main=stand_in.slow)
    try:
        client.add(endless())
        began, deltas = time.monotonic(), []
        while not deltas:
            deltas = client.outputs(0.5)
        assert time.monotonic() - began > stand_in.LONG_SECONDS
    finally:
        client.shutdown()


def test_an_end_does_not_wait_for_a_start() -> None:
    given_up = threading.Event()
    threading.Timer(1.0, given_up.set).start()
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match="shut down while it started"):
        ProcessClient(EngineConfig(), main=stand_in.never_ready, given_up=given_up)
    assert time.monotonic() - began < 60


def test_a_process_that_loads_ends_with_the_one_that_started_it() -> None:
    program = (
        "import psutil, threading, time\n"
        "from jaxllm.config import EngineConfig\n"
        "from jaxllm.engine.doors.process_client import ProcessClient\n"
        "from tests.engine.doors import stand_in\n"
        "start = lambda: ProcessClient(EngineConfig(), main=stand_in.never_ready)\n"
        "threading.Thread(target=start, daemon=True).start()\n"
        "while not psutil.Process().children():\n"
        "    time.sleep(0.01)\n"
        "print(psutil.Process().children()[0].pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        time.sleep(2.0)  # it is up, or nearly
    finally:
        process.kill()
        process.communicate()
    wait_for(lambda: not is_there(pid), 20)


def test_a_start_of_an_engine_can_be_given_up() -> None:
    given_up = threading.Event()
    never_ready = partial(ProcessClient, main=stand_in.never_ready)
    threading.Timer(0.5, given_up.set).start()
    with (
        mock.patch("jaxllm.engine.doors.process_client.ProcessClient", never_ready),
        pytest.raises(EngineDeadError, match="shut down while it started"),
    ):
        AsyncLLM(EngineConfig(engine_process=True), given_up=given_up)


def test_an_engine_that_is_started_again_keeps_its_sizes() -> None:
    """And the front door checks requests against what the new one says."""
    asked: list[int | None] = []

    def start(config: EngineConfig, given_up: threading.Event | None = None, *rest: object) -> ProcessClient:
        asked.append(config.kv_cache_memory)
        client = ProcessClient(config, main=stand_in.paced, given_up=given_up)
        client.info = msgspec.structs.replace(client.info, kv_cache_memory=1234, max_model_len=100 * len(asked))
        return client

    with (
        mock.patch("jaxllm.engine.doors.async_llm.start_engine", lambda config, *rest: (start(config), None)),
        mock.patch("jaxllm.engine.doors.async_llm.start_client", start),
    ):
        engine = AsyncLLM(EngineConfig(engine_process=True))
        try:
            assert engine.info.max_model_len == 100
            os.kill(engine._streams.client._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            wait_for(lambda: len(asked) == 2 and not engine.is_dead)
            assert asked == [None, 1234] and engine.info.max_model_len == 200
        finally:
            engine.shutdown()
