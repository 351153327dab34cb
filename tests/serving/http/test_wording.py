"""Malformed bodies of every shape are refused in this server's words: pydantic's never reach a client."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from fastapi.exceptions import RequestValidationError
from fastapi.testclient import TestClient
from pydantic import ValidationError
from pydantic_core.core_schema import ErrorType

from jaxllm.config import ServeConfig
from jaxllm.serving.http.answers import to_api_error
from jaxllm.serving.http.request_model import RequestModel
from jaxllm.wording import ACCEPTED
from tests.serving.api_surface import BODIES, Route, routes
from tests.serving.fake_engine import FakeEngine, app_of

FOREIGN = re.compile(
    r"input should|value error|value_error|field required|extra inputs|extra_forbidden|should (be|have|match)"
    r"|valid (string|integer|list|dict|boolean|number)|pydantic|validat|literal_error|(?<!input)_type\b|tagged",
    re.IGNORECASE,
)
PYTHONS = re.compile(r"\b(None|True|False|NoneType|dict|tuple)\b")
"""Words of Python's, where JSON's own are null, true, false, object and list."""

ODD_VALUES: list[Any] = [
    None, True, -1, 0, 10**30, 1.5, "", "odd", [], {}, [[]], [{}], [None], [1, "a"], {"type": "odd"}, {"type": 5},
    {"type": "function"}, {"type": "text"}, [{"type": "text"}], [{"type": "odd"}], [{"role": "user"}], "a" * 300,
    {"schema": 5}, [True], {"a": {"b": [1]}}, [""] * 3000,
]  # fmt: skip

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}
RICH: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "a", "content": "x"},
        ],
        "tools": [FUNCTION],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
        "stream": True,
        "stream_options": {"include_usage": True},
        "thinking": {"type": "enabled"},
    },
    "/v1/completions": {"prompt": "x", "response_format": {"type": "structural_tag", "structures": [], "triggers": []}},
    "/v1/messages": {
        "max_tokens": 5,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    },
    "/v1/responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "x"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}},
        "reasoning": {"effort": "low"},
    },
}
BODY_ROUTES = [route for route in routes() if route.models]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """One for all: hardly a request here is taken."""
    config = ServeConfig(model="fake", data_dir=tmp_path_factory.mktemp("data"))
    app = app_of(config, FakeEngine())
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        yield client


def malformed(route: Route, model: type[RequestModel]) -> Iterator[Any]:
    """Bodies in which every known field, and every value inside a good body, is odd in turn.

    A field that the model lacks is null or not: it makes no difference what else it holds.
    """
    base = BODIES.get(route.path, {})
    base = base[0] if isinstance(base, list) else base  # the model is that of an entry
    yield from (5, [], "x", {})
    own = model.field_names()
    for name in dict.fromkeys(name for other in route.models for name in other.field_names()):
        values = ODD_VALUES if name in own else (None, "odd")
        yield from (base | {name: value} for value in values)
    for good in (base, RICH.get(route.path, {})):
        for path in places(good):
            yield from (replaced(good, path, value) for value in ODD_VALUES)
            yield replaced(good, (*path[:-1], "odd"), 1) if isinstance(path[-1], str) else []


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in entries:
        yield (*path, key)
        yield from places(part, (*path, key))


def replaced(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    body = inner = copy.deepcopy(body)
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = value
    return body


@pytest.mark.parametrize("route", BODY_ROUTES, ids=str)
def test_refusals_are_in_our_words(route: Route) -> None:
    refused = 0
    for model in route.models:
        for body in malformed(route, model):
            try:
                model.model_validate(body)
            except ValidationError as error:
                found = [item | {"loc": ("body", *item["loc"])} for item in error.errors()]
                message = str(to_api_error(RequestValidationError(found, body=body)))
                assert not FOREIGN.search(message) and "\n" not in message, (body, message)
                assert not PYTHONS.search(message), (body, message)
                refused += 1
    assert refused > 20


@pytest.mark.parametrize("route", BODY_ROUTES, ids=str)
@pytest.mark.parametrize("body", ["5", "[]", "{", '{"model": 5}', '{"a": NaN}', '{"odd": 1, "model": []}', "{}", ""])
def test_answers_over_http_are_in_our_words(client: TestClient, route: Route, body: str) -> None:
    response = client.request(route.method, route.path, content=body, headers={"Content-Type": "application/json"})
    assert not FOREIGN.search(response.text) and not PYTHONS.search(response.text), response.text
    if response.status_code != 200:
        assert response.status_code in (400, 404) and "error" in json.loads(response.text)


def test_a_form_and_an_address_too(client: TestClient) -> None:
    for response in (
        client.post("/v1/files", data={"purpose": "batch", "file": "no file"}, files={"x": b""}),
        client.post("/v1/files", files={"purpose": (None, "batch"), "file": (None, "no file")}),
        client.post("/v1/files", files={"file": b"{}"}),
        client.get("/v1/files?limit=many"),
        client.get("/v1/batches?limit=0"),
    ):
        assert response.status_code == 400 and not FOREIGN.search(response.text), response.text


def test_every_kind_of_error_is_one_that_pydantic_has() -> None:
    in_python = {"path_type"}  # the others are those of its core
    assert set(ACCEPTED) - in_python <= set(get_args(ErrorType))


@pytest.mark.parametrize(
    ("path", "field", "says"),
    [
        ("/v1/responses", "prediction", "it is a field of /v1/chat/completions"),
        ("/v1/responses", "n", "it is a field of /v1/chat/completions, /v1/completions"),
        ("/v1/responses", "max_tokens", "here it is 'max_output_tokens'"),
        ("/v1/responses", "response_format", "here it is 'text.format'"),
        ("/v1/responses", "temperatur", "did you mean 'temperature'?"),
        ("/v1/chat/completions", "max_output_tokens", "here it is 'max_completion_tokens'"),
        ("/v1/chat/completions", "dimensions", "it is a field of /v1/embeddings"),
        ("/v1/completions", "max_completion_tokens", "here it is 'max_tokens'"),
        ("/v1/completions", "odd", "unknown field 'odd'"),
        ("/v1/messages", "min_tokens", "it is a field of /v1/chat/completions, /v1/completions, /v1/responses"),
        ("/v1/embeddings", "output_dimension", "here it is 'dimensions'"),
        ("/v2/embed", "dimensions", "here it is 'output_dimension'"),
    ],
)
def test_a_field_of_another_route_is_no_slip_of_the_pen(client: TestClient, path: str, field: str, says: str) -> None:
    base = BODIES[path]
    response = client.post(path, json={**base, field: 5})  # type: ignore[dict-item]
    error = response.json()["error"]
    assert response.status_code == 400 and error["message"].startswith(f"unknown field '{field}'")
    assert error["message"].endswith(says) and error.get("param", field) == field


def test_names_here_are_fields_of_the_body() -> None:
    spelt = [(model, *names) for route in BODY_ROUTES for model in route.models for names in model.called_here.items()]
    assert len(spelt) > 30
    for model, name, here in spelt:
        field, _, inner = here.partition(".")
        assert name not in model.field_names() and field in model.field_names(), (model, name)
        assert not inner or inner in str(model.model_json_schema(by_alias=True)["$defs"])
