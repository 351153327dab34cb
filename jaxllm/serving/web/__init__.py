"""Pages that come with the server, without a key as they hold no secret: the chat at /, and Swagger UI at /docs.

Clients of ollama ask for / whether it runs; they get its answer, and browsers, which accept HTML, the chat.

The first is built from the repository's `web/` into static/. Files are kept in memory, compressed, and sent once to a
browser that keeps them."""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.datastructures import Headers

STATIC = Path(__file__).parent / "static"

_POLICY = (
    "default-src 'none'; script-src {scripts}; "
    "style-src 'self' 'unsafe-inline'; "  # antd adds its components' style sheets as they are first shown
    "img-src 'self' data:; font-src {fonts}; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
PAGE_POLICY = _POLICY.format(scripts="'self'", fonts="'self'")
"""Scripts come from files alone, and the page talks to the server that it comes from and to nobody else."""

SWAGGER = Path(__file__).parent / "swagger"
"""Out of the npm package swagger-ui-dist 5.35.0, with its licence."""
SWAGGER_FILES = ("swagger-ui-bundle.js", "swagger-ui.css")
SWAGGER_POLICY = _POLICY.format(scripts="'self' 'unsafe-inline'", fonts="'none'")
"""The page begins with a script of one call."""

HEADERS = {
    "Cache-Control": "no-cache",  # kept, and asked about each time: names stay the same when contents change
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept, Accept-Encoding",
    "X-Content-Type-Options": "nosniff",
}
_TYPES = {".js": "text/javascript", ".woff2": "font/woff2", ".svg": "image/svg+xml"}
"""Types that some systems' tables lack or name otherwise."""
_PACKED = (".woff2",)  # gzip makes them no smaller
RUNNING = "Ollama is running"
"""Some programs of ollama's compare it."""


def make_router() -> APIRouter:
    """One route for each file that was built, so that every other path stays the API's."""
    router = APIRouter(include_in_schema=False)
    for path in sorted(STATIC.rglob("*")):
        if path.is_file():
            name = path.relative_to(STATIC).as_posix()
            add_file(router, "/" if name == "index.html" else f"/{name}", StaticFile(path, PAGE_POLICY))
    return router


def make_plain_router() -> APIRouter:
    """What / is without the page."""
    router = APIRouter(include_in_schema=False)
    router.add_route("/", say_running, methods=["GET", "HEAD"], include_in_schema=False)
    return router


async def say_running(_: Request) -> Response:
    return Response(RUNNING, media_type="text/plain", headers={"Vary": "Accept"})


def make_swagger_router() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    for name in SWAGGER_FILES:
        add_file(router, f"/docs/{name}", StaticFile(SWAGGER / name, SWAGGER_POLICY))
    router.add_route("/docs", show_page, methods=["GET", "HEAD"], include_in_schema=False)
    return router


async def show_page(request: Request) -> Response:
    """The page; its addresses have the prefix of a proxy, and are the same from /docs and from /docs/."""
    prefix = request.scope.get("root_path", "")
    page = get_swagger_ui_html(
        openapi_url=f"{prefix}/openapi.json",
        title="jaxllm",
        swagger_js_url=f"{prefix}/docs/{SWAGGER_FILES[0]}",
        swagger_css_url=f"{prefix}/docs/{SWAGGER_FILES[1]}",
        swagger_favicon_url="data:,",
        swagger_ui_parameters={"validatorUrl": None},  # by default a service on the internet
    )
    page.headers.update({**HEADERS, "Content-Security-Policy": SWAGGER_POLICY})
    return page


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
        """200, or 304 if the client has it already."""
        known = [tag.strip().removeprefix("W/") for tag in headers.get("if-none-match", "").split(",")]
        own = {**HEADERS, "Content-Security-Policy": self.policy, "ETag": self.tag, "Content-Type": self.media_type}
        if self.tag in known or "*" in known:
            return Response(status_code=304, headers=own)
        if self.path.suffix in _PACKED or "gzip" not in headers.get("accept-encoding", ""):
            return Response(self.content, headers=own)
        return Response(self.zipped, headers=own | {"Content-Encoding": "gzip"})


def add_file(router: APIRouter, address: str, file: StaticFile) -> None:
    async def serve(request: Request) -> Response:
        if address == "/" and "text/html" not in request.headers.get("accept", ""):
            return await say_running(request)
        return file.response(request.headers)

    router.add_route(address, serve, methods=["GET", "HEAD"], include_in_schema=False)
