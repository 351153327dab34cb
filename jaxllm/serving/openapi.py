"""Makes /openapi.json tell the truth about responses, whose types are msgspec structs that FastAPI does not know."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI

from jaxllm.serving.protocol.chat import ChatCompletion
from jaxllm.serving.protocol.common import ErrorResponse
from jaxllm.serving.protocol.completions import Completion
from jaxllm.serving.protocol.models import Model, ModelList, Status, Version
from jaxllm.serving.protocol.tokenize import DetokenizeResponse, TokenizeResponse

RESPONSES = (
    ChatCompletion, Completion, DetokenizeResponse, ErrorResponse, Model, ModelList, Status, TokenizeResponse, Version,
)  # fmt: skip

_REFERENCE = "#/components/schemas/{name}"


def returns(struct: type[msgspec.Struct], *, stream: bool = False) -> dict[int | str, dict[str, Any]]:
    """The `responses` argument of a route that answers with `struct` or, if asked to stream, with events."""
    content: dict[str, Any] = {"application/json": {"schema": _reference(struct)}}
    if stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"description": "Error", "content": {"application/json": {"schema": _reference(ErrorResponse)}}}
    return {200: {"description": "Success", "content": content}, "4XX": error, "5XX": error}


def install_openapi(app: FastAPI) -> None:
    """Add the response schemas, and take out the 422 that FastAPI promises and this server never sends."""
    build = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = schema = build()
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            _, components = msgspec.json.schema_components(RESPONSES, ref_template=_REFERENCE)
            schemas.update(components)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _reference(struct: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=struct.__name__)}
