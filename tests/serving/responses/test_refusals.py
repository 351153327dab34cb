"""What is refused, and under which name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.serving.responses.shared import WEATHER

CALL_ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}


OTHER_CALL, OTHER_OUTPUT = CALL_ITEM | {"call_id": "d"}, OUTPUT | {"call_id": "d"}


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "input", "required"),
    ({"input": []}, "input", "required"),
    ({"input": 3}, "input", "string"),
    ({"input": [{"type": "computer_call", "id": "w"}]}, "input[0].type", "function_call_output"),
    ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0].type", "input_text"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url", "file_id"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "developer"),
    ({"input": [{"type": "item_reference", "id": "msg_0"}]}, "input[0].id", "stored"),
    ({"input": [CALL_ITEM]}, "input", "no output found for function call c"),
    ({"input": [CALL_ITEM, {"role": "user", "content": "x"}]}, "input", "no output found"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input", "'c'"),
    ({"input": [CALL_ITEM | {"arguments": "3"}]}, "input[0].arguments", "JSON"),
    ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'"),
    ({"input": "x", "tools": [WEATHER, WEATHER]}, "tools[1].name", "twice"),
    (
        {"input": "x", "tools": [WEATHER | {"parameters": {"properties": {"a": {"type": "nope"}}}}]}
        | {"tool_choice": "required"},
        "tools[0].parameters",
        f"(of {WEATHER['name']!r}) cannot be enforced",
    ),
    ({"input": "x", "tool_choice": "required"}, "tool_choice", "tools is empty"),
    ({"input": "x", "tool_choice": {"type": "file_search"}}, "tool_choice.type", "'file_search'"),
    ({"input": "x", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name", "f"),
    ({"input": [CALL_ITEM, OTHER_CALL, OUTPUT, CALL_ITEM, OTHER_OUTPUT, OUTPUT]}, "input[3]", "the calls d await"),
    ({"input": "x", "model": "response_format"}, "model", "'response_format' is not served"),
    ({"input": "x", "min_tokens": 5, "max_output_tokens": 4}, "min_tokens", "at most max_output_tokens (4)"),
    ({"input": "x", "temperature": -1.0}, "temperature", "0 or more"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "1 or more"),
    ({"input": "x", "top_logprobs": 2}, "top_logprobs", "include"),
    ({"input": "x", "include": ["weather"]}, "include[0]", "logprobs"),
    ({"input": "x", "background": True, "store": False}, "background", "store"),
    ({"input": "x", "previous_response_id": "a", "conversation": "b"}, "previous_response_id", "conversation"),
    ({"input": "x", "previous_response_id": "resp_0"}, "previous_response_id", "no stored response"),
    ({"input": "x", "conversation": "conv_0"}, "conversation_id", "conv_0"),
    ({"input": "x", "prompt": {"id": "p"}}, "prompt", "not supported"),
    ({"input": "x", "text": {"format": {"type": "grammar"}}}, "text.format", "json_schema"),
    ({"input": "x", "reasoning": {"summary": "short"}}, "reasoning.summary", "detailed"),
    ({"input": "x", "reasoning": {"mode": "pro"}}, "reasoning.mode", "standard"),
    ({"input": "x", "prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm", "false"),
    ({"input": "x", "moderation": {"model": "m"}}, "moderation", "not supported"),
    (
        {"input": "x", "tools": [WEATHER | {"allowed_callers": ["programmatic"]}]},
        "tools[0].allowed_callers[0]",
        "direct",
    ),
    ({"input": "x", "stream_options": {"include_obfuscation": False}}, "stream_options", "stream"),
    ({"input": "x", "metadata": {"k": "v" * 513}}, "metadata", "512"),
    ({"input": "x", "max_tokens": 5}, "max_tokens", "unknown field"),
    ({"input": "x" * 5000}, "input", "4096"),
]


@pytest.mark.parametrize(("body", "param", "told"), REFUSALS, ids=[str(body)[:60] for body, _, _ in REFUSALS])
def test_refusals_name_the_field(post: Callable[..., Any], body: dict[str, Any], param: str, told: str) -> None:
    answer = post(**body)
    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    assert error["param"] == param and told in error["message"], error
    assert "messages" not in error["message"] and "completion_tokens" not in error["message"]


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        ("/v1/responses/resp_0", 404, "response_id"),
        ("/v1/responses/resp_0/input_items", 404, "response_id"),
        ("/v1/responses/resp_0/input_items?limit=0", 400, "limit"),
        ("/v1/responses/resp_0/input_items?order=up", 400, "order"),
        ("/v1/responses/resp_0?starting_after=1", 400, "starting_after"),
        ("/v1/responses/resp_0?stream=maybe", 400, "stream"),
    ],
)
def test_wrong_paths_and_queries(post: Callable[..., Any], path: str, status: int, param: str) -> None:
    answer = post.client.get(path)
    assert answer.status_code == status and answer.json()["error"]["param"] == param, answer.text
