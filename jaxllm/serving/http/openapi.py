"""Makes /openapi.json tell the truth about responses, whose types are msgspec structs that FastAPI does not know."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

import msgspec
from fastapi import FastAPI

from jaxllm.serving.anthropic.response import AnthropicErrorResponse, AnthropicMessage, TokenCount
from jaxllm.serving.anthropic.response import StreamEvent as AnthropicEvent
from jaxllm.serving.batches.batch_types import Batch, BatchList
from jaxllm.serving.batches.file_types import FileDeleted, FileList, FileObject
from jaxllm.serving.http.request_model import ErrorResponse
from jaxllm.serving.openai.chat_response import ChatCompletion, ChatCompletionChunk, RenderedPrompt
from jaxllm.serving.openai.completion_types import Completion
from jaxllm.serving.openai.model_types import Load, Model, ModelList, Status, Version
from jaxllm.serving.openai.tokenize_types import DetokenizeResponse, TokenizeResponse, TokenizerInfo
from jaxllm.serving.pooling.embedding_types import EmbeddingList
from jaxllm.serving.pooling.scoring_types import ClassificationList, Ranking, ScoreList
from jaxllm.serving.responses.events import StreamEvent as ResponseEvent
from jaxllm.serving.responses.objects import (
    Conversation,
    DeletedConversation,
    DeletedResponse,
    InputTokens,
    ItemList,
    ListedItem,
    Response,
)

RESPONSES = (
    Batch, BatchList, FileDeleted, FileList, FileObject,
    ClassificationList, EmbeddingList, Ranking, ScoreList,
    AnthropicErrorResponse, AnthropicMessage, TokenCount,
    Conversation, DeletedConversation, DeletedResponse, InputTokens, ItemList, ListedItem, Response,
    ChatCompletion, ChatCompletionChunk, Completion, DetokenizeResponse, ErrorResponse, Load, Model, ModelList,
    RenderedPrompt, Status, TokenizerInfo, TokenizeResponse, Version,
    *get_args(AnthropicEvent), *get_args(ResponseEvent),
)  # fmt: skip

_SCHEMAS, _COMPONENTS = msgspec.json.schema_components(RESPONSES, ref_template="#/components/schemas/{name}")
_REFERENCES = dict(zip(RESPONSES, _SCHEMAS, strict=True))

DONE = "[DONE]"
"""What ends a stream of OpenAI's older routes."""


def returns(
    struct: type[msgspec.Struct],
    *,
    events: Iterable[type[msgspec.Struct]] = (),
    done: str | None = None,
    error: type[msgspec.Struct] = ErrorResponse,
) -> dict[int | str, dict[str, Any]]:
    """The `responses` argument of a route that answers with `struct` or, if asked to stream, with `events`.

    The data of each event is one of `events` as JSON; that of the last is `done`, if given.
    """
    content: dict[str, Any] = {"application/json": {"schema": _REFERENCES[struct]}}
    if events:
        data: dict[str, Any] = {
            "contentMediaType": "application/json",
            "contentSchema": {"anyOf": [_REFERENCES[event] for event in events]},
        }
        if done is not None:
            data = {"anyOf": [{"const": done}, data]}
        event = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string", **data}}}
        content["text/event-stream"] = {"itemSchema": event}
    failure = {"description": "Error", "content": {"application/json": {"schema": _REFERENCES[error]}}}
    return {200: {"description": "Success", "content": content}, "4XX": failure, "5XX": failure}


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
            schemas.update(_COMPONENTS)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
