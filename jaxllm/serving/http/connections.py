"""uvicorn's HTTP protocol with bounds on what a client may send before it is asked for a key, and on its time."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

MAX_HEADER_BYTES = 64 * 1024
"""Request line and headers of one request."""
MAX_HEADERS = 128
HEADER_SECONDS = 15.0
"""From the connection, or a request's first byte, until its headers are complete."""
BODY_SILENCE_SECONDS = 30.0
"""How long a body may pause."""
MIN_BODY_RATE = 1024
"""Bytes a second that a body must reach once BODY_SILENCE_SECONDS have passed."""
MAX_CONNECTIONS = 900
"""Most systems let a process have 1024 files open."""
CHECK_SECONDS = 1.0


def _until_close(cycle: RequestResponseCycle) -> Send:
    """How HTTP/1.0 sends an answer of unknown length: it has no chunks, so the end of the connection is its end.

    uvicorn would choose chunks where nobody says a length, and holds an answer without them against its length.
    """
    send = cycle.send
    known_length = False

    async def send_plain(message: Any) -> None:
        nonlocal known_length
        if message["type"] == "http.response.start":
            known_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if known_length else False
        elif not known_length:
            cycle.expected_content_length = len(message.get("body", b"")) + message.get("more_body", False)
        await send(message)

    return send_plain


class BoundedProtocol(HttpToolsProtocol):
    """Closes a connection that is too slow, and answers 431 to headers that are too many or too long.

    A connection is in one of three states: it sends headers, it sends a body, or it waits for an answer. Only in the
    first two it is watched; between requests uvicorn's own timeout_keep_alive holds. A body may go on
    behind its answer.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._header_bytes = 0
        """In the chunks since the request began, while its headers are not complete."""
        self._header_size = 0
        """Of the request line and the headers that are complete: they may all come in one chunk."""
        self._in_headers = True
        self._in_body = False
        self._since = 0.0
        self._body_bytes = 0
        self._last_byte = 0.0
        self._watch: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self._last_byte = self.loop.time()
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(503, f"this server has {MAX_CONNECTIONS} connections open, the most it takes")
        else:
            self._check_time()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._last_byte = self.loop.time()
        in_headers = self._in_headers
        if in_headers and not self._header_bytes:
            self._since = self._last_byte
        super().data_received(data)
        if in_headers and self._in_headers:  # still
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse_long()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers, self._in_body, self._header_size = True, False, 0

    def on_url(self, url: bytes) -> None:
        self._header_size += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_size += len(name) + len(value)
        if self._header_size > MAX_HEADER_BYTES:
            self._refuse_long()
        elif len(self.headers) == MAX_HEADERS:
            self._refuse(431, f"the request has more than {MAX_HEADERS} headers")
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.transport.is_closing():
            return
        self._in_headers, self._in_body = False, True
        self._header_bytes = self._body_bytes = 0
        self._since = self.loop.time()
        super().on_headers_complete()
        if self.cycle is not None and self.parser.get_http_version() == "1.0":
            self.cycle.send = _until_close(self.cycle)  # type: ignore[method-assign, assignment]

    def on_body(self, body: bytes) -> None:
        if self.cycle is not None:
            self._body_bytes += len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.cycle is not None:
            self._in_body, self._in_headers = False, self.cycle.response_complete
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._in_headers = not self._in_body

    def _check_time(self) -> None:
        now = self.loop.time()
        if self.flow.read_paused:
            self._last_byte = now  # it is we who do not read
            self._since += CHECK_SECONDS
        elif self._in_body and self._is_slow(now):
            self.transport.close()
            return
        elif self._in_headers and (self._header_bytes or self.cycle is None) and now - self._since > HEADER_SECONDS:
            self._refuse(408, f"the headers took longer than {HEADER_SECONDS:g} seconds")
            return
        self._watch = self.loop.call_later(CHECK_SECONDS, self._check_time)

    def _is_slow(self, now: float) -> bool:
        seconds = now - self._since
        silent = now - self._last_byte > BODY_SILENCE_SECONDS
        return silent or (seconds > BODY_SILENCE_SECONDS and self._body_bytes < MIN_BODY_RATE * seconds)

    def _refuse_long(self) -> None:
        self._refuse(431, f"the headers are longer than {MAX_HEADER_BYTES} bytes")

    def _refuse(self, status: int, message: str) -> None:
        if not self.transport.is_closing():
            text = message.encode()
            head = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
            self.transport.write(STATUS_LINE[status] + head + b"content-length: %d\r\n\r\n" % len(text) + text)
            self.transport.close()
