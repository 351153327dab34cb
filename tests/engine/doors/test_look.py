"""An engine's process is looked at over its pipe, whatever its loop does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.doors.process_client import ProcessClient
from jaxllm.engine.doors.streams import Streams
from jaxllm.engine.messages import EngineRequest
from jaxllm.errors import EngineDeadError, InvalidRequestError
from tests.engine.doors import stand_in
from tests.looking.decode import decode
from tests.serving.conftest import wait_for


@contextmanager
def running(main: Callable[..., None]) -> Iterator[ProcessClient]:
    """An engine's process whose outputs somebody reads."""
    client = ProcessClient(EngineConfig(), main=main)
    streams = Streams(client, None, start=lambda *_: pytest.fail("started again"))
    try:
        yield client
    finally:
        streams.shutdown()


def test_stacks_and_profiles_come_from_the_process() -> None:
    with running(stand_in.paced) as client:
        [look] = client.processes.values()
        assert b"in run_loop" in look("stacks", 0)
        found = decode(look("profile", 0.2))
        assert found.total("run_loop", "wall/nanoseconds") > 0 and found.seconds >= 0.2


def test_they_come_while_a_step_runs() -> None:
    with running(stand_in.slow) as client:
        client.add(EngineRequest(request_id="a", prompt_token_ids=[1]))
        wait_for(lambda: b"in turn" in client.look("stacks", 0))


def test_what_the_process_cannot_tell_is_said() -> None:
    with running(stand_in.paced) as client, pytest.raises(InvalidRequestError, match="does not use JAX"):
        client.look("device_heap", 0)


def test_an_end_of_the_process_ends_the_wait() -> None:
    with running(stand_in.paced) as client:
        raised: list[BaseException] = []

        def wait() -> None:
            try:
                client.look("profile", 300)
            except EngineDeadError as error:
                raised.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        wait_for(lambda: bool(client._asked))
        client._process.kill()
        waiting.join(60)
        assert not waiting.is_alive() and "engine process" in str(raised[0])
        with pytest.raises(EngineDeadError):
            client.look("stacks", 0)
