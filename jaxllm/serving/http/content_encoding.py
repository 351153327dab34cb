"""Request bodies that are compressed: gzip is decoded as it comes, so that limits hold for what a route reads."""

from __future__ import annotations

import asyncio
import zlib

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.serving.http.api_error import APIError
from jaxllm.wording import shown

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


def _refusing(encoding: str) -> Receive:
    async def refuse() -> Message:
        message = f"Content-Encoding is {shown(encoding)}; it must be gzip or left out"
        raise APIError(415, message, code="unsupported_encoding", headers={"Accept-Encoding": "gzip"})

    return refuse


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


def _not_gzip(reason: str) -> APIError:
    message = f"the body is not valid gzip, which Content-Encoding says it is: {reason}"
    return APIError(400, message, code="invalid_encoding", headers={"Connection": "close"})
