"""Server-sent events, comments ahead of them, and work that ends when its client goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.types import Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode

KEEP_ALIVE = b": keep-alive\n\n"
NOTICE_SECONDS = 1.0
"""How long a request waits before its stream begins with a comment: what fails within that has a status of its own."""
LOOK_SECONDS = 0.5
"""How often what it waits for is looked at, for another comment where that has changed."""


def server_sent(event: msgspec.Struct) -> bytes:
    """b'event: response.created\\ndata: {"type":"response.created",…}\\n\\n': an event that is named as its tag."""
    return b"event: " + str(event.__struct_config__.tag).encode() + b"\ndata: " + _encode(event) + b"\n\n"


class ClientDisconnected(Exception):
    """The client closed its connection before the response was complete."""


class EventStream(Response):
    """Sends events as they come, and `keep_alive` for each empty list."""

    media_type = "text/event-stream"

    def __init__(
        self,
        request_id: str,
        events: AsyncIterator[list[bytes]],
        *,
        headers: Mapping[str, str] | None = None,
        keep_alive: bytes = KEEP_ALIVE,
    ):
        self._request_id = request_id
        self._events = events
        self._keep_alive = keep_alive
        self.status_code = 200
        self.background = None
        fixed = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", "X-Request-Id": request_id}
        self.init_headers({**fixed, **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
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


_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no")]  # fmt: skip


ANSWER = "jaxllm.answer"
"""The place of a request's answer in its scope."""


class Answer:
    """A route's answer as it is sent: comments may go ahead of it.

    After a comment the answer's own status and headers come too late: of a stream only the events are sent, and
    another body, which tells of an error, becomes an event by `error_event`.

    Attributes:
        headers: more of them, added when the answer begins.
        held: ends after the answer's last byte.
        has_call: whether the request has opened its call of a model.
    """

    def __init__(self, send: Send, error_event: Callable[[bytes], bytes], silence: float):
        """`silence` is how many seconds pass between two comments that say the same."""
        self._send = send
        self._error_event = error_event
        self.silence = silence
        self.headers: dict[str, str] = {}
        self.held = AsyncExitStack()
        self.has_call = False
        self._begun = False
        self._error: bytearray | None = None

    @staticmethod
    def of(request: Request) -> Answer:
        answer: Answer = request.scope[ANSWER]
        return answer

    async def comment(self, text: str) -> None:
        """Send a line that clients leave unread."""
        if not self._begun:
            self._begun = True
            await self._start({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        line = " ".join(text.split())
        await self._send({"type": "http.response.body", "body": f": {line}\n\n".encode(), "more_body": True})

    async def send(self, message: Message) -> None:
        """What the route has to say, as it would be sent without comments before it."""
        is_start = message["type"] == "http.response.start"
        if is_start and not self._begun:
            await self._start(message)
        elif is_start:
            self._error = None if message["status"] == 200 else bytearray()
        elif self._error is None:
            await self._send(message)
        else:
            self._error += message.get("body", b"")
            if not message.get("more_body", False):
                event = self._error_event(bytes(self._error))
                await self._send({"type": "http.response.body", "body": event, "more_body": False})

    async def _start(self, message: Message) -> None:
        more = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self.headers.items()]
        await self._send({**message, "headers": [*message.get("headers", ()), *more]})


async def telling(answer: Answer, work: Coroutine[Any, Any, T], doing: Callable[[], str]) -> T:
    """Await `work`; what it is `doing` is told in comments, at each change and after each silence."""
    task = asyncio.create_task(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=NOTICE_SECONDS)
        told, silent = "", 0.0
        while not done:
            text = doing()
            if text != told or silent >= answer.silence:
                await answer.comment(text)
                told, silent = text, 0.0
            done, _ = await asyncio.wait({task}, timeout=LOOK_SECONDS)
            silent += LOOK_SECONDS
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
