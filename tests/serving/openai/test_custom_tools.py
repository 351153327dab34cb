"""Custom tools on /v1/chat/completions, calls that an answer's end has cut, and long lists of tools with long names."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient
from openai.types.chat import ChatCompletion

from tests.serving.fake_engine import ByteTokenizer, FakeEngine
from tests.serving.openai.test_chat import events, post
from tests.serving.openai.test_tools import TEMPLATE, TOOL
from tests.support.covers import covers

GRAMMAR = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "say [a-z\\n]+"}}
SAY = {"type": "custom", "custom": {"name": "say", "description": "Says it", "format": GRAMMAR}}
CALL = '<tool_call>\n{"name": "say", "arguments": {"input": "say a\\nb"}}\n</tool_call>'
USER = {"role": "user", "content": "hi"}


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine(reply=CALL)
    engine.tokenizer = ByteTokenizer(TEMPLATE)
    engine.info.max_model_len = 400_000
    return engine


def prompt(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.seen[-1][0], skip_special_tokens=False)


@covers("ChatCustomTool", "custom")
@covers("CustomDefinition", "name", "description", "format")
@covers("GrammarFormat", "grammar")
@covers("HistoryToolCall", "type", "custom")
@covers("CustomCall", "name", "input")
def test_a_custom_tool_is_called_with_a_text(client: TestClient, engine: FakeEngine) -> None:
    answer = post(client, tools=[SAY]).json()
    ChatCompletion.model_validate(answer)
    choice = answer["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "say", "input": "say a\nb"})
    assert "function" not in call and choice["finish_reason"] == "tool_calls"
    assert "Says it" in prompt(engine) and "this regular expression" in prompt(engine)
    assert "say " in engine.seen[-1][1].structured_outputs.grammar
    result = {"role": "tool", "tool_call_id": call["id"], "content": "said"}
    post(client, tools=[SAY], messages=[USER, choice["message"], result])
    assert json.dumps({"name": "say", "arguments": {"input": "say a\nb"}}) in prompt(engine).partition("[user]hi")[2]


def test_a_stream_of_a_custom_call_and_a_function_s(client: TestClient, engine: FakeEngine) -> None:
    engine.reply = f'{CALL}\n<tool_call>\n{{"name": "weather", "arguments": {{"city": "Rome"}}}}\n</tool_call>'
    deltas = [chunk["choices"][0]["delta"] for chunk in events(client, tools=[SAY, TOOL])]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    first, *others = (call for call in calls if call["index"] == 0)
    assert (first["type"], first["custom"]) == ("custom", {"name": "say", "input": ""}) and first["id"]
    assert len(others) > 3 and "".join(call["custom"]["input"] for call in others) == "say a\nb"
    functions = [call["function"] for call in calls if call["index"] == 1]
    assert "".join(part["arguments"] for part in functions) == '{"city": "Rome"}'


@covers("NamedCustomChoice", "custom")
def test_a_custom_tool_is_chosen_by_name(client: TestClient, engine: FakeEngine) -> None:
    choice = {"type": "custom", "custom": {"name": "say"}}
    post(client, tools=[SAY, TOOL], tool_choice=choice)
    assert "weather" not in engine.seen[-1][1].structured_outputs.grammar
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [choice]}}
    post(client, tools=[SAY, TOOL], tool_choice=allowed)
    assert "weather" not in prompt(engine)


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"tools": [{"type": "telepathy"}]}, "tools[0].type", "'custom'"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "lark"}}}]},
            "tools[0].custom.format",
            "grammar",
        ),
        (
            {"tools": [json.loads(json.dumps(SAY).replace("say [", "say (["))]},
            "tools[0].custom.format.grammar.definition",
            "cannot be enforced",
        ),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom"}]}]},
            "messages[1].tool_calls[0].custom",
            "custom is required",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a" * 129}}]}, "tools[0].function.name", "pattern"),
    ],
)
def test_refusals_name_the_field(client: TestClient, body: dict[str, Any], param: str, told: str) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": [USER]} | body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param.removesuffix(".type")) and told in answer.text


def test_a_call_that_an_answers_end_has_cut_is_taken_back(client: TestClient, engine: FakeEngine) -> None:
    engine.reply = '<tool_call>\n{"name": "weather", "arguments": {"city": "Reykjavik and Rome"}}\n</tool_call>'
    choice = post(client, tools=[TOOL], max_tokens=60).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "length" and not call["function"]["arguments"].endswith("}")
    for after in ([], [USER]):
        post(client, messages=[USER, choice["message"], *after])
        assert prompt(engine) == "[user]hi[assistant]" + "[user]hi" * len(after) + "[assistant]"
    result = {"role": "tool", "tool_call_id": call["id"], "content": "unfinished"}
    post(client, messages=[USER, choice["message"], result])
    assert '"city": "Rey' in prompt(engine) and "[tool]unfinished" in prompt(engine)
    whole = {**call, "id": "w", "function": {"name": "weather", "arguments": "{}"}}
    answer = client.post(
        "/v1/chat/completions", json={"messages": [USER, {"role": "assistant", "tool_calls": [call, whole]}, USER]}
    )
    assert answer.status_code == 400 and "the calls w await their results" in answer.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_many_tools_with_long_names(client: TestClient, engine: FakeEngine, path: str) -> None:
    functions = [{"name": f"{at:04}" + "x" * 124} for at in range(300)]
    chats = path.endswith("completions")
    body: dict[str, Any] = {"messages": [USER]} if chats else {"input": "hi"}
    tools = [{"type": "function", "function": one} if chats else {"type": "function", **one} for one in functions]
    answer = client.post(path, json=body | {"tools": tools})
    assert answer.status_code == 200, answer.text
    assert functions[-1]["name"] in prompt(engine)


@covers("ChatRequest", "function_call")
@covers("Cacheable", "prompt_cache_breakpoint")
@covers("StreamOptions", "include_obfuscation")
def test_settings_of_openais_own_service(client: TestClient, engine: FakeEngine) -> None:
    marked = {"type": "text", "text": "hi", "prompt_cache_breakpoint": {"mode": "explicit"}}
    post(client, messages=[USER])
    post(client, messages=[{"role": "user", "content": [marked]}], function_call="none")
    assert engine.seen[0] == engine.seen[1]
    for padded in (False, True):
        chunks = events(client, tools=[SAY], stream_options={"include_obfuscation": padded})
        assert all(("obfuscation" in chunk) == padded for chunk in chunks)
    lengths = {len(json.dumps(one["choices"], separators=(",", ":"))) + len(one["obfuscation"]) for one in chunks}
    assert all(length % 32 == 0 for length in lengths)


def test_messages_of_one_role_are_joined_for_templates_that_want_them_alternating(
    client: TestClient, engine: FakeEngine
) -> None:
    engine.tokenizer = ByteTokenizer(
        "{% for m in messages %}{% if m.role == 'user' and loop.previtem is defined and loop.previtem.role == 'user' %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    system = {"role": "system", "content": "S"}
    post(client, messages=[system, system, USER, USER, {"role": "assistant", "content": "a"}, USER])
    assert prompt(engine) == "[system]S\n\nS[user]hi\n\nhi[assistant]a[user]hi"
