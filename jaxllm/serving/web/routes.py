"""The page at / and its files, built from `web/` into static/; without a key, as they hold no secret."""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.datastructures import Headers

STATIC = Path(__file__).parent / "static"

POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",  # antd adds its components' style sheets as they are first shown
        "img-src 'self' data:",
        "font-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
"""Scripts come from files alone, and the page talks to the server that it comes from and to nobody else."""

_HEADERS = {
    "Cache-Control": "no-cache",  # kept, and asked about each time: names stay the same when contents change
    "Content-Security-Policy": POLICY,
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
class _File:
    path: Path

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
        own = {**_HEADERS, "ETag": self.tag, "Content-Type": self.media_type}
        if self.tag in known or "*" in known:
            return Response(status_code=304, headers=own)
        if self.path.suffix in _PACKED or "gzip" not in headers.get("accept-encoding", ""):
            return Response(self.content, headers=own)
        return Response(self.zipped, headers=own | {"Content-Encoding": "gzip"})


def make_router() -> APIRouter:
    """One route for each file that was built, so that every other path stays the API's."""
    router = APIRouter(include_in_schema=False)
    for path in sorted(STATIC.rglob("*")):
        if path.is_file():
            name = path.relative_to(STATIC).as_posix()
            _add(router, "/" if name == "index.html" else f"/{name}", _File(path))
    return router


def _add(router: APIRouter, address: str, file: _File) -> None:
    # async, and reads from the disk once: later requests find the contents in memory
    async def serve(request: Request) -> Response:
        return file.response(request.headers)

    router.add_route(address, serve, methods=["GET", "HEAD"])
