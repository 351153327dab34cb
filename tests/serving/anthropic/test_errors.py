"""What is refused or fails, in Anthropic's shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from fastapi.testclient import TestClient

from tests.serving.anthropic.shared import CONTEXT, HELLO, WEATHER, ScriptedEngine

if TYPE_CHECKING:
    import anthropic

ALONE = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}


RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "x"}


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}


def turns(*contents: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[at % 2], "content": content} for at, content in enumerate(contents)]}


REFUSALS = [
    ({"max_tokens": None}, "max_tokens is required"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"messages": []}, "messages is []"),
    ({"n": 2}, "unknown field 'n'"),
    ({"stop": ["a"]}, "unknown field 'stop'"),
    ({"container": "c"}, "container is not supported"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers is not supported"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"stop_sequences": ["a"] * 65}, "stop_sequences"),
    (turns(*["x"] * 9000), "messages has 9000 messages"),
    ({"temperature": -1}, "temperature is -1"),
    ({"top_k": 1.5}, "top_k is 1.5"),
    ({"top_p": 1.5}, "top_p is 1.5"),
    ({"metadata": {"team": "x"}}, "metadata.team"),
    (turns([IMAGE]), "messages[0].content[0] is an image, and this model sees no images"),
    (turns([{"type": "image"}]), "messages[0].content[0].source"),
    (turns([{"type": "poem"}]), "messages[0].content[0]"),
    (turns([{"type": "text"}]), "messages[0].content[0].text is required"),
    (turns("x", [RESULT]), "messages[1].content[0].type: messages of role 'assistant'"),
    (turns([RESULT]), "no call awaits"),
    (turns("x", [ALONE]), "c1"),
    (turns("x", [ALONE], "y"), "messages[2] must begin with tool_result blocks for c1"),
    (turns("x", [ALONE], [{"type": "text", "text": "y"}, RESULT]), "must come first"),
    (turns("x", [ALONE, ALONE], [RESULT]), "ids must differ"),
    (turns("x", [ALONE], [RESULT | {"content": ["a", IMAGE]}]), "messages[2].content[0].content[0]"),
    (turns("x", [ALONE], [RESULT | {"content": [IMAGE]}]), "messages[2].content[0].content[0] is an image"),
    (turns("x", [{"type": "compaction", "content": "x"}], "y"), "'compaction'"),
    ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "strategy 'compact_20260112' is not supported"),
    ({"speed": "warp"}, "speed is 'warp'"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
    ({"tools": [WEATHER | {"name": "a b"}]}, "tools[0].name"),
    ({"tools": [WEATHER | {"input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
    (
        {"tools": [WEATHER | {"input_schema": {"type": "object", "properties": {"a": {"type": "nope"}}}}]}
        | {"tool_choice": {"type": "any"}},
        f"tools[0].input_schema (of {WEATHER['name']!r}) cannot be enforced: Invalid type: nope",
    ),
    ({"tools": [WEATHER, WEATHER]}, "names must differ"),
    ({"tools": [WEATHER | {"defer_loading": 1}]}, "tools[0].defer_loading"),
    ({"tools": [WEATHER | {"name": "a" * 129}]}, "tools[0].name"),
    ({"tool_choice": {"type": "any"}}, "needs tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name is 'f'"),
    ({"tools": [WEATHER], "tool_choice": {"type": "some"}}, "'auto'"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is required"),
    ({"thinking": {"type": "enabled", "budget_tokens": 99}}, "less than max_tokens"),
    ({"thinking": {"type": "between_tools"}}, "'adaptive'"),
    ({"thinking": {"type": "adaptive"}, **turns("x", "y")}, "the last message is the assistant's"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort is 'huge'"),
    ({"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}}, "thinking is disabled"),
    ({"service_tier": "gold"}, "service_tier is 'gold'"),
]


def error_of(response: Any, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error", "request_id"} and body["type"] == "error"
    assert response.headers["request-id"] == response.headers["x-request-id"] == body["request_id"]
    assert body["error"].keys() == {"type", "message"} and body["error"]["type"] == kind
    assert "\n" not in body["error"]["message"]
    return body["error"]["message"]


@pytest.mark.parametrize(("fields", "says"), REFUSALS, ids=lambda value: str(value)[:40])
def test_refusals(client: TestClient, fields: dict[str, Any], says: str) -> None:
    response = client.post("/v1/messages", json={"max_tokens": 50, "messages": HELLO} | fields)
    assert says in error_of(response, 400, "invalid_request_error")


def test_error_shapes(make_client: Callable[..., TestClient], engine: ScriptedEngine) -> None:
    client = make_client(engine, max_body_size=1000)
    body = {"max_tokens": 50, "messages": HELLO}

    def post(**fields: Any) -> Any:
        return client.post("/v1/messages", json=body | fields)

    assert "'gpt'" in error_of(post(model="gpt"), 404, "not_found_error")
    error_of(post(system="x" * 2000), 413, "request_too_large")
    error_of(client.post("/v1/messages", content=b"{", headers={"content-type": "application/json"}), 400,
             "invalid_request_error")  # fmt: skip
    error_of(client.post("/v1/messages", content=b"{}"), 415, "invalid_request_error")
    error_of(client.get("/v1/messages"), 405, "invalid_request_error")
    engine.queue_limit = 0
    for stream in (False, True):
        response = post(stream=stream)
        error_of(response, 429, "rate_limit_error")
        assert response.headers["retry-after"]
    engine.die()
    for stream in (False, True):
        error_of(post(stream=stream), 529, "overloaded_error")


def test_prompt_longer_than_the_context(client: TestClient) -> None:
    response = client.post("/v1/messages", json={"max_tokens": 50, **turns("x" * 5000)})
    message = error_of(response, 400, "invalid_request_error")
    assert "50" in message and str(CONTEXT) in message


def test_error_in_mid_stream(sdk: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    import anthropic

    engine.fail_after = 5
    with (
        pytest.raises(anthropic.APIStatusError) as caught,
        sdk.messages.stream(model="fake", max_tokens=50, messages=HELLO) as stream,
    ):
        stream.get_final_message()
    assert caught.value.type == "api_error" and "caught fire" in str(caught.value)
    with pytest.raises(anthropic.InternalServerError):
        sdk.messages.create(model="fake", max_tokens=50, messages=HELLO)


def test_an_answer_that_the_server_cut_short_is_an_error(client: TestClient, engine: ScriptedEngine) -> None:
    engine.aborts = True
    body = {"max_tokens": 50, "messages": HELLO}
    assert "stopped" in error_of(client.post("/v1/messages", json=body), 529, "overloaded_error")
    last = client.post("/v1/messages", json=body | {"stream": True}).text.rstrip("\n").split("\n\n")[-1]
    assert last.startswith("event: error\n") and "overloaded_error" in last
