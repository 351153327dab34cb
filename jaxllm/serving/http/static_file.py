"""Files that come with the server: kept in memory, compressed, and sent once to a browser that keeps them."""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.datastructures import Headers

HEADERS = {
    "Cache-Control": "no-cache",  # kept, and asked about each time: names stay the same when contents change
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept-Encoding",
    "X-Content-Type-Options": "nosniff",
}
_TYPES = {".js": "text/javascript", ".woff2": "font/woff2", ".svg": "image/svg+xml"}
"""Those that some systems' tables lack or name otherwise."""
_PACKED = (".woff2",)
"""What gzip makes no smaller."""


@dataclass(frozen=True)
class StaticFile:
    path: Path
    policy: str
    """Its Content-Security-Policy."""

    @cached_property
    def content(self) -> bytes:
        return self.path.read_bytes()

    @cached_property
    def zipped(self) -> bytes:
        return gzip.compress(self.content, 6, mtime=0)

    @cached_property
    def tag(self) -> str:
        return f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'

    @property
    def media_type(self) -> str:
        kind = _TYPES.get(self.path.suffix) or mimetypes.guess_type(self.path.name)[0] or "application/octet-stream"
        return f"{kind}; charset=utf-8" if kind.startswith("text/") else kind

    def response(self, headers: Headers) -> Response:
        """200, or 304 to who has it already."""
        known = [tag.strip().removeprefix("W/") for tag in headers.get("if-none-match", "").split(",")]
        own = {**HEADERS, "Content-Security-Policy": self.policy, "ETag": self.tag, "Content-Type": self.media_type}
        if self.tag in known or "*" in known:
            return Response(status_code=304, headers=own)
        if self.path.suffix in _PACKED or "gzip" not in headers.get("accept-encoding", ""):
            return Response(self.content, headers=own)
        return Response(self.zipped, headers=own | {"Content-Encoding": "gzip"})


def add_file(router: APIRouter, address: str, file: StaticFile) -> None:
    """A route of its own for the file, so that every other path stays the API's."""

    # async, and reads from the disk once: later requests find the contents in memory
    async def serve(request: Request) -> Response:
        return file.response(request.headers)

    router.add_route(address, serve, methods=["GET", "HEAD"], include_in_schema=False)
