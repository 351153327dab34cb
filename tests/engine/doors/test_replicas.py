"""Several engines of one model behind one front door."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from jaxllm import AsyncLLM, EngineConfig, SamplingParams
from jaxllm.engine.doors.process_client import ProcessClient
from jaxllm.engine.doors.replicas import Replicas
from jaxllm.engine.doors.streams import Stream, Streams
from jaxllm.engine.messages import EngineRequest, EngineStats
from jaxllm.engine.scale.routing import together
from jaxllm.errors import CheckpointError, ConfigError, EngineDeadError
from tests.engine.doors import stand_in
from tests.reference import load_golden
from tests.reference.tiny import tiny_prompt, write_checkpoint
from tests.support.sizes import FIELDS as SIZES

pytestmark = pytest.mark.programs

PATIENCE = 60.0
NAME = "llama_gqa"
FIELDS: dict[str, Any] = SIZES | {"engine_process": True}


def start(number: int, given_up: threading.Event) -> ProcessClient:
    return ProcessClient(EngineConfig(), main=stand_in.paced, given_up=given_up)


@pytest.fixture
def replicas() -> Iterator[Replicas]:
    replicas = Replicas(2, start)
    yield replicas
    replicas.shutdown()


@pytest.fixture
def streams(replicas: Replicas) -> Iterator[Streams]:
    streams = Streams(replicas, None, start=lambda given_up: Replicas(2, start, given_up=given_up), revived=True)
    yield streams
    streams.shutdown()


def endless(name: str, token: int = 5) -> EngineRequest:
    return EngineRequest(
        request_id=name, prompt_token_ids=[token] * 16, sampling_params=SamplingParams(max_tokens=10**6, n=1)
    )


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def test_requests_are_spread_and_their_tokens_come_back(replicas: Replicas, streams: Streams) -> None:
    assert replicas.info.max_num_seqs == 2 * stand_in.info().max_num_seqs
    with Stream(streams, [endless(str(n), n) for n in range(4)]) as stream:
        seen: set[int] = set()
        for gains in stream:
            seen |= {index for index, _ in gains}
            if len(seen) == 4:
                break
        assert [round(load) for load in replicas.loads] == [2, 2]
    wait_for(lambda: replicas.loads == [0, 0])


def test_one_that_dies_takes_its_own_requests_alone_and_comes_back(replicas: Replicas, streams: Streams) -> None:
    with Stream(streams, [endless("a", 1)]) as first, Stream(streams, [endless("b", 2)]) as second:
        next(iter(first))
        next(iter(second))
        pid = replicas._clients[replicas._router.owners[first.names[0]]]._process.pid
        os.kill(pid, signal.SIGKILL)
        lost = [delta for gains in first for _, delta in gains][-1]
        assert lost.finish_reason == "error" and lost.is_dead and "the engine process is gone" in (lost.error or "")
        assert not streams.is_dead
        assert next(iter(second))
        with Stream(streams, [endless("c", 3)]) as third:  # there is one that takes it
            next(iter(third))
        wait_for(lambda: len(replicas._clients) == 2)
        assert not psutil.pid_exists(pid)


def test_where_all_have_died_the_engine_is_dead_until_all_are_back(replicas: Replicas, streams: Streams) -> None:
    with Stream(streams, [endless("a", 1), endless("b", 2)]) as stream:
        events = iter(stream)
        next(events)
        for client in list(replicas._clients.values()):
            os.kill(client._process.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            while True:
                next(events)
    wait_for(lambda: streams.client is not replicas and not streams.is_dead)
    with Stream(streams, [endless("c")]) as stream:
        next(iter(stream))


def test_what_keeps_one_from_starting_keeps_all(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[ProcessClient] = []

    def second_fails(number: int, given_up: threading.Event) -> ProcessClient:
        if number == 1:
            raise CheckpointError("it is cut short")
        started.append(start(number, given_up))
        return started[-1]

    with pytest.raises(CheckpointError, match="it is cut short"):
        Replicas(3, second_fails)
    assert len(started) == 2 and all(client._process.exit_code is not None for client in started)


def test_what_they_say_of_themselves_is_added_up() -> None:
    past = EngineStats(num_steps=100, num_running=9, accepted_by_position=[1])
    one = EngineStats(num_steps=1, num_running=2, num_pages=5, page_size=8, ready=True, scheduled_tokens={"d": 1})
    other = EngineStats(num_steps=2, num_running=3, num_pages=5, page_size=8, ready=True, scheduled_tokens={"d": 2})
    both = together(past, [one, other])
    assert (both.num_steps, both.num_running, both.num_pages, both.page_size) == (103, 5, 10, 8)
    assert both.ready and both.scheduled_tokens == {"d": 3} and both.accepted_by_position == [1]
    assert together(past, [one]).ready and together(past, [one]).num_steps == 101  # whoever is left is ready
    assert not together(past, [one, EngineStats(num_steps=5)]).ready
    assert not together(past, []).ready and together(past, []).num_steps == 100


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two engines need two cores")
def test_two_real_engines_answer_as_one_on_cores_of_their_own(tmp_path: Path) -> None:
    path = write_checkpoint(NAME, tmp_path)
    engine = AsyncLLM(model=str(path), data_parallel_size=2, **FIELDS)
    try:
        children = [
            child for child in psutil.Process().children() if "own_process import enter" in " ".join(child.cmdline())
        ]
        cores = [set(child.cpu_affinity()) for child in children]
        assert len(cores) == 2 and not cores[0] & cores[1]
        expected = load_golden(NAME).greedy_token_ids[:8]
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

        async def ask() -> list[list[int]]:
            async def one() -> list[int]:
                gains = [delta.token_ids async for _, delta in engine.stream(tiny_prompt(NAME), params)]
                return [token for ids in gains for token in ids]

            async with asyncio.timeout(PATIENCE):
                return list(await asyncio.gather(*(one() for _ in range(4))))

        assert asyncio.run(ask()) == [expected] * 4
        assert engine.info.max_num_seqs == 2 * FIELDS["max_num_seqs"]
    finally:
        engine.shutdown()


def test_more_engines_than_cores_are_refused(tmp_path: Path) -> None:
    path = write_checkpoint(NAME, tmp_path)
    with pytest.raises(ConfigError, match="data_parallel_size is 1000"):
        AsyncLLM(model=str(path), data_parallel_size=1000, **FIELDS)


def test_engines_in_threads_cannot_be_several(tmp_path: Path) -> None:
    path = write_checkpoint(NAME, tmp_path)
    with pytest.raises(ConfigError, match="data_parallel_size is 2: each engine has a process of its own"):
        AsyncLLM(model=str(path), data_parallel_size=2, **FIELDS | {"engine_process": None})
