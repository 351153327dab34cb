"""Swagger UI at /docs. Its files come with us, so that the page works without a network and asks nobody else."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html

from jaxllm.serving.http.static_file import HEADERS, StaticFile, add_file

STATIC = Path(__file__).parent / "static"
"""Out of the npm package swagger-ui-dist 5.35.0, with its licence."""
FILES = ("swagger-ui-bundle.js", "swagger-ui.css")

POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self' 'unsafe-inline'",  # the page begins with a script of one call
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)


def make_router() -> APIRouter:
    """The page, and the files that it is made of."""
    router = APIRouter(include_in_schema=False)
    for name in FILES:
        add_file(router, f"/docs/{name}", StaticFile(STATIC / name, POLICY))
    router.add_route("/docs", show_page, methods=["GET", "HEAD"], include_in_schema=False)
    return router


async def show_page(request: Request) -> Response:
    """The page; its addresses have the prefix of a proxy, and are the same from /docs and from /docs/."""
    prefix = request.scope.get("root_path", "")
    page = get_swagger_ui_html(
        openapi_url=f"{prefix}/openapi.json",
        title="jaxllm",
        swagger_js_url=f"{prefix}/docs/{FILES[0]}",
        swagger_css_url=f"{prefix}/docs/{FILES[1]}",
        swagger_favicon_url="data:,",
        swagger_ui_parameters={"validatorUrl": None},  # by default a service on the internet
    )
    page.headers.update({**HEADERS, "Content-Security-Policy": POLICY})
    return page
