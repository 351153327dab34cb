"""Errors and answers as bodies: OpenAI's error object, and msgspec structs that /openapi.json describes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from jaxllm import errors
from jaxllm.serving.http.api_error import RETRY_AFTER_SECONDS, APIError, dotted, unavailable
from jaxllm.wording import must, shown

logger = logging.getLogger(__name__)

HANDLED: tuple[type[Exception], ...] = (
    APIError, errors.InvalidRequestError, errors.QueueFullError, errors.EnginePausedError, errors.EngineDeadError,
    errors.StorageFullError, RequestValidationError, HTTPException, Exception,
)  # fmt: skip
"""The exceptions that `to_api_error` answers: frameworks want to have each named."""

ignored_fields: ContextVar[list[str] | None] = ContextVar("ignored_fields", default=None)
"""With `unknown_fields: warn`, what the current request sent in vain; None, the default, refuses such fields."""


MAX_WARNINGS = 32


class Error(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct):
    """The body of every error but Anthropic's."""

    error: Error


def to_api_error(error: Exception) -> APIError:
    """The error that a client is told; an unforeseen one becomes a 500 without details."""
    match error:
        case APIError():
            return error
        case errors.InvalidRequestError():
            code = "context_length_exceeded" if isinstance(error, errors.ContextLengthError) else None
            return APIError(400, str(error), param=error.param, code=code)
        case errors.QueueFullError():
            headers = {"Retry-After": RETRY_AFTER_SECONDS}
            return APIError(429, str(error), type="rate_limit_error", code="queue_full", headers=headers)
        case errors.EnginePausedError():
            return unavailable(str(error), code="engine_paused")
        case errors.EngineDeadError():
            return unavailable(str(error), code="engine_dead")
        case errors.StorageFullError():
            return APIError(507, str(error), type="server_error", code="insufficient_storage")
        case RequestValidationError():
            return _validation_error(error)
        case HTTPException():
            return APIError(error.status_code, str(error.detail), headers=_plain(error.headers))
        case _:
            return APIError(500, "internal server error; the server's log has details", type="server_error")


def install_error_handlers(app: FastAPI) -> None:
    """Answer every exception that leaves a route with `to_api_error`, in the shape of the route's own API."""

    async def handle(request: Request, error: Exception) -> Response:
        place = f"{request.method} {request.url.path}"
        if isinstance(error, HTTPException) and error.status_code == 404:
            error = APIError(404, f"no route {place}", code="not_found")
        elif isinstance(error, HTTPException) and error.status_code == 405:
            headers = _plain(error.headers) or {}
            message = f"no route {place}; this path takes {headers.get('Allow', 'other methods')}"
            error = APIError(405, message, code="method_not_allowed", headers=headers)
        respond = getattr(request.scope.get("route"), "error_response", error_response)
        return respond(to_api_error(error))

    for exception in HANDLED:
        app.add_exception_handler(exception, handle)


def error_response(error: APIError) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


def _validation_error(error: RequestValidationError) -> APIError:
    """One line from pydantic's report: the errors at its deepest path, which is where the client went wrong."""
    found = [(*_locate(item, error.body), item) for item in error.errors()]
    path, value, _ = max(found, key=lambda entry: len(entry[0]))
    items = [item for other, _, item in found if other == path]
    first = max(items, key=lambda item: "param" in item.get("ctx", {}))
    if "param" in first.get("ctx", {}):  # raised by our own models, with a message that is already a sentence
        named = (*path, first["ctx"]["param"]) if first["ctx"]["param"] else path
        place = dotted(path)
        place = "" if first["msg"].startswith(place) else place
        return APIError(400, first["msg"], param=dotted(named) or None, place=place)
    name = dotted(path)
    if first["type"] == "missing":
        return APIError(400, f"{name} is required", param=name)
    subject = name or "the body"
    return APIError(400, f"{subject} is {shown(value)}; it {must(items)}", param=name or None)


def _locate(item: dict[str, Any], body: Any) -> tuple[tuple[str | int, ...], Any]:
    """The path of an error in the body as sent, without pydantic's union branches, or a parameter's name; its value."""
    if item["loc"][0] != "body":
        return tuple(item["loc"][1:]), item["input"]
    path: list[str | int] = []
    value = body
    for at, part in enumerate(item["loc"][1:], start=2):
        in_object = isinstance(value, Mapping) and part in value
        if in_object or (isinstance(value, list) and isinstance(part, int) and part < len(value)):
            value = value[part]
        elif item["type"] == "missing" and at == len(item["loc"]) and isinstance(value, Mapping):
            value = None
        else:
            continue
        path.append(part)
    return tuple(path), value


def _plain(headers: Any) -> dict[str, str] | None:
    return dict(headers) if headers else None


def json_response(
    value: msgspec.Struct | Sequence[msgspec.Struct],
    *,
    request_id: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """`value` as the answer, with a `warnings` member where fields of the request were ignored.

    A list has no place for members: its warnings are in the header X-Warnings, as JSON.
    """
    named = {"X-Request-Id": request_id} if request_id else {}
    content = msgspec.json.encode(value)
    warnings = ignored_fields.get()
    if warnings and isinstance(value, Sequence):
        named["X-Warnings"] = json.dumps(warnings)
    elif warnings:
        content = content[:-1] + b',"warnings":' + msgspec.json.encode(warnings) + b"}"
    return Response(content, media_type="application/json", headers={**named, **(headers or {})})


def left_out(kinds: Iterable[str]) -> dict[str, str]:
    """A header that tells of tools which the model is not offered; the log tells of each kind once."""
    names = [shown(kind) for kind in dict.fromkeys(kinds)][:MAX_WARNINGS]
    warnings = [f"this server has no tools of type {name}: they were left out" for name in names]
    for warning in warnings:
        _log_once(warning)
    return {"X-Warnings": json.dumps(warnings)} if warnings else {}


@lru_cache(maxsize=64)
def _log_once(warning: str) -> None:
    logger.warning(warning)


RESPONSES: list[Any] = []
"""All that the routes said they return."""
DONE = "[DONE]"
"""The last event of a stream of OpenAI's older routes."""


def returns(
    *answers: Any,
    events: Iterable[type[msgspec.Struct]] = (),
    lines: Iterable[type[msgspec.Struct]] = (),
    done: str | None = None,
    error: type[msgspec.Struct] = ErrorResponse,
) -> dict[int | str, dict[str, Any]]:
    """The `responses` argument of a route that answers with one of `answers` or, as a stream, with `events` or `lines`.

    They are msgspec structs, or lists of some. A route without answers always streams. The data of the last event is
    `done`, if given. Lines are JSON.
    """
    schemas = [_placeholder(answer) for answer in answers]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    content: dict[str, Any] = {"application/json": {"schema": schema}} if schemas else {}
    if events:
        data: dict[str, Any] = {
            "contentMediaType": "application/json",
            "contentSchema": {"anyOf": [_placeholder(event) for event in events]},
        }
        if done is not None:
            data = {"anyOf": [{"const": done}, data]}
        event = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string", **data}}}
        content["text/event-stream"] = {"itemSchema": event}
    if lines:
        content["application/x-ndjson"] = {"itemSchema": {"anyOf": [_placeholder(line) for line in lines]}}
    failure = {"description": "Error", "content": {"application/json": {"schema": _placeholder(error)}}}
    return {200: {"description": "Success", "content": content}, "4XX": failure, "5XX": failure}


def install_openapi(app: FastAPI) -> None:
    """Add the response schemas, take out the 422 that is never sent, and add the route, which keeps its bytes."""
    build = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schemas, components = msgspec.json.schema_components(RESPONSES, ref_template="#/components/schemas/{name}")
            app.openapi_schema = document = _filled(build(), schemas)
            for path in document["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            known = document.setdefault("components", {}).setdefault("schemas", {})
            for name in ("HTTPValidationError", "ValidationError"):
                known.pop(name, None)
            known.update(components)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]

    @cache
    def content() -> bytes:
        return msgspec.json.encode(app.openapi())

    async def show(request: Request) -> Response:
        prefix = request.scope.get("root_path", "")
        document = content()
        if prefix:
            document = b'{"servers":%s,%s' % (msgspec.json.encode([{"url": prefix}]), document[1:])
        return Response(document, media_type="application/json")

    app.add_route("/openapi.json", show, include_in_schema=False)


def _placeholder(struct: Any) -> dict[str, Any]:
    if struct not in RESPONSES:
        RESPONSES.append(struct)
    return {"x-struct": RESPONSES.index(struct)}


def _filled(value: Any, schemas: tuple[dict[str, Any], ...]) -> Any:
    match value:
        case {"x-struct": int(at)}:
            return schemas[at]
        case dict():
            return {name: _filled(part, schemas) for name, part in value.items()}
        case list():
            return [_filled(part, schemas) for part in value]
        case _:
            return value
