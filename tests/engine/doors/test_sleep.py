"""An engine gives its devices back while it sleeps, and answers the same when it has been woken up."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from jaxllm import AsyncLLM, SamplingParams
from jaxllm.engine.doors.share import Keeper
from jaxllm.engine.messages import MemoryRoom
from jaxllm.errors import CheckpointError, ConfigError, EngineDeadError, QueueFullError
from tests.reference import load_golden
from tests.reference.tiny import tiny_prompt, write_checkpoint
from tests.support.sizes import FIELDS

pytestmark = pytest.mark.programs

NAME = "llama_gqa"
EIGHT_TOKENS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PATIENCE = 60.0


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_checkpoint(NAME, tmp_path)


@pytest.fixture
def engine(request: pytest.FixtureRequest, directory: Path) -> Iterator[AsyncLLM]:
    """One engine, or as many as a test's parameter says."""
    count = getattr(request, "param", 1)
    engine = AsyncLLM(model=str(directory), engine_process=True, data_parallel_size=count, **FIELDS)
    yield engine
    engine.shutdown()


def say(engine: AsyncLLM) -> list[int]:
    async def run() -> list[int]:
        async with asyncio.timeout(PATIENCE):
            gains = [delta.token_ids async for _, delta in engine.stream(tiny_prompt(NAME), EIGHT_TOKENS)]
        return [token for ids in gains for token in ids]

    return asyncio.run(run())


def processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "own_process import enter" in " ".join(child.cmdline())]


def spoil(directory: Path) -> None:
    """Other weights of the same shapes."""
    file = directory / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-4096:] = bytes(4096)
    file.write_bytes(content)


one_or_two = pytest.mark.parametrize(
    "engine",
    [1, pytest.param(2, marks=pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two engines, two cores"))],
    indirect=True,
)


def say_at_once(engine: AsyncLLM) -> list[list[int]]:
    """As many answers side by side as there may be engines."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(say, [engine] * 2))


@one_or_two
@pytest.mark.parametrize("level", [1, 2])
def test_it_answers_the_same_after_a_sleep(engine: AsyncLLM, directory: Path, level: int) -> None:
    expected = load_golden(NAME).greedy_token_ids[:8]
    assert say(engine) == expected
    before = engine.info
    for _ in range(2):
        engine.sleep(level)
        assert engine.is_asleep and not engine.is_dead and not processes()
        assert (engine.kept_bytes > 0) == (level == 1)
        with pytest.raises(EngineDeadError, match="the engine is asleep"):
            say(engine)
        engine.wake_up()
        assert not engine.is_asleep and engine.kept_bytes == 0 and engine.info == before
        assert say_at_once(engine) == [expected] * 2


@one_or_two
def test_at_level_1_the_files_of_the_weights_are_not_read_again(engine: AsyncLLM, directory: Path) -> None:
    expected = say(engine)
    engine.sleep(1)
    spoil(directory)
    engine.wake_up()
    assert say_at_once(engine) == [expected] * 2
    engine.sleep(2)
    engine.wake_up()
    assert say(engine) != expected


def test_it_asks_for_its_room_again(engine: AsyncLLM) -> None:
    expected = say(engine)
    engine.sleep(1)
    asked: list[int | None] = []

    def refuse(nbytes: int | None) -> None:
        asked.append(nbytes)
        raise QueueFullError("there is no room")

    with pytest.raises(QueueFullError):
        engine.wake_up(room=MemoryRoom(ask=refuse))
    assert asked and engine.is_asleep and engine.kept_bytes > 0 and not processes()
    engine.wake_up(room=MemoryRoom(ask=asked.append))
    assert len(asked) == 2 and say(engine) == expected


@one_or_two
def test_weights_of_another_plan_are_refused_and_then_forgotten(engine: AsyncLLM) -> None:
    expected = say(engine)
    engine.sleep(2)
    with open(engine._keeper.fd, "wb", closefd=False) as file:  # type: ignore[union-attr]
        file.write(b"something else")
    with pytest.raises(CheckpointError, match="the weights that were kept in memory cannot be used"):
        engine.wake_up()
    assert engine.is_asleep and engine.kept_bytes == 0
    engine.wake_up()
    assert say(engine) == expected


def test_a_process_that_dies_on_its_way_is_asleep_without_its_weights(engine: AsyncLLM) -> None:
    expected = say(engine)
    process = engine._streams.client._process  # type: ignore[attr-defined]
    process.kill()
    with pytest.raises(EngineDeadError, match="before its weights were in the host's memory"):
        engine.sleep(1)
    assert engine.is_asleep and engine.kept_bytes == 0
    engine.wake_up()
    assert say(engine) == expected


def test_an_engine_that_is_asleep_can_be_shut_down(engine: AsyncLLM) -> None:
    engine.sleep(1)
    engine.shutdown()
    assert engine.kept_bytes == 0


def test_only_an_engine_with_a_process_can_sleep(directory: Path) -> None:
    engine = AsyncLLM(model=str(directory), **FIELDS)
    try:
        assert not engine.can_sleep
        with pytest.raises(ConfigError, match="in a process of its own"):
            engine.sleep()
    finally:
        engine.shutdown()


def test_a_keeper_is_empty_at_first_and_after_that_when_told() -> None:
    keeper = Keeper()
    assert keeper.nbytes == 0
    with open(keeper.fd, "wb", closefd=False) as file:
        file.write(b"1234")
    assert keeper.nbytes == 4
    keeper.clear()
    assert keeper.nbytes == 0
