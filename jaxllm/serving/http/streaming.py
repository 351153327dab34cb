"""Server-sent events, and work that ends when its client goes away."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from jaxllm.engine.front.messages import TokenDelta
from jaxllm.serving.generation import Choice, Generation, collect
from jaxllm.serving.http.errors import APIError, to_api_error

logger = logging.getLogger(__name__)

T = TypeVar("T")

KEEP_ALIVE = b": keep-alive\n\n"
_encode = msgspec.json.Encoder().encode


class ClientDisconnected(Exception):
    """The client closed its connection before the response was complete."""


class ChunkWriter(ABC):
    """Turns a generation's events into the chunks of one protocol; by default events without a name, as OpenAI's."""

    done: bytes = b"data: [DONE]\n\n"
    """What ends a stream."""
    keep_alive: bytes = KEEP_ALIVE
    """What fills its silence."""

    def first(self) -> Iterable[msgspec.Struct]:
        """Chunks to send before any token exists."""
        return ()

    @abstractmethod
    def chunks(self, index: int, delta: TokenDelta) -> Iterable[msgspec.Struct]:
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


class EventStream(Response):
    """Streams a generation as server-sent events; silence is filled with comments, errors become an event."""

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        writer: ChunkWriter,
        keep_alive: float,
        headers: Mapping[str, str] | None = None,
    ):
        self._generation = generation
        self._writer = writer
        self._keep_alive = keep_alive
        self.status_code = 200
        self.background = None
        fixed = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", "X-Request-Id": generation.id}
        self.init_headers({**fixed, **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._generation:
                await until_disconnect(receive, self._stream(send))
        except ClientDisconnected:
            logger.debug("client of %s went away", self._generation.id)

    async def _stream(self, send: Send) -> None:
        writer = self._writer
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await _send(send, self._events(writer.first()))
            async for batch in self._generation.batches(self._keep_alive):
                events = b"".join(self._events(writer.chunks(index, delta)) for index, delta in batch)
                if events or not batch:
                    await _send(send, events or writer.keep_alive)
            await _send(send, self._events(writer.last()) + writer.done)
        except Exception as error:
            api_error = to_api_error(error)
            if api_error.status == 500:
                logger.exception("%s failed while streaming", self._generation.id)
            await _send(send, writer.error(api_error) + writer.done)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _events(self, chunks: Iterable[msgspec.Struct]) -> bytes:
        return b"".join(map(self._writer.encode, chunks))


async def collect_for(request: Request, generation: Generation) -> list[Choice]:
    """Every choice of a generation that nobody streams. Raises ClientDisconnected when the client goes away first."""
    async with generation:
        return await until_disconnect(request.receive, collect(generation))


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, cancelling it when the client goes away. Raises ClientDisconnected then."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
