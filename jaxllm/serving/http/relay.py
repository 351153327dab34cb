"""A request that one process has received and an application in another answers: what travels between the two."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastapi import Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.serving.http.json_body import Share, read_pieces

_CARRIED = (
    "type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers",
    "client", "server",
)  # fmt: skip
"""The part of an ASGI scope that describes the request; the rest belongs to the process that has received it."""


@dataclass(frozen=True)
class RelayedRequest:
    """A request with its whole body, which can be pickled."""

    scope: dict[str, Any]
    body: bytes

    @classmethod
    async def read(cls, request: Request, limit: int, share: Share) -> RelayedRequest:
        """Raises as `read_pieces`."""
        pieces = await read_pieces(request, limit, share)
        return cls({name: request.scope[name] for name in _CARRIED if name in request.scope}, b"".join(pieces))


async def answer(app: ASGIApp, request: RelayedRequest) -> AsyncGenerator[list[Message], None]:
    """Run the application on a request: the messages of its answer as they come, in lists of all that are there.

    Closing the generator, or cancelling it, tells the application that the client is gone, and waits for it to end.
    Raises what the application raises.
    """
    sent: list[Message] = []
    changed, gone = asyncio.Event(), asyncio.Event()
    bodies = iter([request.body])

    async def receive() -> Message:
        if (body := next(bodies, None)) is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)
        changed.set()

    running = asyncio.ensure_future(app(dict(request.scope), receive, send))
    running.add_done_callback(lambda _: changed.set())
    try:
        while sent or not running.done():
            await changed.wait()
            changed.clear()
            messages, sent[:] = list(sent), []
            if messages:
                yield messages
        running.result()
    finally:
        gone.set()
        await asyncio.wait([running])


class WholeAnswer(NamedTuple):
    """A complete answer, which can be pickled."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes

    @classmethod
    async def to(cls, app: ASGIApp, request: RelayedRequest) -> WholeAnswer:
        """Run the application on a request, to the end."""
        messages = [message async for some in answer(app, request) for message in some]
        body = b"".join(message.get("body", b"") for message in messages[1:])
        return cls(messages[0]["status"], list(messages[0].get("headers", ())), body)

    def response(self) -> Response:
        shown = Response(self.body, self.status)
        shown.raw_headers = self.headers
        return shown


class RelayedAnswer(Response):
    """Sends on the messages of an answer that comes from elsewhere; `first` begins with the answer's start.

    An exception for which `lost` gives an event ends a stream of events with that. Other bodies are cut off by the
    exception, so that no client takes them for complete.
    """

    background = None

    def __init__(
        self, first: list[Message], others: AsyncIterator[list[Message]], lost: Callable[[Exception], bytes | None]
    ):
        self._first = first
        self._others = others
        self._lost = lost
        self.status_code = first[0]["status"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for message in self._first:
            await send(message)
        try:
            async for messages in self._others:
                for message in messages:
                    await send(message)
        except Exception as error:
            kind = dict(self._first[0].get("headers", ())).get(b"content-type", b"")
            event = self._lost(error) if kind.startswith(b"text/event-stream") else None
            if event is None:
                raise
            await send({"type": "http.response.body", "body": event, "more_body": False})
