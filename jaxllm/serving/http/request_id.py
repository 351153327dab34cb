"""The id of an HTTP request: its caller's own, or else the answer's."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.errors import error_response
from jaxllm.wording import shown

HEADER = "X-Request-Id"
_ID = re.compile(r"[!-~]([ -~]{0,254}[!-~])?")


class RequestIds:
    """Every response has X-Request-Id: what its request had there, else what its route says, else a new one."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).get(HEADER)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[HEADER] = sent or headers.get(HEADER) or uuid.uuid4().hex
            await send(message)

        app = self._app
        if sent is not None and not _ID.fullmatch(sent):
            message = f"{HEADER} is {shown(sent)}; it must be from 1 to 256 printable ASCII characters"
            app, sent = error_response(APIError(400, message)), None
        await app(scope, receive, send_named)
