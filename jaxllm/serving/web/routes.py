"""The page at / and its files, built from `web/` into static/; without a key, as they hold no secret."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter

from jaxllm.serving.http.static_file import StaticFile, add_file

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


def make_router() -> APIRouter:
    """One route for each file that was built, so that every other path stays the API's."""
    router = APIRouter(include_in_schema=False)
    for path in sorted(STATIC.rglob("*")):
        if path.is_file():
            name = path.relative_to(STATIC).as_posix()
            add_file(router, "/" if name == "index.html" else f"/{name}", StaticFile(path, POLICY))
    return router
