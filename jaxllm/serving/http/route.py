"""What happens to an API request before its route: the key, the body's size, type and JSON syntax."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.body import SMALL_BODY, check_numbers, may_overflow, parse_object
from jaxllm.serving.http.body_process import BodyProcess
from jaxllm.serving.http.request_model import ignored_fields

Held = TypeVar("Held")

_HOLDS = "jaxllm.holds"


class ParsedRequest(Request):
    """A request whose body has been read and parsed; one that has been validated too is an instance of its model."""

    def __init__(self, scope: Scope, receive: Receive, value: Any):
        super().__init__(scope, receive)
        self._value = value

    async def body(self) -> bytes:
        return b"{}"  # it is not empty: that is all that anybody asks

    async def json(self) -> Any:
        return self._value


class JSONRoute(APIRoute):
    """A route behind the API key whose body is one JSON object of limited size.

    Raises APIError: 401 wrong or missing key, 413 too large, 415 not JSON by its Content-Type (so that no page in a
    browser can post here without the CORS check), 400 with line and column when the JSON is malformed.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What the request took by `hold` is released when its answer is sent, its client is gone or it has failed."""
        with ExitStack() as held:
            scope[_HOLDS] = held
            await super().handle(scope, receive, send)

    @staticmethod
    def sent_key(request: Request) -> str:
        return bearer_key(request)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            state = request.app.state.server
            check_key(self.sent_key(request), state.api_keys)
            if self.body_field is None:
                return await handler(request)
            pieces = await read_body(request, state.config.max_body_size)
            ignored_fields.set([] if state.config.unknown_fields == "warn" else None)
            if sum(map(len, pieces)) <= SMALL_BODY:
                value = _parsed(b"".join(pieces))
            else:
                value = await state.read_large(self._read_large, state.bodies, pieces)
            del pieces
            return await handler(ParsedRequest(request.scope, request.receive, value))

        return handle

    def _read_large(self, bodies: BodyProcess, pieces: list[bytes]) -> Any:
        """The validated body: what takes long is not left to the event loop."""
        assert self.body_field is not None
        value = bodies.read(pieces)
        validated, errors = self.body_field.validate(value, loc=("body",))
        if errors:
            raise RequestValidationError(errors, body=value)
        return validated


def hold(request: Request, resource: AbstractContextManager[Held]) -> Held:
    """Enter a context that ends after the last byte of the request's answer."""
    held: ExitStack = request.scope[_HOLDS]
    return held.enter_context(resource)


def _parsed(raw: bytes) -> dict[str, Any]:
    value = parse_object(raw)
    if may_overflow(raw):
        check_numbers(value)
    return value


def bearer_key(request: Request) -> str:
    """The key of the Authorization header, empty when there is none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def check_key(sent: str, api_keys: list[bytes]) -> None:
    if not api_keys:
        return
    matches = [secrets.compare_digest(sent.encode(), known) for known in api_keys]
    if not any(matches):
        problem = "the API key is wrong" if sent else "no API key; send it as 'Authorization: Bearer KEY'"
        headers = {"WWW-Authenticate": "Bearer"}
        raise APIError(401, problem, type="authentication_error", code="invalid_api_key", headers=headers)


async def read_body(request: Request, limit: int) -> list[bytes]:
    """The body in the pieces that it came in."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise APIError(415, f"Content-Type is {content_type!r}; it must be application/json")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    pieces, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        pieces.append(chunk)
    return pieces


def _too_large(limit: int) -> APIError:
    message = f"the body is larger than {limit} bytes"
    return APIError(413, message, code="body_too_large", headers={"Connection": "close"})
