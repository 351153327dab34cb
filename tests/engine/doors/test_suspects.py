"""A request that an engine has died of twice is not run a third time."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from jaxllm import EngineConfig, SamplingParams
from jaxllm.engine.doors import deaths as suspects_module
from jaxllm.engine.doors.deaths import Suspects
from jaxllm.engine.doors.process_client import ProcessClient
from jaxllm.engine.doors.streams import Stream, Streams
from jaxllm.engine.messages import EngineRequest
from jaxllm.errors import EngineDeadError, InvalidRequestError
from tests.engine.doors import stand_in

PATIENCE = 60.0


def request(*prompt: int, name: str = "r", tokens: int = 10**6) -> EngineRequest:
    return EngineRequest(
        request_id=name, prompt_token_ids=list(prompt), sampling_params=SamplingParams(max_tokens=tokens, n=1)
    )


def test_what_saw_two_deaths_is_refused_whatever_it_is_called() -> None:
    suspects = Suspects()
    for name in ("first", "second"):
        suspects.check(request(1, 2, name=name))
        suspects.note([request(1, 2, name=name), request(1, 2, name=name)])  # two choices of it are as one
    with pytest.raises(InvalidRequestError, match="the engine died 2 times while it ran this request"):
        suspects.check(request(1, 2, name="third"))
    suspects.check(request(1, 3))
    suspects.check(request(1, 2, tokens=5))  # it asks for something else


def test_what_has_ended_well_is_forgotten() -> None:
    suspects = Suspects()
    suspects.note([request(1)])
    suspects.clear(request(1))
    suspects.note([request(1)])
    suspects.check(request(1))


def test_no_more_is_remembered_than_a_server_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects_module, "MOST_REMEMBERED", 3)
    suspects = Suspects()
    for _ in range(2):
        suspects.note([request(0)])
    suspects.note(request(token) for token in range(1, 4))
    suspects.check(request(0))  # it was noted before the others


@pytest.fixture
def streams() -> Iterator[Streams]:
    def start(given_up: threading.Event) -> ProcessClient:
        return ProcessClient(EngineConfig(), main=stand_in.paced, given_up=given_up)

    streams = Streams(start(threading.Event()), None, start=start, revived=True)
    yield streams
    streams.shutdown()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def test_only_those_that_had_begun_are_blamed(streams: Streams) -> None:
    """The stand-in has room for two: the third waits."""
    for _ in range(2):
        client = streams.client
        with (
            Stream(streams, [request(stand_in.WAITS, name="waiting")]) as waiting,
            Stream(streams, [request(7)]) as bad,
        ):
            next(iter(bad))
            os.kill(client._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            for stream in (waiting, bad):
                with pytest.raises(EngineDeadError):
                    for _ in stream:
                        pass
        wait_for(lambda old=client: streams.client is not old and not streams.is_dead)  # type: ignore[misc]
    with pytest.raises(InvalidRequestError, match="not run again"), Stream(streams, [request(7)]):
        pass
    with Stream(streams, [request(stand_in.WAITS, name="waiting")]), Stream(streams, [request(8, tokens=2)]) as good:
        assert [gain for gains in good for gain in gains]
