"""A response's events over HTTP."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from typing import Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

from jaxllm.serving.http.streaming import KEEP_ALIVE, ClientDisconnected, until_disconnect

logger = logging.getLogger(__name__)


class ResponseStream(Response):
    """Sends events as they come and a comment for each empty list; `context` is entered before the first byte.

    So a refusal by the engine still gets a status of its own, and a client that goes away ends what it entered.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        response_id: str,
        events: AsyncIterator[list[bytes]],
        context: AbstractAsyncContextManager[Any] | None = None,
    ):
        self._response_id = response_id
        self._events = events
        self._context = context if context is not None else nullcontext()
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", "X-Request-Id": response_id})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._context:
                await until_disconnect(receive, self._stream(send))
        except ClientDisconnected:
            logger.debug("client of %s went away", self._response_id)

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as batches:  # type: ignore[type-var]
            async for events in batches:
                body = b"".join(events) or KEEP_ALIVE
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
