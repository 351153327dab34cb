"""A generation as one API's chunks, streamed or collected."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from fastapi import Request

from jaxllm.serving.call import Call
from jaxllm.serving.generation import Choice, Generation, collect
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.errors import to_api_error
from jaxllm.serving.http.streaming import KEEP_ALIVE, EventStream, until_disconnect

logger = logging.getLogger(__name__)

Gained = TypeVar("Gained")
Gaining = TypeVar("Gaining", contravariant=True)

_encode = msgspec.json.Encoder().encode


class AnswerSource(Protocol[Gained]):
    """Where an answer comes from, as a Generation: an async context, within which it arrives."""

    id: str

    async def __aenter__(self) -> Any: ...

    async def __aexit__(self, *raised: object) -> Any: ...

    def arrivals(self, timeout: float | None = None) -> AsyncIterator[list[tuple[int, Gained]]]:
        """What choices gain, as (index, gain); an empty list after `timeout` seconds of silence."""


class ChunkWriter(ABC, Generic[Gaining]):
    """Turns what choices gain into the chunks of one API; by default events without a name, as OpenAI's."""

    done: bytes = b"data: [DONE]\n\n"
    """What ends a stream."""
    keep_alive: bytes = KEEP_ALIVE
    """What fills its silence."""

    def first(self) -> Iterable[msgspec.Struct]:
        """Chunks to send before any token exists."""
        return ()

    @abstractmethod
    def chunks(self, index: int, delta: Gaining) -> Iterable[msgspec.Struct]:
        """Chunks for what one choice gained; none when there is nothing to show yet."""

    def last(self) -> Iterable[msgspec.Struct]:
        """Chunks to send when every choice has finished."""
        return ()

    def encode(self, chunk: msgspec.Struct) -> bytes:
        """One chunk as a server-sent event."""
        return b"data: " + _encode(chunk) + b"\n\n"

    def error(self, error: APIError) -> bytes:
        """The event that tells of an error in mid-stream."""
        return b"data: " + _encode(error.body) + b"\n\n"


async def chunk_stream(
    call: Call,
    generation: AnswerSource[Gained],
    writer: ChunkWriter[Gained],
    headers: Mapping[str, str] | None = None,
) -> EventStream:
    """An answer as server-sent events, which ends with its call at the latest; errors become an event.

    Raises what the answer's beginning raises.
    """
    await call.enter(generation)
    events = _chunks(generation, writer, call.state.config.sse_keep_alive)
    return EventStream(generation.id, events, headers=headers, keep_alive=writer.keep_alive)


async def collect_for(request: Request, generation: Generation) -> list[Choice]:
    """Every choice of a generation that nobody streams. Raises ClientDisconnected when the client goes away first."""
    async with generation:
        return await until_disconnect(request.receive, collect(generation))


async def _chunks(
    generation: AnswerSource[Gained], writer: ChunkWriter[Gained], silence: float
) -> AsyncIterator[list[bytes]]:
    try:
        first = [writer.encode(chunk) for chunk in writer.first()]
        if first:
            yield first
        async for events in generation.arrivals(silence):
            sent = [writer.encode(chunk) for index, delta in events for chunk in writer.chunks(index, delta)]
            if sent or not events:
                yield sent
        last = [*(writer.encode(chunk) for chunk in writer.last()), writer.done]
    except Exception as error:
        api_error = to_api_error(error)
        if api_error.status == 500:
            logger.exception("%s failed while streaming", generation.id)
        last = [writer.error(api_error), writer.done]
    yield last
