"""Server-sent events, and work that ends when its client goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

logger = logging.getLogger(__name__)

T = TypeVar("T")

KEEP_ALIVE = b": keep-alive\n\n"


class ClientDisconnected(Exception):
    """The client closed its connection before the response was complete."""


class EventStream(Response):
    """Sends events as they come, and `keep_alive` for each empty list; `context` is entered before the first byte.

    So a refusal by the engine still gets a status of its own, and a client that goes away ends what it entered.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        request_id: str,
        events: AsyncIterator[list[bytes]],
        context: AbstractAsyncContextManager[Any] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        keep_alive: bytes = KEEP_ALIVE,
    ):
        self._request_id = request_id
        self._events = events
        self._context = context if context is not None else nullcontext()
        self._keep_alive = keep_alive
        self.status_code = 200
        self.background = None
        fixed = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", "X-Request-Id": request_id}
        self.init_headers({**fixed, **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._context:
                await until_disconnect(receive, self._stream(send))
        except ClientDisconnected:
            logger.debug("client of %s went away", self._request_id)

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as lists:  # type: ignore[type-var]
            async for events in lists:
                body = b"".join(events) or self._keep_alive
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


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
