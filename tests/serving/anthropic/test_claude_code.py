"""Fields that Claude Code and Anthropic's newest SDK send without being asked."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from fastapi.testclient import TestClient

from jaxllm.serving.anthropic import routes
from jaxllm.serving.anthropic.request import MessagesRequest
from jaxllm.serving.http import answers
from tests.serving.anthropic.shared import CALL, HELLO, WEATHER, ScriptedEngine
from tests.serving.fake_engine import FakeEngine
from tests.support.covers import covers

if TYPE_CHECKING:
    import anthropic

SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}


def post(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/messages", json={"max_tokens": 50, "messages": HELLO} | fields)


@covers("CacheControl", "scope")
@covers("RedactedThinkingBlockParam", "data")
@covers("BillingPolicy", "bill_to")
def test_what_it_sends_changes_no_prompt(client: TestClient, engine: ScriptedEngine) -> None:
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}
    said = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "Hm."}]}, *HELLO]
    assert post(client, messages=said, system="Be brief.").status_code == 200
    plain = engine.last_prompt
    said[1] = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "xyz"}, said[1]["content"][0]]}
    response = post(
        client, messages=said, system=[{"type": "text", "text": "Be brief.", **cached}], mcp_servers=[],
        speed="fast", betas=["x-2026-01-01"], fallbacks="default", compaction=None, thread=None, container=None,
        billing_policy={"type": "billing_policy", "bill_to": "self"}, context_management={"edits": []},
        thinking={"type": "adaptive", "block_binding": {}, "display": "updates"},
    )  # fmt: skip
    assert response.status_code == 200, response.text
    assert engine.last_prompt.replace("(enable_thinking=True)", "") == plain


def test_the_billing_line_is_no_part_of_the_prompt(client: TestClient, engine: ScriptedEngine) -> None:
    """It differs in each request, in front of everything else."""
    prompts = []
    for number in range(2):
        billing = f"x-anthropic-billing-header: cc_version=2.1.{number}; cch={number};"
        blocks = [{"type": "text", "text": billing}, {"type": "text", "text": "Be brief."}]
        for system in (blocks, f"{billing}\nBe brief."):
            assert post(client, system=system).status_code == 200
            prompts.append(engine.last_prompt)
    assert set(prompts) == {"[system]Be brief.[user]What is the capital of France?[assistant]"}
    assert post(client, system=[blocks[0]]).status_code == 200
    assert engine.last_prompt.startswith("[user]")


@pytest.mark.parametrize("model", ["claude-opus-4-8", "claude-haiku-4-5-20251001"])
def test_a_server_of_one_model_answers_for_claude(client: TestClient, model: str) -> None:
    answer = post(client, model=model)
    assert (answer.status_code, answer.json()["model"]) == (200, model)
    assert [entry["id"] for entry in client.get("/v1/models").json()["data"]] == ["fake"]
    assert post(client, model="gpt-5").status_code == 404


def test_of_several_models_those_answer_that_have_the_pattern(make_client: Callable[..., TestClient]) -> None:
    first, other = FakeEngine(), FakeEngine()
    client = make_client(first, {"other": other}, served_model_name="claude-*-mini,fake")
    assert [entry["id"] for entry in client.get("/v1/models").json()["data"]] == ["fake", "other"]
    assert post(client, model="claude-5-mini").status_code == 200 and len(first.seen) == 1
    error = post(client, model="claude-5").json()["error"]
    assert error["type"] == "not_found_error" and "*" not in error["message"]


def test_tools_of_anthropics_servers_are_left_out(
    client: TestClient, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    answers._log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        responses = [post(client, tools=[SEARCH, WEATHER, SEARCH | {"name": "again"}]) for _ in range(2)]
    for response in responses:
        assert response.status_code == 200
        assert json.loads(response.headers["x-warnings"]) == [
            "this server has no tools of type 'web_search_20250305': they were left out"
        ]
    assert "get_weather" in engine.last_prompt and "web_search" not in engine.last_prompt
    assert len([record for record in caplog.records if "web_search_20250305" in record.message]) == 1
    alone = post(client, tools=[SEARCH])
    assert alone.status_code == 400 and "web_search_20250305" in alone.json()["error"]["message"]
    assert "x-warnings" not in post(client, tools=[WEATHER]).headers


def found(*names: str) -> list[Any]:
    """A conversation in which a search has found tools."""
    use = {"type": "tool_use", "id": "c1", "name": "ToolSearch", "input": {"query": "weather"}}
    references = [{"type": "tool_reference", "tool_name": name} for name in names]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": references}
    return [*HELLO, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]


@covers("ToolParam", "defer_loading", "input_examples")
@covers("ToolReferenceParam", "tool_name")
def test_a_deferred_tool_is_offered_once_it_was_found(client: TestClient, engine: ScriptedEngine) -> None:
    """And defined where it was found, so that the prompt's beginning stays what it was."""
    search = {"name": "ToolSearch", "input_schema": {"type": "object"}, "input_examples": [{"query": "rain"}]}
    tools = [search, WEATHER | {"defer_loading": True}]
    engine.reply = CALL
    assert "tool_use" not in post(client, tools=tools, max_tokens=500).json()["stop_reason"]
    before = engine.last_prompt
    assert "get_weather" not in before and '{"query": "rain"}' in before.replace("\\", "")
    answer = post(client, tools=tools, messages=found("get_weather"), max_tokens=500).json()
    assert answer["stop_reason"] == "tool_use" and answer["content"][-1]["input"] == {"city": "Paris"}
    after = engine.last_prompt
    assert after.startswith(before.removesuffix("[assistant]")) and '"name": "get_weather"' in after
    on_servers = [*tools, {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}]
    assert post(client, tools=on_servers).status_code == 200
    assert "get_weather" in engine.last_prompt.partition("[user]")[0], "nobody here would find it"
    assert post(client, tools=tools, messages=found("gone")).status_code == 200


@covers("MessageParam", "clear_at")
def test_a_systems_message_for_one_turn(client: TestClient, engine: ScriptedEngine) -> None:
    note = {"role": "system", "content": "Hurry.", "clear_at": "next_user_message"}
    post(client, messages=[*HELLO, note])
    assert "[system]Hurry." in engine.last_prompt
    post(client, messages=[*HELLO, note, {"role": "assistant", "content": "Paris."}, *HELLO])
    assert "Hurry" not in engine.last_prompt
    wrong = post(client, messages=[HELLO[0] | {"clear_at": "never"}])
    assert "clear_at is for messages of role 'system'" in wrong.json()["error"]["message"]


@covers("MessageParam", "output_config")
def test_a_systems_message_says_the_effort_of_its_turn() -> None:
    hard = {"role": "system", "output_config": {"effort": "high"}}
    use = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "x"}
    loop = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]

    def effort(*messages: Any) -> Any:
        body = {"max_tokens": 9, "messages": [*HELLO, *messages], "output_config": {"effort": "low"}}
        return routes.conversation(MessagesRequest.model_validate(body)).rendering.variables["reasoning_effort"]

    assert effort() == effort(hard, *loop, *HELLO) == "low"
    assert effort(hard) == effort(hard, *loop) == effort({"content": "Hurry."} | hard) == "high"
    for wrong in ({"role": "system", "output_config": {}}, {"role": "user", "content": "x"} | {"output_config": {}}):
        with pytest.raises(ValueError, match=r"content is required|output_config is for messages of role 'system'"):
            effort(wrong)


@covers("MessagesRequest", "diagnostics")
@covers("Diagnostics", "previous_message_id")
@pytest.mark.parametrize("stream", [False, True])
def test_diagnostics_of_the_cache_are_not_available(client: TestClient, stream: bool) -> None:
    first = post(client, diagnostics={"previous_message_id": None}, stream=stream).text
    second = post(client, diagnostics={"previous_message_id": "msg_1"}, stream=stream).text
    assert "cache_miss_reason" not in first
    assert '"diagnostics":{"cache_miss_reason":{"type":"unavailable"}}' in second


def test_many_tools_with_long_names() -> None:
    tools = [WEATHER | {"name": f"mcp__{at:0123d}"} for at in range(200)]
    body = MessagesRequest.model_validate({"max_tokens": 9, "messages": HELLO, "tools": tools})
    assert [tool.name for tool in routes.conversation(body).tools] == [tool["name"] for tool in tools]


def test_the_sdk_goes_on_without_a_thread(sdk: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError) as caught:
        sdk.beta.messages.create(model="fake", max_tokens=50, messages=HELLO, thread={"type": "create"})
    assert caught.value.error_code == "thread_unsupported_request" and caught.value.request_id
    assert not engine.seen
    thread = sdk.beta.messages.thread(model="fake", max_tokens=50, unsupported_request_behavior="continue_unthreaded")
    for _ in range(2):
        thread.send(*HELLO)
    assert engine.last_prompt.count("capital of France?") == 2
