"""Before an API route runs: the key, the body's size and type, and its syntax as JSON or as a form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.formparsers import MultiPartParser
from starlette.types import Message, Receive, Scope, Send

from jaxllm.serving.http.api_error import APIError, telling_full
from jaxllm.serving.http.json_body import SMALL_BODY, BodyProcess, check_numbers, may_overflow, parse_json, parse_object
from jaxllm.serving.http.reading import read_body
from jaxllm.serving.http.records import RECORD
from jaxllm.serving.http.request_model import ignored_fields
from jaxllm.serving.http.streaming import ANSWER, Answer
from jaxllm.wording import did_you_mean, shown

TENANT = "jaxllm.tenant"
"""Where a request's scope has the name in which it comes."""

NOTED = "jaxllm.noted"
"""Where a request's scope has what the audit log is told of it."""

YIELDS = "jaxllm.yields"
"""In a request's scope where it makes no busy model give up its place: a line of a batch."""


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
        """The request's call ends when its answer is sent, its client is gone or it has failed."""
        if RECORD in scope:
            scope[RECORD].note_route(self.path)
        silence = scope["app"].state.server.config.sse_keep_alive
        answer = scope[ANSWER] = Answer(send, self.error_event, silence)
        async with answer.held:
            await super().handle(scope, receive, answer.send)

    @staticmethod
    def error_event(body: bytes) -> bytes:
        """How a stream that has begun tells of an error, of which `body` would have been the answer."""
        return b"data: " + body + b"\n\ndata: [DONE]\n\n"

    @staticmethod
    def sent_key(request: Request) -> str:
        return bearer_key(request)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            state = request.app.state.server
            let_in(request, self.sent_key(request))
            if self.body_field is None:
                return await handler(request)
            with state.body_memory.share() as share:
                pieces = await read_body(request, state.config.max_body_size, share)
                ignored_fields.set([] if state.config.unknown_fields == "warn" else None)
                if sum(map(len, pieces)) <= SMALL_BODY:
                    value = _parsed(b"".join(pieces))
                else:
                    value = await state.read_large(self._read_large, state.bodies, pieces)
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


def bearer_key(request: Request) -> str:
    """The key of the Authorization header, empty when there is none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def let_in(request: Request, sent: str) -> None:
    """Note in whose name a request comes, unless the server itself sends it and has said so. Raises APIError 401."""
    note(request, route=request.scope["route"].path)
    if TENANT not in request.scope:
        request.scope[TENANT] = request.app.state.server.keys.check(sent)
    note(request, key=request.scope[TENANT].name)
    if RECORD in request.scope:
        request.scope[RECORD].key_name = request.scope[TENANT].name


def note(request: Request, **learnt: str | None) -> None:
    """Tell the audit log, where there is one, something of a request."""
    request.scope.get(NOTED, {}).update(learnt)


class ListRoute(JSONRoute):
    """As JSONRoute, but for a list of at most SMALL_BODY bytes."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = APIRoute.get_route_handler(self)

        async def handle(request: Request) -> Response:
            let_in(request, self.sent_key(request))
            with request.app.state.server.body_memory.share() as share:
                value = _parsed_list(b"".join(await read_body(request, SMALL_BODY, share)))
            return await handler(ParsedRequest(request.scope, request.receive, value))

        return handle


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


def _parsed(raw: bytes) -> dict[str, Any]:
    value = parse_object(raw)
    if may_overflow(raw):
        check_numbers(value)
    return value


def _parsed_list(raw: bytes) -> list[Any]:
    """Raises APIError 400 where the JSON is malformed, or no list."""
    value = parse_json(raw)
    if not isinstance(value, list):
        raise APIError(400, f"the body is {shown(value)}; it must be a JSON list", code="invalid_json")
    check_numbers(value)
    return value


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
