"""Replies come back as history just as the real SDKs write them, with all the fields that say nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel

from tests.serving.fake_engine import FakeEngine
from tests.serving.responses.shared import PARSERS
from tests.serving.sending import prompt, send
from tests.support.covers import covers

USER: Any = {"role": "user", "content": "Hi"}
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALLING = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


class Town(BaseModel):
    name: str


@pytest.fixture
def url(listen: Callable[..., str], engine: FakeEngine) -> str:
    engine.info.max_model_len = 4000
    return listen(engine, **PARSERS)


def dumps(reply: BaseModel) -> list[Any]:
    """The ways in which people turn a reply into history."""
    return [reply, reply.model_dump(), reply.model_dump(mode="json"), reply.model_dump(exclude_none=True)]


@covers("ChatMessageParam", "parsed")
@covers("FunctionCall", "parsed_arguments")
@pytest.mark.parametrize("reply", ["Hello.", "<think>hm</think>Hello.", CALLING, '{"name": "Oslo"}'])
def test_chat_completions(url: str, engine: FakeEngine, reply: str) -> None:
    engine.reply = reply
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        tools = [{**TOOL, "function": {**TOOL["function"], "strict": True}}]
        asked: dict[str, Any] = {"model": "fake", "tools": tools} if reply == CALLING else {"model": "fake"}
        create: Any = client.chat.completions.create
        if reply.startswith("{"):  # read into `parsed`
            create, asked["response_format"] = client.chat.completions.parse, Town
        if reply == CALLING:  # read into `parsed_arguments`
            create = client.chat.completions.parse
        message = create(messages=[USER], **asked).choices[0].message
        if message.tool_calls and create is client.chat.completions.parse:
            assert message.tool_calls[0].function.parsed_arguments == {}
        elif create is client.chat.completions.parse:
            assert message.parsed == Town(name="Oslo")
        answers = [{"role": "tool", "tool_call_id": call.id, "content": "1"} for call in message.tool_calls or ()]
        for history in dumps(message):
            client.chat.completions.create(messages=[USER, history, *answers, USER], model="fake")
            assert "[assistant]" in prompt(engine).split("Hi")[1]


@pytest.mark.parametrize("reply", ["Hello.", "<think>hm</think>Hello.", CALLING])
def test_responses(url: str, engine: FakeEngine, reply: str) -> None:
    engine.reply = reply
    tool: Any = {"type": "function", **TOOL["function"]}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        response = client.responses.create(model="fake", input="Hi", tools=[tool])
        calls = [item for item in response.output if item.type == "function_call"]
        answers: list[Any] = [{"type": "function_call_output", "call_id": c.call_id, "output": "1"} for c in calls]
        for history in zip(*map(dumps, response.output), strict=True):
            client.responses.create(model="fake", input=[USER, *history, *answers, USER])


@pytest.mark.parametrize("reply", ["Hello.", "<think>hm</think>Hello.", CALLING])
def test_anthropics_messages(url: str, engine: FakeEngine, reply: str) -> None:
    engine.reply = reply
    tool: Any = {"name": "look", "input_schema": {"type": "object"}}
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        ask = {"model": "fake", "max_tokens": 99, "tools": [tool]}
        message = client.messages.create(messages=[USER], **ask)
        calls = [block for block in message.content if block.type == "tool_use"]
        answers: list[Any] = [{"type": "tool_result", "tool_use_id": call.id, "content": "1"} for call in calls]
        last: Any = {"role": "user", "content": [*answers, {"type": "text", "text": "Hi"}]}
        for content in zip(*map(dumps, message.content), strict=True):
            client.messages.create(messages=[USER, {"role": "assistant", "content": list(content)}, last], **ask)


@covers("Cacheable", "cache_control")
@pytest.mark.parametrize(
    "message",
    [
        {"content": "a", "tool_calls": [], "annotations": [], "audio": None, "function_call": None, "refusal": None},
        {"content": "a", "name": None, "reasoning_content": None, "reasoning": "", "reasoning_details": []},
        {"content": "a", "provider_specific_fields": None, "thinking_blocks": [], "images": [], "function_call": {}},
        {"content": "a", "cache_control": {"type": "ephemeral"}},
        {"content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]},
        {"content": [{"type": "refusal", "refusal": "a", "cache_control": {"type": "ephemeral"}}]},
    ],
)
def test_what_says_nothing_changes_nothing(client: TestClient, engine: FakeEngine, message: dict[str, Any]) -> None:
    send(client, "/v1/chat/completions", messages=[USER, {"role": "assistant", **message}, USER])
    assert prompt(engine) == "[user]Hi[assistant]a[user]Hi[assistant]"


@pytest.mark.parametrize("more", [{}, {"content": None}, {"tool_calls": []}, {"refusal": None, "tool_calls": None}])
def test_an_assistant_that_said_nothing(client: TestClient, engine: FakeEngine, more: dict[str, Any]) -> None:
    send(client, "/v1/chat/completions", messages=[USER, {"role": "assistant", **more}, USER])
    assert prompt(engine) == "[user]Hi[assistant][user]Hi[assistant]"


@covers("Cacheable", "cache_control")
def test_tools_with_a_hint_for_the_cache(client: TestClient, engine: FakeEngine) -> None:
    engine.info.max_model_len = 4000
    tool = {**TOOL, "cache_control": {"type": "ephemeral"}}
    send(client, "/v1/chat/completions", messages=[USER], tools=[tool])
    send(client, "/v1/chat/completions", 400, messages=[USER], tools=[{**TOOL, "cache": 1}])


@pytest.mark.parametrize(
    "field",
    [
        {"functions": []}, {"suffix": ""}, {"logits_processors": []}, {"mm_processor_kwargs": {}},
        {"top_logprobs": 0}, {"logprob_token_ids": []}, {"stream_options": {"include_usage": False}},
    ],
)  # fmt: skip
def test_fields_that_ask_nothing(client: TestClient, field: dict[str, Any]) -> None:
    send(client, "/v1/chat/completions", messages=[USER], **field)


@pytest.mark.parametrize("field", [{"web_search_options": {}}, {"suffix": "x"}, {"audio": {"voice": "x"}}])
def test_fields_that_ask_for_something(client: TestClient, field: dict[str, Any]) -> None:
    response = client.post("/v1/chat/completions", json={"messages": [USER], **field})
    assert response.status_code == 400 and "is not supported by this server" in response.text


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", {"max_tokens": -1}),
        ("/v1/chat/completions", {"max_completion_tokens": -1, "max_tokens": None}),
        ("/v1/completions", {"max_tokens": -1}),
        ("/v1/responses", {"max_output_tokens": -1}),
    ],
)
def test_minus_one_sets_no_limit(client: TestClient, engine: FakeEngine, path: str, field: dict[str, Any]) -> None:
    send(client, path, **field)
    tokens, params, _ = engine.seen[-1]
    assert params.max_tokens == engine.info.max_model_len - len(tokens)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_a_top_p_of_zero_takes_the_likeliest(client: TestClient, engine: FakeEngine, path: str) -> None:
    send(client, path, top_p=0, temperature=0.7)
    params = engine.seen[-1][1]
    assert params.greedy
