"""What streams know of an engine that dies, whoever notices it first."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from jaxllm import SamplingParams
from jaxllm.engine.doors.streams import Stream, Streams
from jaxllm.engine.messages import EngineClient, EngineInfo, EngineRequest, TokenDelta
from jaxllm.errors import EngineDeadError

REQUEST = EngineRequest(request_id="r", prompt_token_ids=[5], sampling_params=SamplingParams(n=1))


class DyingClient:
    """Refuses every request, and says to the reader that it is dead only after `told`."""

    info = EngineInfo(
        model_name="dying", vocab_size=9, max_model_len=9, eos_token_ids=[], num_pages=1, page_size=1, max_num_seqs=1,
        max_num_batched_tokens=1,
    )  # fmt: skip

    def __init__(self) -> None:
        self.told = threading.Event()

    def add(self, request: EngineRequest) -> None:
        raise EngineDeadError("it is gone")

    def abort(self, request_ids: list[str]) -> None:
        pass

    def outputs(self, timeout: float) -> list[TokenDelta]:
        self.told.wait()
        raise EngineDeadError("it is gone")

    def shutdown(self) -> None:
        self.told.set()


def streams_of(client: DyingClient) -> Streams:
    def start(_: threading.Event) -> Any:
        raise AssertionError("nothing is started again here")

    return Streams(cast(EngineClient, client), None, start=start)


def test_who_is_told_of_a_death_finds_the_engine_dead() -> None:
    """A batch that found it alive would try its lines again at once, and blame them for another crash."""
    streams = streams_of(DyingClient())
    try:
        assert not streams.is_dead
        with pytest.raises(EngineDeadError), Stream(streams, [REQUEST]):
            pass
        assert streams.is_dead
    finally:
        streams.shutdown()


def test_an_engine_in_the_place_of_a_dead_one_is_not_taken_for_it() -> None:
    streams = streams_of(first := DyingClient())
    second = DyingClient()

    def add(request: EngineRequest) -> None:
        streams.client = cast(EngineClient, second)
        raise EngineDeadError("it is gone")

    first.add = add  # type: ignore[method-assign]
    try:
        with pytest.raises(EngineDeadError), Stream(streams, [REQUEST]):
            pass
        assert not streams.is_dead
    finally:
        first.told.set()
        streams.shutdown()
