"""The path that a proxy puts before the routes."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxllm.config.values import PREFIX
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.errors import error_response
from jaxllm.wording import shown

HEADER = "X-Forwarded-Prefix"


class ProxyPrefix:
    """Lets routes be reached under the prefix as well as without it, whether the proxy cuts it off or not.

    Pages and /openapi.json name addresses with it. `root_path` is the server's own; without one the header of the
    request says it.
    """

    def __init__(self, app: ASGIApp, *, root_path: str | None):
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            prefix = self._root_path or Headers(scope=scope).get(HEADER, "").rstrip("/")
            if prefix and not PREFIX.fullmatch(prefix):
                message = f"{HEADER} is {shown(prefix)}; it must be a path of letters, digits and -._~, such as /llm"
                app = error_response(APIError(400, message))
            elif prefix and scope["path"] == prefix:  # the page's addresses are relative to /llm/
                app = RedirectResponse(f"{prefix}/", 308)
            elif prefix:
                scope["root_path"] = prefix
        await app(scope, receive, send)
