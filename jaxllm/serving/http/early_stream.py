"""A stream that begins before its route has an answer: comments say what it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Message, Send

T = TypeVar("T")

NOTICE_SECONDS = 1.0
"""How long a request waits before its stream begins with a comment: what fails within that has a status of its own."""
LOOK_SECONDS = 0.5
"""How often what it waits for is looked at, for another comment where that has changed."""

_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no")]  # fmt: skip


class EarlyStream:
    """What a route sends through, so that comments may go ahead of its answer.

    Once there was one, the answer's own status and headers come too late: of a stream only the events are sent, and
    another body, which tells of an error, becomes an event by `error_event`.
    """

    def __init__(self, send: Send, error_event: Callable[[bytes], bytes], silence: float):
        """`silence` is how many seconds pass between two comments that say the same."""
        self._send = send
        self._error_event = error_event
        self.silence = silence
        self._begun = False
        self._error: bytearray | None = None

    async def comment(self, text: str) -> None:
        """Send a line that clients leave unread."""
        if not self._begun:
            self._begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        line = " ".join(text.split())
        await self._send({"type": "http.response.body", "body": f": {line}\n\n".encode(), "more_body": True})

    async def send(self, message: Message) -> None:
        """What the route has to say, as it would be sent without comments before it."""
        if not self._begun:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._error = None if message["status"] == 200 else bytearray()
        elif self._error is None:
            await self._send(message)
        else:
            self._error += message.get("body", b"")
            if not message.get("more_body", False):
                event = self._error_event(bytes(self._error))
                await self._send({"type": "http.response.body", "body": event, "more_body": False})


async def telling(stream: EarlyStream, work: Coroutine[Any, Any, T], doing: Callable[[], str]) -> T:
    """Await `work`; what it is `doing` is told in comments, at each change and after each silence."""
    task = asyncio.create_task(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=NOTICE_SECONDS)
        told, silent = "", 0.0
        while not done:
            text = doing()
            if text != told or silent >= stream.silence:
                await stream.comment(text)
                told, silent = text, 0.0
            done, _ = await asyncio.wait({task}, timeout=LOOK_SECONDS)
            silent += LOOK_SECONDS
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
