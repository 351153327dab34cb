"""Requests that mean a route in another spelling: HEAD for GET, and a path that ends with a slash."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class SameRoute:
    """Answers HEAD as GET, without the body, and a path with a slash at its end as the path without it."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": _without_slash(scope)}
            if scope["method"] == "HEAD":
                scope["method"] = "GET"
                send = _headers_only(send)
        await self._app(scope, receive, send)


def _without_slash(scope: Scope) -> str:
    """Worked example: /llm/v1/models/ becomes /llm/v1/models; /llm/, the page under a proxy's prefix, stays."""
    path: str = scope["path"]
    return path.rstrip("/") if path.removeprefix(scope.get("root_path", "")).strip("/") else path


def _headers_only(send: Send) -> Send:
    """The answer ends with its headers: whoever streams more is told that the client is gone."""
    ended = False

    async def send_headers(message: Message) -> None:
        nonlocal ended
        if message["type"] == "http.response.start":
            await send(message)
        if not ended:
            ended = True
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return send_headers
