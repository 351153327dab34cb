"""Routes whose body is a form with a file, streamed to disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.formparsers import MultiPartParser
from starlette.types import Message, Receive

from jaxllm.serving.http.api_error import APIError, telling_full
from jaxllm.serving.http.body import SMALL_BODY
from jaxllm.serving.http.route import bearer_key, let_in
from jaxllm.wording import did_you_mean, shown

FORM_OVERHEAD = 64 * 1024
"""Bytes that the form may need beside its file."""
MAX_FIELD_SIZE = 16 * 1024
MultiPartParser.spool_max_size = SMALL_BODY  # of each upload that stays in memory; the rest goes to disk at once


class MultipartRoute(APIRoute):
    """A route behind the API key whose body is a multipart form with one file of limited size.

    Raises APIError: 401 wrong or missing key, 413 too large, 415 not a form by its Content-Type, 400 when the form is
    malformed or has a field that the route does not know or has it twice. Raises StorageFullError.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        fields = [field.alias for field in self.dependant.body_params]

        async def handle(request: Request) -> Response:
            state = request.app.state.server
            let_in(request, bearer_key(request))
            limit = state.config.max_file_size
            content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if content_type != "multipart/form-data":
                raise APIError(415, f"Content-Type is {content_type!r}; it must be multipart/form-data")
            declared = request.headers.get("content-length", "")
            if declared.isdecimal() and int(declared) > limit + FORM_OVERHEAD:
                raise too_large(limit)
            limited = Request(request.scope, _limited(request.receive, limit))
            with telling_full():
                async with limited.form(max_files=1, max_fields=16, max_part_size=MAX_FIELD_SIZE) as form:
                    _check_fields(Counter(name for name, _ in form.multi_items()), fields)
                    return await handler(limited)

        return handle


def too_large(limit: int) -> APIError:
    message = f"the file is larger than {limit} bytes, the most this server takes"
    return APIError(413, message, param="file", code="file_too_large", headers={"Connection": "close"})


def _limited(receive: Receive, limit: int) -> Receive:
    size = 0

    async def receive_some() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > limit + FORM_OVERHEAD:
            raise too_large(limit)
        return message

    return receive_some


def _check_fields(sent: Counter[str], known: list[str]) -> None:
    for name, times in sent.items():
        if name not in known:
            raise APIError(400, f"unknown field {shown(name)}{did_you_mean(name, known)}", param=name)
        if times > 1:
            raise APIError(400, f"{name} is given {times} times; give it once", param=name)
