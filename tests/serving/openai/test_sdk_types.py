"""Every field of the openai package's own request types: its null, and the default that its documentation names."""

from __future__ import annotations

import ast
import inspect
import json
import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from openai.types import batch_create_params, completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.conversations import conversation_create_params
from openai.types.responses import input_token_count_params, response_compact_params, response_create_params

from tests.serving.api_surface import BODIES
from tests.serving.fake_engine import FakeEngine

TYPES: dict[str, Any] = {
    "/v1/chat/completions": chat_params.CompletionCreateParamsBase,
    "/v1/completions": completion_create_params.CompletionCreateParamsBase,
    "/v1/embeddings": embedding_create_params.EmbeddingCreateParams,
    "/v1/responses": response_create_params.ResponseCreateParamsBase,
    "/v1/responses/input_tokens": input_token_count_params.InputTokenCountParams,
    "/v1/responses/compact": response_compact_params.ResponseCompactParams,
    "/v1/conversations": conversation_create_params.ConversationCreateParams,
    "/v1/batches": batch_create_params.BatchCreateParams,
}
NEEDS: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True, "include": ["message.output_text.logprobs"]},
}
"""What a field can only be sent with."""
ASKED = {"input"}
"""Without it, and with nothing to continue, there is no prompt."""
_DEFAULT = re.compile(r"(?:[Dd]efaults? (?:is|to|value is)|default is) `?\"?([\w.{}-]+)")


def objects(annotation: Any) -> Iterator[Any]:
    """The typed dictionaries that a field may hold."""
    if typing.is_typeddict(annotation):
        yield annotation
    elif typing.get_origin(annotation) in (typing.Union, typing.Required, typing.NotRequired, type(int | None)):
        for part in typing.get_args(annotation):
            yield from objects(part)


def documented(kind: Any) -> dict[str, str]:
    """Field -> its docstring."""
    (body,) = (node for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef))
    found = {}
    for field, after in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
            found[field.target.id] = str(ast.literal_eval(after.value))
    return found


def fields(kind: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """The path of each field that may be left out, and its documentation."""
    docs = documented(kind)
    for name, annotation in typing.get_type_hints(kind, include_extras=True).items():
        if typing.get_origin(annotation) is typing.Required:
            continue
        yield (*path, name), docs.get(name, "")
        for inner in objects(annotation):
            hints = typing.get_type_hints(inner, include_extras=True).values()
            if all(typing.get_origin(hint) is not typing.Required for hint in hints):
                yield from fields(inner, (*path, name))


def send(client: TestClient, route: str, path: tuple[str, ...], value: Any) -> None:
    for name in reversed(path):
        value = {name: value}
    known = typing.get_type_hints(TYPES[route])
    more = {name: part for name, part in NEEDS.get(path[0], {}).items() if name in known or name == "stream"}
    response = client.post(route, json=BODIES[route] | more | value)
    assert response.status_code == 200 or "input_file_id" in response.text, f"{path}: {response.text}"


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.info.max_model_len = 4096
    return engine


@pytest.mark.parametrize("route", TYPES)
def test_null_is_accepted_for_every_field_of_the_sdk(client: TestClient, route: str) -> None:
    paths = [path for path, _ in fields(TYPES[route]) if path[0] not in ASKED]
    assert len(paths) > 1
    for path in paths:
        send(client, route, path, None)


@pytest.mark.parametrize("route", TYPES)
def test_documented_defaults_of_the_sdk_are_accepted(client: TestClient, route: str) -> None:
    for path, text in fields(TYPES[route]):
        for default in _DEFAULT.findall(text):
            try:
                value = json.loads(default.rstrip("."))
            except ValueError:
                value = default.rstrip(".")
            send(client, route, path, value)
