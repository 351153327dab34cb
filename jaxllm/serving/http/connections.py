"""uvicorn's HTTP protocol with bounds on what a client may send before it is asked for a key, and on its time."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import threading
from collections import deque
from heapq import nsmallest
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

MAX_HEADER_BYTES = 64 * 1024  # of the request line and the headers of one request
MAX_HEADERS = 128
HEADER_SECONDS = 15.0  # from the connection, or a request's first byte, until its headers are complete
BODY_SILENCE_SECONDS = 30.0  # the longest pause of a body
MIN_BODY_RATE = 1024  # bytes a second that a body must reach once BODY_SILENCE_SECONDS have passed
SEND_SECONDS = 60.0  # the longest that a client may take nothing of its answer
MAX_CONNECTIONS = 900  # most systems let a process have 1024 files open
GRACE_SECONDS = 5.0  # the additional silence, before it makes room, of a client that has asked for something already
MAX_PIPELINED = 100  # requests that a client may send before the first of them is answered
CHECK_SECONDS = 1.0
PROBE_SECONDS = 0.1  # from a client's last byte until it is looked whether it is gone altogether; then CHECK_SECONDS

_RESET = struct.pack("ii", 1, 0)


def _until_close(cycle: RequestResponseCycle) -> Send:
    """Send an answer of unknown length in HTTP/1.0: it has no chunks, so the end of the connection is its end.

    uvicorn would choose chunks for an unknown length, and holds an answer without them against its length.
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


def _closing_unless_read(cycle: RequestResponseCycle) -> Send:
    """Close after refusing a client that waits for `100 Continue`: its body may still come, or not (RFC 9110)."""
    send = cycle.send

    async def send_closing(message: Any) -> None:
        if cycle.waiting_for_100_continue and cycle.more_body:
            cycle.keep_alive = False
        await send(message)

    return send_closing


class _Parser:
    """httptools' parser, but a request that asks for another protocol is read as one that does not.

    llhttp takes what follows the headers of such a request for the other protocol, though it is the body where a
    server goes on in HTTP/1.1, as any may (RFC 9110 section 7.8). So it is given the headers again, without Upgrade.
    """

    def __init__(self, protocol: BoundedProtocol):
        self._protocol = protocol
        self._parser = self._new()

    def feed_data(self, data: bytes) -> None:
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stopped:
                data = self._protocol.head_without_upgrade() + data[stopped.args[0] :]
                self._parser = self._new()
            if self._protocol.transport.is_closing():
                return

    def _new(self) -> Any:
        parser = httptools.HttpRequestParser(self._protocol)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        return parser

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)


class _Counted:
    def __init__(self, transport: asyncio.Transport):
        self._transport = transport
        self.written = 0

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BoundedProtocol(HttpToolsProtocol):
    """Closes a connection that is too slow, and answers 431 to headers that are too many or too long.

    A connection sends headers, sends a body, or waits for an answer. It is watched in the first two, and whenever it
    takes nothing of what it is sent; between requests uvicorn's own timeout_keep_alive holds. A body may go on after
    its answer. Where there are too many connections, the one whose client has done nothing for longest makes room.
    """

    transport: Any  # a _Counted

    def __init__(self, *args: Any, send_timeout: float = SEND_SECONDS, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.parser: Any = _Parser(self)
        self._send_timeout = send_timeout
        self._unanswered: deque[RequestResponseCycle] = deque()
        """The requests whose answers are not complete; the first is the one that runs."""
        self._header_bytes = 0
        """In the successive chunks that have brought neither complete headers nor a part of a body."""
        self._header_size = 0
        """The size of the request line and the complete headers: they may all come in one chunk."""
        self._in_headers = True
        self._in_body = False
        self._since = 0.0
        self._body_bytes = 0
        self._last_byte = 0.0  # when the client last sent one, or had its answer
        self._is_half_closed = False
        self._sent = 0  # bytes that have left this process
        self._last_sent = 0.0  # when there were more of them, or none were left to send
        self._watch: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Counted(transport))  # type: ignore[arg-type]
        self._since = self._last_byte = self._last_sent = self.loop.time()
        self._check_time()
        if len(self.connections) > MAX_CONNECTIONS:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        for cycle in self._unanswered:  # uvicorn tells the last one alone
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection of a client that sends no more before its answer has begun: it may wait, or be gone.

        One that is gone resets the connection when it is sent something, here an interim response (RFC 9110 section
        15.2), which HTTP/1.0 does not have. TLS has no half of a connection.
        """
        is_plain = self.transport.get_extra_info("ssl_object") is None
        if self._in_body or not self._unanswered or not is_plain or self.parser.get_http_version() != "1.1":
            return False
        if self._unanswered[0].response_started:
            return False
        self._is_half_closed, self._unanswered[-1].keep_alive = True, False
        self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.loop.call_later(PROBE_SECONDS, self._drop_if_reset)
        return True

    def _drop_if_reset(self) -> None:
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._last_byte = self.loop.time()
        in_headers, body_bytes = self._in_headers, self._body_bytes
        if in_headers and not self._header_bytes:
            self._since = self._last_byte
        super().data_received(data)
        if (in_headers and self._in_headers) or (self._in_body and self._body_bytes == body_bytes):  # still
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse_long()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def head_without_upgrade(self) -> bytes:
        """The request line and the headers of the request that asks for another protocol."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            self._refuse(501, "this server is no proxy")
        lines = [b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        return b"%s %s HTTP/%s\r\n%s\r\n" % (method, self.url, version, b"".join(lines))

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
        elif not self._in_headers:
            pass  # a trailer, which is not to be taken for a header (RFC 9110 section 6.5.1)
        elif len(self.headers) == MAX_HEADERS:
            self._refuse(431, f"the request has more than {MAX_HEADERS} headers")
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.transport.is_closing() or self.parser.should_upgrade():
            return
        if len(self._unanswered) == MAX_PIPELINED:
            self.transport.abort()
            return
        self._in_headers, self._in_body = False, True
        self._header_bytes = self._body_bytes = 0
        self._since = self.loop.time()
        is_old = self.parser.get_http_version() == "1.0"
        self.expect_100_continue &= not is_old
        super().on_headers_complete()
        self._unanswered.append(self.cycle)
        if is_old:
            self.cycle.send = _until_close(self.cycle)  # type: ignore[method-assign, assignment]
        elif self.expect_100_continue:
            self.cycle.send = _closing_unless_read(self.cycle)  # type: ignore[method-assign, assignment]

    def on_body(self, body: bytes) -> None:
        if self._in_body:
            self._body_bytes += len(body)
            self._header_bytes = 0
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._in_body:
            self._in_body, self._in_headers = False, self.cycle.response_complete
            self._header_bytes = 0
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        self._last_byte = self.loop.time()
        super().on_response_complete()
        self._in_headers = not self._in_body

    def _check_time(self) -> None:
        now = self.loop.time()
        if self._is_half_closed:
            self._drop_if_reset()
        if self._has_unread and now - self._last_sent > self._send_timeout:
            self._drop()
            return
        if self.flow.read_paused:
            self._last_byte = now  # it is we who do not read
            self._since += CHECK_SECONDS
        elif self._in_body and self._is_slow(now):
            self.transport.close()
        elif self._in_headers and (self._header_bytes or self.cycle is None) and now - self._since > HEADER_SECONDS:
            self._refuse(408, f"the headers took longer than {HEADER_SECONDS:g} seconds")
        self._watch = self.loop.call_later(CHECK_SECONDS, self._check_time)

    def _is_slow(self, now: float) -> bool:
        seconds = now - self._since
        silent = now - self._last_byte > BODY_SILENCE_SECONDS
        return silent or (seconds > BODY_SILENCE_SECONDS and self._body_bytes < MIN_BODY_RATE * seconds)

    def _make_room(self) -> None:
        """Close a few that wait for their clients longest, or this one where all others wait for an answer."""
        others: set[Any] = self.connections - {self}
        waiting = {other: since for other in others if (since := other._waits_since) is not None}
        if not waiting:
            self._refuse(503, f"this server has {MAX_CONNECTIONS} connections open, the most it takes")
        for other in nsmallest(max(1, len(waiting) // 32), waiting, key=waiting.__getitem__):
            self.connections.discard(other)
            other._drop()

    def _drop(self) -> None:
        """Close the connection. What its client does not read, which the system would keep for minutes, is lost."""
        if self.transport.get_write_buffer_size():
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    @property
    def _has_unread(self) -> bool:
        """True while the client does not take all that it is sent; notes when it last took something."""
        unsent = self.transport.get_write_buffer_size()
        sent = self.transport.written - unsent
        if sent > self._sent or not unsent:
            self._sent, self._last_sent = sent, self.loop.time()
        return bool(unsent)

    @property
    def _waits_since(self) -> float | None:
        if self._has_unread:
            return self._last_sent
        if len(self._unanswered) > self._in_body:
            return None
        return self._last_byte + (0 if self.cycle is None else GRACE_SECONDS)

    def _refuse_long(self) -> None:
        self._refuse(431, f"the headers are longer than {MAX_HEADER_BYTES} bytes")

    def _refuse(self, status: int, message: str) -> None:
        if self._unanswered:
            self.transport.abort()
        elif not self.transport.is_closing():
            text = message.encode()
            head = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
            self.transport.write(STATUS_LINE[status] + head + b"content-length: %d\r\n\r\n" % len(text) + text)
            self.transport.close()


def serve_on_thread(
    app: ASGIApp, listener: socket.socket, name: str, tls: ssl.SSLContext | None = None
) -> tuple[uvicorn.Server, threading.Thread]:
    """Serve a small application on an event loop of its own, until the server's `should_exit` is set."""
    settings = uvicorn.Config(
        app, http=BoundedProtocol, ws="none", lifespan="off", log_config=None, access_log=False,
        server_header=False, timeout_graceful_shutdown=1,
    )  # fmt: skip
    settings.load()
    settings.ssl = tls
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, args=([listener],), name=name, daemon=True)
    thread.start()
    return server, thread
