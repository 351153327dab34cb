"""Answers are msgspec structs: here they are encoded, and described in /openapi.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from jaxllm.serving.http.errors import ErrorResponse
from jaxllm.serving.http.request_model import ignored_fields


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


RESPONSES: list[Any] = []
"""All that the routes said they return."""

DONE = "[DONE]"
"""What ends a stream of OpenAI's older routes."""


def returns(
    *answers: Any,
    events: Iterable[type[msgspec.Struct]] = (),
    done: str | None = None,
    error: type[msgspec.Struct] = ErrorResponse,
) -> dict[int | str, dict[str, Any]]:
    """The `responses` argument of a route that answers with one of `answers` or, if asked to stream, with `events`.

    Without answers it always streams.

    They are msgspec structs, or lists of some.

    The data of each event is one of `events` as JSON; that of the last is `done`, if given.
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
    failure = {"description": "Error", "content": {"application/json": {"schema": _placeholder(error)}}}
    return {200: {"description": "Success", "content": content}, "4XX": failure, "5XX": failure}


def install_openapi(app: FastAPI) -> None:
    """Add the response schemas, take out the 422 that FastAPI promises and this server never sends, and add the route.

    It keeps the document's bytes, which take the event loop milliseconds to make.
    """
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
    """Stands for a struct's schema, whose name depends on which others there are."""
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
