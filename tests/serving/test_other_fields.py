"""Fields of several APIs, of which no other test speaks."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from jaxllm.serving.openai.completions import CompletionRequest
from tests.serving.api_surface import BODIES
from tests.serving.fake_engine import BOS, CONTEXT, FakeEngine
from tests.serving.sending import HELLO, send
from tests.support.covers import covers

WITHOUT_MODEL = (
    "/v1/conversations", "/v1/files", "/v1/files/text", "/v1/batches",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/lora-adapters",
)  # fmt: skip
"""Routes whose body names no model."""


@covers("GenerationRequest", "model")
@covers("ModelFields", "model")
@pytest.mark.parametrize(
    "path",
    [path for path in BODIES if "{" not in path and path not in WITHOUT_MODEL],
)
def test_model_is_a_name_that_is_served(client: TestClient, path: str) -> None:
    error = send(client, path, 404, model="other")["error"]
    message = error if path.startswith("/api/") else error["message"]  # as ollama has it
    assert "'other'" in message and "fake" in message


@covers("CompletionRequest", "add_special_tokens")
def test_completions_add_special_tokens(client: TestClient, engine: FakeEngine) -> None:
    for asked, expected in ((True, [BOS, 72, 105]), (False, [72, 105])):
        send(client, "/v1/completions", add_special_tokens=asked)
        assert engine.seen[-1][0] == expected


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/chat/completions", "max_completion_tokens"),
        ("/v1/completions", "max_tokens"),
        ("/v1/responses", "max_output_tokens"),
        ("/v1/messages", "max_tokens"),
    ],
)
def test_most_tokens_beyond_the_context_end_where_it_is_full(
    client: TestClient, engine: FakeEngine, path: str, name: str
) -> None:
    engine.reply = "x" * 2 * CONTEXT
    body = {key: value for key, value in BODIES[path].items() if "max" not in key} | {name: 32_000}
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    tokens, params, _ = engine.seen[-1]
    assert params.max_tokens == CONTEXT - len(tokens)
    told = answer.json()
    reasons = [told.get("stop_reason"), told.get("status"), *(one["finish_reason"] for one in told.get("choices", ()))]
    assert {"length", "incomplete", "model_context_window_exceeded"} & set(reasons)


def test_a_prompt_cut_to_leave_room_for_max_tokens_needs_some(client: TestClient) -> None:
    fields = {"truncate_prompt_tokens": -1, "max_tokens": CONTEXT}
    error = send(client, "/v1/completions", 400, **fields)["error"]
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    assert f"max_tokens is {CONTEXT}, which leaves no room in the context of {CONTEXT} tokens" in error["message"]


@covers("GenerationRequest", "early_stopping")
def test_early_stopping_reaches_the_search() -> None:
    body = CompletionRequest(prompt="x", use_beam_search=True, early_stopping=True)
    search = body.generation_settings().beam_search
    assert search is not None and search.early_stopping


CACHE = {"cache_control": {"type": "ephemeral"}}


def schema_format(**inert: Any) -> dict[str, Any]:
    return {"schema": {"type": "object"}, **inert}


def history(**inert: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}, **inert}
    answer = {"role": "assistant", "tool_calls": [call]}
    return {"messages": [*HELLO, answer, {"role": "tool", "tool_call_id": "c", "content": "x"}]}


def tool_use(**inert: Any) -> dict[str, Any]:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}, **inert}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "x", **inert}
    tool = {"name": "f", "input_schema": {"type": "object"}, **inert}
    messages = [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    return {"messages": messages, "tools": [tool]}


SCHEMA_EXTRAS = {"name": "x", "description": "d", "strict": True}


@covers("JSONSchema", "name", "description", "strict")
@covers("HistoryToolCall", "index")
@covers("TextSchemaFormat", "name", "description", "strict")
@covers("Cacheable", "cache_control")
@pytest.mark.parametrize(
    ("path", "without", "with_them"),
    [
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": schema_format()}},
            {"response_format": {"type": "json_schema", "json_schema": schema_format(**SCHEMA_EXTRAS)}},
        ),
        (
            "/v1/responses",
            {"text": {"format": {"type": "json_schema", **schema_format(name="y")}}},
            {"text": {"format": {"type": "json_schema", **schema_format(**SCHEMA_EXTRAS)}}},
        ),
        ("/v1/chat/completions", history(), history(index=0)),
        ("/v1/messages", tool_use(), tool_use(**CACHE)),
    ],
)
def test_inert_parts_of_a_body_change_nothing(
    client: TestClient, engine: FakeEngine, path: str, without: dict[str, Any], with_them: dict[str, Any]
) -> None:
    engine.info.max_model_len = 4096
    for fields in (without, with_them):
        send(client, path, **fields)
    first, second = engine.seen
    assert first == second
