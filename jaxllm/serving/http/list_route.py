"""A route whose body is a JSON list, as llama.cpp has one."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pydantic_core
from fastapi import Request, Response
from fastapi.routing import APIRoute

from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.body import SMALL_BODY, check_numbers
from jaxllm.serving.http.reading import read_body
from jaxllm.serving.http.route import JSONRoute, ParsedRequest, let_in
from jaxllm.wording import shown


class ListRoute(JSONRoute):
    """As JSONRoute, but for a list of at most SMALL_BODY bytes."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = APIRoute.get_route_handler(self)

        async def handle(request: Request) -> Response:
            let_in(request, self.sent_key(request))
            with request.app.state.server.body_memory.share() as share:
                value = _parsed(b"".join(await read_body(request, SMALL_BODY, share)))
            return await handler(ParsedRequest(request.scope, request.receive, value))

        return handle


def _parsed(raw: bytes) -> list[Any]:
    """Raises APIError 400 where the JSON is malformed, or no list."""
    try:
        value = pydantic_core.from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise APIError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, list):
        raise APIError(400, f"the body is {shown(value)}; it must be a JSON list", code="invalid_json")
    check_numbers(value)
    return value
