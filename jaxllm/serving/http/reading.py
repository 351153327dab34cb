"""Request bodies as they are read: within a limit of each, one of all together, and gzip decoded as it comes."""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.serving.http.api_error import RETRY_AFTER_SECONDS, APIError
from jaxllm.serving.http.json_body import SMALL_BODY
from jaxllm.wording import shown


class Share:
    """What one body takes of the memory for all."""

    def __init__(self, memory: BodyMemory):
        self.memory = memory
        self.pieces: list[bytes] = []
        self.nbytes = 0
        self.given_up = False
        """Its pieces were dropped before the body was complete, for others to have room."""


class BodyMemory:
    """Memory that the bodies of all requests share until they are parsed.

    Beyond `limit` bytes the large body that has not grown for longest is given up: who sends slowly makes room for
    others. Bodies of at most SMALL_BODY bytes always have room.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._nbytes = 0
        self._growing: dict[Share, None] = {}
        """Large bodies that are being read; the last is the one that has grown last."""

    @contextmanager
    def share(self) -> Iterator[Share]:
        """What one body takes; it is given back at the end."""
        share = Share(self)
        try:
            yield share
        finally:
            self._give_back(share)

    def keep(self, share: Share, piece: bytes) -> None:
        """More of a body that is being read."""
        nbytes, before = sys.getsizeof(piece), share.nbytes // SMALL_BODY
        share.pieces.append(piece)
        share.nbytes += nbytes
        self._nbytes += nbytes
        if share.nbytes // SMALL_BODY > before:  # a few bytes now and then are no growth
            self._growing.pop(share, None)
            self._growing[share] = None
        while self._nbytes > self._limit and self._growing:
            slowest = next(iter(self._growing))
            self._give_back(slowest)
            slowest.given_up = True

    def complete(self, share: Share) -> None:
        """The body is there: it is given up no more."""
        self._growing.pop(share, None)

    def _give_back(self, share: Share) -> None:
        self.complete(share)
        self._nbytes -= share.nbytes
        share.nbytes = 0
        share.pieces.clear()


async def read_body(request: Request, limit: int, share: Share) -> list[bytes]:
    """The body, which is JSON, in the pieces that it came in. Raises APIError 415, and what `read_pieces` raises."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise APIError(415, f"Content-Type is {content_type!r}; it must be application/json")
    return await read_pieces(request, limit, share)


async def read_pieces(request: Request, limit: int, share: Share) -> list[bytes]:
    """The body in the pieces that it came in.

    Raises APIError 413 where it has, or says that it has, more bytes, and 503 where others need its share of memory.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        share.memory.keep(share, chunk)
        if share.given_up:
            message = "the server reads too many large bodies at once to keep this one; send it again later"
            headers = {"Connection": "close", "Retry-After": RETRY_AFTER_SECONDS}
            raise APIError(503, message, type="server_error", code="bodies_too_large", headers=headers)
    share.memory.complete(share)
    return share.pieces


GZIP = ("gzip", "x-gzip")
PIECE = 256 * 1024
"""Most decoded bytes that a route gets at once: it counts them, and refuses a body that is too large."""
_WRAPPED = 16 + zlib.MAX_WBITS


class ContentEncoding:
    """Decodes bodies with `Content-Encoding: gzip`; reading one with another encoding raises APIError 415."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            encoding = Headers(scope=scope).get("content-encoding", "").strip().lower()
            if encoding in GZIP:
                receive = Inflated(receive).receive
            elif encoding not in ("", "identity"):
                receive = _refusing(encoding)
        await self._app(scope, receive, send)


class Inflated:
    """A request's body, decoded in pieces of at most `PIECE` bytes; gzip's members may follow one another.

    Decoding runs on a thread, and begins when the route reads: after it has checked the key.
    """

    def __init__(self, receive: Receive):
        self._receive = receive
        self._stream = zlib.decompressobj(_WRAPPED)
        self._compressed = b""
        self._more_comes = True
        self._begun = self._more_inside = self._ended = False

    async def receive(self) -> Message:
        """Raises APIError 400 where the body is no gzip, or ends too early."""
        if self._ended:
            return await self._receive()
        while self._more_comes and not (self._compressed or self._more_inside):
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._compressed, self._more_comes = message.get("body", b""), message.get("more_body", False)
        piece = await asyncio.to_thread(self._decode) if self._compressed or self._more_inside else b""
        self._ended = not (self._more_comes or self._compressed or self._more_inside)
        if self._ended and self._begun and not self._stream.eof:
            raise _not_gzip("it ends too early")
        return {"type": "http.request", "body": piece, "more_body": not self._ended}

    def _decode(self) -> bytes:
        if self._stream.eof:
            self._stream = zlib.decompressobj(_WRAPPED)
        self._begun = True
        try:
            piece = self._stream.decompress(self._compressed, PIECE)
        except zlib.error as error:
            raise _not_gzip(str(error)) from None
        self._compressed = self._stream.unused_data if self._stream.eof else self._stream.unconsumed_tail
        self._more_inside = len(piece) == PIECE and not self._stream.eof
        return piece


def _too_large(limit: int) -> APIError:
    message = f"the body is larger than {limit} bytes"
    return APIError(413, message, code="body_too_large", headers={"Connection": "close"})


def _refusing(encoding: str) -> Receive:
    async def refuse() -> Message:
        message = f"Content-Encoding is {shown(encoding)}; it must be gzip or left out"
        raise APIError(415, message, code="unsupported_encoding", headers={"Accept-Encoding": "gzip"})

    return refuse


def _not_gzip(reason: str) -> APIError:
    message = f"the body is not valid gzip, which Content-Encoding says it is: {reason}"
    return APIError(400, message, code="invalid_encoding", headers={"Connection": "close"})
