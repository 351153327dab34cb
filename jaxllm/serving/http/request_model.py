"""Before an API route runs: the key, the body's size and type, its syntax; and what all bodies share."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidatorFunctionWrapHandler,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from starlette.formparsers import MultiPartParser
from starlette.types import Message, Receive, Scope, Send

from jaxllm.errors import InvalidRequestError
from jaxllm.serving.http.answers import ignored_fields
from jaxllm.serving.http.api_error import APIError, telling_full
from jaxllm.serving.http.json_body import (
    SMALL_BODY,
    BodyProcess,
    Integers,
    check_numbers,
    may_overflow,
    parse_json,
    parse_object,
    read_body,
)
from jaxllm.serving.http.streaming import ANSWER, Answer
from jaxllm.wording import did_you_mean, shown

MAX_WARNINGS = 32
MAX_NAME_LENGTH = 64
"""The longest field for which a similar name is looked up."""

MAX_LABEL_LENGTH = 256
Label = Field(default=None, max_length=MAX_LABEL_LENGTH, pattern=r"^[!-~]([ -~]*[!-~])?$")
"""A name of the caller's own, of printable ASCII: what a header may hold."""

SAID_BY_PRESENCE = {"web_search_options"}
"""Fields of which an empty object asks for something."""

_BODIES: list[type[RequestModel]] = []
"""The models that have a path."""
FOREVER = sys.float_info.max
"""As long as there is room for it. Infinity is no number of a request's."""
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART = r"(\d+(?:\.\d*)?|\.\d+)(h|ms|m|s|us|µs|ns)"
_DURATION = re.compile(rf"([+-]?)((?:{_PART})+|0)", re.ASCII)
_MAX_LENGTH = 64


def refuse(message: str, param: str | None = None) -> PydanticCustomError:
    """An error for a validator to raise, its message shown as it is; a model's validator names the field in `param`."""
    return PydanticCustomError("refused", "{message}", {"message": message, "param": param})


@contextmanager
def refusing(field: str | None = None) -> Iterator[None]:
    """For validators: what is said about the request inside becomes an error of the body, by default of this field."""
    try:
        yield
    except InvalidRequestError as error:
        raise refuse(str(error), field) from None


def are_integers(values: list[Any]) -> bool:
    return isinstance(values, Integers) or all(type(value) is int for value in values)


def _fail_fast(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("fail_fast"):
            return  # it is part of several models
        for part in schema.values():
            _fail_fast(part)
        if schema.get("type") == "list":
            schema["fail_fast"] = True
            if schema.get("items_schema") == {"type": "int"} and not schema.keys() & {"min_length", "max_length"}:
                unchecked = core_schema.list_schema(**{name: part for name, part in schema.items() if name != "type"})
                schema.clear()
                schema.update(core_schema.no_info_wrap_validator_function(_unless_known, unchecked))
    elif isinstance(schema, list | tuple):
        for part in schema:
            _fail_fast(part)


def _unless_known(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    return value if isinstance(value, Integers) else validate(value)


class RequestModel(BaseModel):
    """A JSON object of which every field is honoured or refused: unknown names, wrong types and infinities are errors.

    null means absent. `unsupported` lists names that other servers know; they are refused as such, unless their value
    is empty. Where `ignored_fields` holds a list, unknown and unsupported fields are left out and noted there instead.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)
    unsupported: ClassVar[frozenset[str]] = frozenset()
    path: ClassVar[str] = ""
    """The route of a whole body, which others point to for a field of its own."""
    called_here: ClassVar[Mapping[str, str]] = {}
    """Names here of fields that other routes call otherwise."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        if "path" in cls.__dict__:
            _BODIES.append(cls)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Lists are refused at their first wrong entry: an error for each of a million takes seconds and gigabytes.

        Those that are known to hold integers are not looked through again.
        """
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known, ignored = cls.field_names(), ignored_fields.get()
        present = {name: value for name, value in data.items() if value is not None}
        for name in data:
            if name in known:
                continue
            value = present.get(name)
            is_empty = value in (None, "", []) or (value == {} and name not in SAID_BY_PRESENCE)
            if name in cls.unsupported and is_empty:  # SDKs send whole objects with empty values in them
                present.pop(name, None)
                continue
            if ignored is None:
                raise refuse(cls._problem(name), name)
            present.pop(name, None)
            if len(ignored) == MAX_WARNINGS:
                continue  # similar names are slow to find
            warning = f"{cls.__name__}: {cls._problem(name)}; ignored"
            if warning not in ignored:
                ignored.append(warning)
        return present

    @classmethod
    def _problem(cls, name: str) -> str:
        if len(name) > MAX_NAME_LENGTH:
            return f"unknown field {shown(name)}"
        if name in cls.called_here:
            return f"unknown field {shown(name)}; here it is {shown(cls.called_here[name])}"
        if name in cls.unsupported:
            return f"{name} is not supported by this server"
        if cls.path and (others := sorted(body.path for body in _BODIES if name in body.field_names())):
            return f"unknown field {shown(name)}; it is a field of {', '.join(others)}"
        return f"unknown field {shown(name)}{did_you_mean(name, cls.field_names())}"

    @classmethod
    def field_names(cls) -> dict[str, None]:
        """The names of the fields as JSON spells them, in order."""
        return {field.alias or name: None for name, field in cls.model_fields.items()}


class CacheControl(RequestModel):
    """Accepted, without effect: prefixes are cached by themselves, for as long as there is room."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    """Accepted, without effect: prefixes are cached by themselves."""


def seconds(value: Any) -> Any:
    """'1h30m' -> 5400.0, 300 -> 300.0, -1 and '-1m' -> FOREVER; a validator, which refuses all else."""
    match value:
        case None:
            return None
        case bool():
            pass
        case int() | float():
            return FOREVER if value < 0 else float(value)
        case str() if len(value) <= _MAX_LENGTH and (found := _DURATION.fullmatch(value)):
            parts = re.findall(_PART, found[2])
            total = sum(float(number) * _SECONDS[unit] for number, unit in parts)
            return FOREVER if found[1] == "-" and total else total
    raise refuse(
        f'keep_alive is {shown(value)}; it must be seconds, or a time such as "10m" or "1h30m"; 0 unloads the model '
        "after the request, and what is below 0 never"
    )


class KeepAliveFields(RequestModel):
    """How long a model stays."""

    keep_alive: Annotated[float | None, BeforeValidator(seconds, json_schema_input_type=float | str | None)] = None
    """How long the model stays loaded after this request, as "10m", or seconds; 0: not at all, -1: for good."""


TENANT = "jaxllm.tenant"
"""The place of a request's tenant in its scope."""

RECORD = "jaxllm.record"
"""The place of a request's record in its scope, if one is kept."""

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

    largest_body = sys.maxsize

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
        """The event by which a stream that has begun tells of an error, whose answer would have been `body`."""
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
                pieces = await read_body(request, min(state.config.max_body_size, self.largest_body), share)
                ignored_fields.set([] if state.config.unknown_fields == "warn" else None)
                if sum(map(len, pieces)) <= SMALL_BODY:
                    value = self._parsed(b"".join(pieces))
                else:
                    value = await state.read_large(self._read_large, state.bodies, pieces)
            return await handler(ParsedRequest(request.scope, request.receive, value))

        return handle

    @staticmethod
    def _parsed(raw: bytes) -> Any:
        value = parse_object(raw)
        if may_overflow(raw):
            check_numbers(value)
        return value

    def _read_large(self, bodies: BodyProcess, pieces: list[bytes]) -> Any:
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
    record = request.scope.get(RECORD)
    if record is not None:
        record.api_route = request.scope["route"].path
    if TENANT not in request.scope:
        request.scope[TENANT] = request.app.state.server.keys.check(sent)
    if record is not None:
        record.key_name = request.scope[TENANT].name


class ListRoute(JSONRoute):
    """As JSONRoute, but for a list of at most SMALL_BODY bytes."""

    largest_body = SMALL_BODY

    @staticmethod
    def _parsed(raw: bytes) -> Any:
        value = parse_json(raw)
        if not isinstance(value, list):
            raise APIError(400, f"the body is {shown(value)}; it must be a JSON list", code="invalid_json")
        check_numbers(value)
        return value


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
