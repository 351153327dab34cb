"""Custom tools, namespaces, and what is left of the tools that only OpenAI runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from openai.types.responses import Response

from tests.serving.fake_engine import REPLY, ByteTokenizer, FakeEngine
from tests.serving.responses.shared import PARSERS, WEATHER, events_of, prompt_text, types
from tests.support.covers import covers

TEMPLATE = (
    "{% for t in tools or [] %}({{ t.function.name }}: {{ t.function.description }}){% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}"
    "{% endfor %}[assistant]"
)
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "say " /[a-z\\n]+/'}
SAY = {"type": "custom", "name": "say", "description": "Says it", "format": GRAMMAR}
VOICE = {"type": "namespace", "name": "voice", "description": "A voice.", "tools": [WEATHER, SAY]}


def calling(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def engine(roomy: Callable[..., FakeEngine]) -> FakeEngine:
    engine = roomy(reply=calling("say", input="say a\nb"))
    engine.tokenizer = ByteTokenizer(TEMPLATE)
    return engine


@pytest.fixture
def client(make_client: Callable[..., TestClient], engine: FakeEngine, tmp_path: Path) -> TestClient:
    return make_client(engine, data_dir=tmp_path, **PARSERS)


def grammar(engine: FakeEngine) -> str:
    outputs: Any = engine.seen[-1][1].structured_outputs
    return outputs.grammar


def respond(client: TestClient, status: int = 200, **body: Any) -> Any:
    answer = client.post("/v1/responses", json={"input": "hi"} | body)
    assert answer.status_code == status, answer.text
    return answer.json()


@covers("CustomTool", "name", "description", "format")
@covers("GrammarDefinition", "syntax", "definition")
@covers("CustomToolCallItem", "call_id", "name", "input", "status")
@covers("FunctionCallOutputItem", "type")
def test_a_custom_tool_is_called_with_a_text(client: TestClient, engine: FakeEngine) -> None:
    first = respond(client, tools=[SAY])
    Response.model_validate(first)
    (item,) = first["output"]
    assert first["tools"] == [SAY] and item.pop("id").startswith("ctc_") and item.pop("call_id")
    assert item == {"type": "custom_tool_call", "status": "completed", "name": "say", "input": "say a\nb"}
    told = prompt_text(engine)
    assert "(say: Says it" in told and f"this grammar (Lark):\n{GRAMMAR['definition']})" in told
    assert "say " in grammar(engine)
    call = first["output"][0] | {"id": "ctc_1", "call_id": "c"}
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": "said", "name": "say"}
    engine.reply = REPLY
    respond(client, input=[{"role": "user", "content": "hi"}, call, output], tools=[SAY])
    assert '<say {"input": "say a\\nb"}>[tool]said' in prompt_text(engine)


def test_the_events_of_a_custom_call(client: TestClient, engine: FakeEngine) -> None:
    events = events_of(client, input="hi", tools=[SAY])
    assert list(dict.fromkeys(types(events)))[2:] == [
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    deltas = [event["delta"] for event in events if event["type"].endswith("input.delta")]
    done = next(event for event in events if event["type"].endswith("input.done"))
    assert len(deltas) > 3 and "".join(deltas) == done["input"] == "say a\nb"


@covers("ClientToolFields", "allowed_callers")
@covers("ClientToolFields", "defer_loading")
@covers("FunctionTool", "output_schema")
def test_what_says_nothing_to_a_model_changes_nothing(client: TestClient, engine: FakeEngine) -> None:
    inert = {"allowed_callers": ["direct"], "defer_loading": True}
    for more in ({}, inert):
        respond(client, tools=[SAY | more, WEATHER | more | ({"output_schema": {}} if more else {})])
    assert prompt_text(engine) == prompt_text(engine, -2)


@covers("NamespaceTool", "name", "description", "tools")
@covers("FunctionCallItem", "namespace")
@covers("CustomToolCallItem", "namespace")
def test_tools_of_a_namespace_have_its_name_in_front(client: TestClient, engine: FakeEngine) -> None:
    engine.reply = calling("voice__weather", city="Rome")
    first = respond(client, tools=[VOICE])
    Response.model_validate(first)
    (call,) = first["output"]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "weather", "voice")
    assert "(voice__weather: A voice.\nThe weather in a city)(voice__say: Says it" in prompt_text(engine)
    engine.reply = calling("voice__say", input="say a")
    (said,) = respond(client, tools=[VOICE], tool_choice={"type": "custom", "name": "voice__say"})["output"]
    assert (said["type"], said["name"], said["namespace"]) == ("custom_tool_call", "say", "voice")
    outputs = [
        {"type": f"{one['type']}_output", "call_id": one["call_id"], "output": "ok", "namespace": "voice"}
        for one in (call, said)
    ]
    engine.reply = REPLY
    kept = respond(client, input=[{"role": "user", "content": "hi"}, call, said, *outputs], tools=[VOICE])
    assert '<voice__weather {"city": "Rome"}><voice__say {"input": "say a"}>' in prompt_text(engine)
    listed = client.get(f"/v1/responses/{kept['id']}/input_items?order=asc").json()["data"]
    assert [item.get("namespace") for item in listed] == [None, "voice", "voice", None, None]


@covers("ChosenFunction", "type", "name")
@pytest.mark.parametrize("kind", ["function", "custom"])
def test_a_tool_is_chosen_by_name(client: TestClient, engine: FakeEngine, kind: str) -> None:
    respond(client, tools=[SAY, WEATHER], tool_choice={"type": kind, "name": "say"})
    assert "weather" not in grammar(engine)
    error = respond(client, 400, tools=[WEATHER], tool_choice={"type": kind, "name": "say"})["error"]
    assert error["param"] == "tool_choice.name" and "tools has weather" in error["message"]


@pytest.mark.parametrize(
    ("tools", "param", "told"),
    [
        ([SAY | {"format": GRAMMAR | {"definition": "start: x"}}], "tools[0].format.definition", "cannot be enforced"),
        ([VOICE, WEATHER | {"name": "voice__say"}], "tools[1].name", "twice"),
        ([VOICE | {"tools": [SAY, SAY]}], "tools[0].tools[1].name", "twice"),
        ([VOICE | {"tools": [{"type": "mcp", "server_label": "a"}]}], "tools[0].tools[0]", "custom"),
        ([{"type": "web_search"}, {"type": "shell"}], "tools[0].type", "'web_search', which this server does not run"),
        ([{"type": "telepathy"}], "tools[0].type", "function, custom, namespace, mcp"),
    ],
)
def test_tools_that_cannot_be_offered(client: TestClient, tools: list[Any], param: str, told: str) -> None:
    error = respond(client, 400, tools=tools)["error"]
    assert error["param"] == param and told in error["message"], error


@covers("HostedTool", "type")
def test_tools_that_only_openai_runs_are_left_out(
    client: TestClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    hosted = [{"type": "web_search", "external_web_access": True}, {"type": "tool_search", "execution": "client"}]
    with caplog.at_level(logging.WARNING):
        for stream in (False, True):
            body = {"input": "hi", "tools": [*hosted, SAY], "stream": stream}
            answer = client.post("/v1/responses", json=body)
            warnings = json.loads(answer.headers["X-Warnings"])
            assert answer.status_code == 200 and len(warnings) == 2 and "type 'web_search'" in warnings[0]
    assert sum("type 'tool_search'" in line for line in caplog.messages) <= 1
    assert "search" not in prompt_text(engine) and "(say" in prompt_text(engine)
    chosen = {"type": "allowed_tools", "mode": "auto", "tools": [hosted[0], {"type": "custom", "name": "say"}]}
    assert respond(client, tools=[*hosted, SAY], tool_choice=chosen)["tools"] == [*hosted, SAY]
    assert "X-Warnings" not in client.post("/v1/responses", json={"input": "hi", "tools": [SAY]}).headers


@covers("HostedItem", "type", "call_id", "status")
def test_items_of_such_tools_are_taken_back(client: TestClient, engine: FakeEngine) -> None:
    action = {"type": "exec", "command": ["ls"], "env": {}}
    items: list[Any] = [
        {"type": "local_shell_call", "id": "l", "call_id": "c1", "status": "completed", "action": action},
        {"type": "local_shell_call_output", "id": "c1", "output": "a.txt"},
        {"type": "apply_patch_call", "call_id": "c2", "status": "completed", "operation": {"type": "delete_file"}},
        {"type": "apply_patch_call_output", "call_id": "c2", "status": "completed", "output": None},
        {"type": "tool_search_call", "call_id": "c3", "arguments": {"query": "q"}},
        {"type": "tool_search_output", "call_id": "c3", "tools": [WEATHER]},
        {"type": "shell_call", "call_id": "c4", "action": {"commands": ["unanswered"]}},
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "hidden"}},
        {"role": "user", "content": "go on"},
    ]
    kept = respond(client, input=items, tools=[SAY])
    told = prompt_text(engine)
    assert '<local_shell {"type": "exec", "command": ["ls"], "env": {}}>[tool]a.txt' in told
    assert '<apply_patch {"type": "delete_file"}>[tool]null' in told
    assert '<tool_search {"query": "q"}>[tool][{"type": "function", "name": "weather"' in told
    assert "unanswered" not in told and "hidden" not in told
    listed = client.get(f"/v1/responses/{kept['id']}/input_items?order=asc").json()["data"]
    assert [item["type"] for item in listed[:-1]] == [item["type"] for item in items[:-1]]
    assert listed[0]["action"] == action and listed[7]["action"]["query"] == "hidden"


@covers("MessageItem", "phase")
@covers("FunctionCallOutputItem", "name", "namespace")
@covers("InputText", "prompt_cache_breakpoint")
@covers("CacheBreakpoint", "mode", "ttl")
def test_marks_of_openais_own_service_change_nothing(client: TestClient, engine: FakeEngine) -> None:
    mark = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"}}
    for more in (False, True):
        text = {"type": "input_text", "text": "hi"} | (mark if more else {})
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": "c", "output": [text]}
        named = {"name": "f", "namespace": "n"} if more else {}
        said = {"role": "assistant", "content": "a"} | ({"phase": "commentary"} if more else {})
        respond(client, input=[{"role": "user", "content": [text]}, said, call, output | named])
    assert prompt_text(engine) == prompt_text(engine, -2)


@covers("ReasoningConfig", "context", "mode")
@covers("CacheOptions", "mode", "ttl", "prewarm")
@covers("BackgroundOptions", "completion_window", "continuation_id")
@covers("ImageOptions", "context_compression")
def test_settings_of_openais_own_service_change_nothing(client: TestClient, engine: FakeEngine) -> None:
    respond(client)
    respond(
        client,
        reasoning={"context": "all_turns", "mode": "standard"},
        prompt_cache_options={"mode": "explicit", "ttl": "12h", "prewarm": False},
        background_options={"completion_window": "8h", "continuation_id": "x"},
        image={"context_compression": "disabled"},
    )
    assert engine.seen[0] == engine.seen[1]


@pytest.mark.parametrize("status", [None, "incomplete"])
def test_a_call_that_an_answers_end_has_cut_is_taken_back(
    client: TestClient, engine: FakeEngine, status: str | None
) -> None:
    engine.reply = calling("weather", city="Reykjavik and Rome")
    cut = respond(client, tools=[WEATHER], max_output_tokens=58)
    (item,) = cut["output"]
    assert (cut["status"], item["status"]) == ("incomplete", "incomplete") and not item["arguments"].endswith("}")
    engine.reply = REPLY
    item["status"] = status
    respond(client, input=[{"role": "user", "content": "hi"}, item, {"role": "user", "content": "go on"}])
    assert prompt_text(engine) == "[user]hi[user]go on[assistant]"
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "unfinished"}
    respond(client, input=[item, output, {"role": "user", "content": "go on"}])
    assert '<weather {"city": "Reykja' in prompt_text(engine) and "[tool]unfinished" in prompt_text(engine)


@covers("POST /v1/responses/compact")
@covers("CompactionItem", "type", "encrypted_content")
def test_a_conversation_is_made_short(client: TestClient, engine: FakeEngine) -> None:
    engine.reply = "They spoke of Rome."
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Tell me of Rome."},
        {"role": "assistant", "content": "It is old."},
    ]
    answer = client.post("/v1/responses/compact", json={"input": turns, "instructions": "I", "tools": [SAY]})
    assert answer.status_code == 200, answer.text
    made = answer.json()
    assert made["object"] == "response.compaction" and made["usage"]["output_tokens"] == len(engine.reply)
    asked = prompt_text(engine)
    assert asked.startswith(
        "[system]I[system]Be brief.[user]Tell me of Rome.[assistant]It is old.[user]Write a summary"
    )
    user, compaction = made["output"]
    assert (user["role"], compaction["type"]) == ("user", "compaction")
    assert compaction["encrypted_content"] == f"jaxllm:{engine.reply}"
    engine.reply = REPLY
    for kind in ("compaction", "compaction_summary"):
        items = [*turns, compaction | {"type": kind}, {"role": "user", "content": "Go on"}]
        respond(client, input=items)
        assert prompt_text(engine) == (
            "[system]Be brief.[user]Tell me of Rome.[user]This is a summary of the conversation before:\n"
            "They spoke of Rome.[user]Go on[assistant]"
        )
    missing = client.post("/v1/responses/compact", json={"input": []}).json()["error"]
    assert missing["param"] == "input"
