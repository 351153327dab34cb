"""Tools and reasoning on /v1/chat/completions: shapes, streams, what the engine is asked for, and the prompt."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.serving.fake_engine import ByteTokenizer, FakeEngine
from tests.serving.openai.test_chat import events, post
from tests.support.covers import covers

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather now",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TWO_CALLS = CALL + "\n" + CALL.replace("Paris", "Rome")
TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% if enable_thinking is false %}(off){% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}{% endfor %}[assistant]"
)
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.tokenizer = ByteTokenizer(TEMPLATE)
    engine.info.max_model_len = 4096
    return engine


@pytest.fixture
def client(make_client: Any, engine: FakeEngine) -> TestClient:
    return make_client(engine, reasoning_parser="think")


def prompt(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.seen[-1][0], skip_special_tokens=False)


def grammar(engine: FakeEngine) -> Any:
    return engine.seen[-1][1].structured_outputs


@covers("ToolFields", "tools")
@covers("ChatTool", "function")
def test_a_whole_call(client: TestClient, engine: FakeEngine) -> None:
    engine.reply = CALL
    choice = post(client, tools=[TOOL]).json()["choices"][0]
    (call,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None}
    assert choice["finish_reason"] == "tool_calls"
    assert call["id"].startswith("call_") and call["type"] == "function"
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}


def test_a_stream_of_calls(client: TestClient, engine: FakeEngine) -> None:
    engine.reply = f"<think>\nHm.\n</think>\nLet me see.\n{TWO_CALLS}"
    role, *chunks, finish = events(client, tools=[TOOL])
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (finish["choices"][0]["delta"], finish["choices"][0]["finish_reason"]) == ({}, "tool_calls")
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(d.get("reasoning", "") for d in deltas) == "Hm."
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "Hm."
    assert "".join(d.get("content") or "" for d in deltas).strip() == "Let me see."
    openings = [d for d in deltas if "id" in d.get("tool_calls", [{}])[0]]
    assert len(openings) == 2 and all(d["content"] is None and len(d) == 2 for d in openings)
    assert all(len(d) == (2 if "reasoning" in d else 1) for d in deltas if d not in openings)
    calls = [d["tool_calls"][0] for d in deltas if "tool_calls" in d]
    for index, city in enumerate(("Paris", "Rome")):
        first, *fragments = [call for call in calls if call["index"] == index]
        assert first.keys() == {"index", "id", "type", "function"} and first["type"] == "function"
        assert first["function"] == {"name": "weather", "arguments": ""}
        assert len(fragments) > 1 and all(f.keys() == {"index", "function"} for f in fragments)
        assert "".join(f["function"]["arguments"] for f in fragments) == f'{{"city": "{city}"}}'


def test_a_stream_that_must_call_opens_without_content(client: TestClient, engine: FakeEngine) -> None:
    engine.reply = CALL
    for choice in ("required", NAMED):
        role, *_ = events(client, tools=[TOOL], tool_choice=choice)
        assert role["choices"][0]["delta"] == {"role": "assistant", "content": None}


@pytest.mark.parametrize("reply", [CALL, f"Hm. {TWO_CALLS} done", "<think>a</think>b", "<tool_call>oops", "a" * 50])
def test_no_logprob_and_no_token_is_lost(client: TestClient, engine: FakeEngine, reply: str) -> None:
    engine.reply = reply
    ids = engine.tokenizer.encode(reply, False)
    whole = post(client, tools=[TOOL], logprobs=True, return_token_ids=True).json()["choices"][0]
    chunks = events(client, tools=[TOOL], logprobs=True, return_token_ids=True)
    mine = [chunk["choices"][0] for chunk in chunks[1:]]
    streamed = [entry for choice in mine if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert streamed == whole["logprobs"]["content"] and len(streamed) == len(ids)
    assert [i for choice in mine for i in choice["token_ids"]] == whole["token_ids"] == ids
    assert chunks[0]["prompt_token_ids"] == engine.seen[0][0]


def test_reasoning_is_split_and_counted(client: TestClient, engine: FakeEngine) -> None:
    engine.reply = "<think>abcd</think>Paris"
    body = post(client).json()
    message = body["choices"][0]["message"]
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == ("Paris", "abcd", "abcd")
    assert body["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": 6,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    }  # a token a byte, and two markers
    assert body["usage"]["completion_tokens"] == 11
    usage = events(client, stream_options={"include_usage": True})[-1]["usage"]
    assert usage == body["usage"]


@covers("ChatRequest", "include_reasoning")
def test_include_reasoning_false_leaves_it_out(client: TestClient, engine: FakeEngine) -> None:
    engine.reply = "<think>abcd</think>Paris"
    body = post(client, include_reasoning=False).json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Paris", "refusal": None}
    assert body["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": 6,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    }
    assert not any("reasoning" in c["choices"][0]["delta"] for c in events(client, include_reasoning=False))


@covers("ChatRequest", "separate_reasoning")
def test_separate_reasoning_false_leaves_it_in_the_content(client: TestClient, engine: FakeEngine) -> None:
    engine.reply = "<think>abcd</think>Paris"
    message = post(client, separate_reasoning=False).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": engine.reply, "refusal": None}
    deltas = [chunk["choices"][0]["delta"] for chunk in events(client, separate_reasoning=False)]
    assert "".join(delta.get("content") or "" for delta in deltas) == engine.reply
    assert post(client, separate_reasoning=True).json()["choices"][0]["message"]["content"] == "Paris"


def test_separate_reasoning_false_still_finds_calls(client: TestClient, engine: FakeEngine) -> None:
    engine.reply = f"<think>abcd</think>{CALL}"
    message = post(client, separate_reasoning=False, tools=[TOOL]).json()["choices"][0]["message"]
    assert message["content"] == "<think>abcd</think>" and len(message["tool_calls"]) == 1


def test_reasoning_on_a_channel_is_always_separate(make_client: Any, engine: FakeEngine) -> None:
    answer = post(make_client(engine, reasoning_parser="harmony"), separate_reasoning=False)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "separate_reasoning"


@covers("ChatRequest", "stream_reasoning")
@pytest.mark.parametrize("reply", ["<think>abcd</think>Paris", "<think>abcd"])
def test_stream_reasoning_false_sends_it_at_once(client: TestClient, engine: FakeEngine, reply: str) -> None:
    engine.reply = reply
    deltas = [chunk["choices"][0]["delta"] for chunk in events(client, stream_reasoning=False, logprobs=True)]
    thoughts = [delta["reasoning"] for delta in deltas if "reasoning" in delta]
    assert thoughts == ["abcd"]
    said = "".join(delta.get("content") or "" for delta in deltas)
    assert said == reply.partition("</think>")[2]


def test_a_template_that_opens_the_reasoning(client: TestClient, engine: FakeEngine) -> None:
    engine.tokenizer = ByteTokenizer(TEMPLATE + "<think>\n")
    engine.reply = "abcd</think>Paris"
    message = post(client).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("Paris", "abcd")


@covers("TemplateFields", "reasoning_effort", "thinking")
@covers("Thinking", "type")
@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, True),
        ({"thinking": True}, True),
        ({"thinking": {"type": "enabled"}}, True),
        ({"reasoning_effort": "high"}, True),
        ({"thinking": False}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"reasoning_effort": "none"}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}, "thinking": False}, True),
    ],
)
def test_thinking_reaches_the_template_and_the_grammar(
    client: TestClient, engine: FakeEngine, fields: dict[str, Any], thinks: bool
) -> None:
    post(client, **fields, response_format={"type": "json_object"})
    assert ("(off)" in prompt(engine)) == (not thinks)
    assert grammar(engine).after == ("</think>" if thinks else None)


@covers("ToolFields", "tool_choice")
@covers("NamedToolChoice", "function")
@covers("ToolName", "name")
@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("parallel", [True, False])
def test_calls_are_enforced(client: TestClient, engine: FakeEngine, choice: Any, parallel: bool) -> None:
    engine.reply = CALL
    post(client, tools=[TOOL, CLOCK], tool_choice=choice, parallel_tool_calls=parallel)
    constraint = grammar(engine)
    assert "weather" in constraint.grammar and ("clock" in constraint.grammar) == (choice == "required")
    assert constraint.after == "</think>"


STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "fields",
    [{"tool_choice": "required"}, {"tool_choice": NAMED}, {"tools": [STRICT]}],
    ids=["required", "named", "strict"],
)
@pytest.mark.parametrize("opened", [True, False], ids=["opened", "opens"])
@pytest.mark.parametrize("separate", [True, False], ids=["separate", "in the content"])
def test_a_call_that_the_model_only_thinks_of_is_not_returned(
    client: TestClient, engine: FakeEngine, fields: dict[str, Any], opened: bool, separate: bool
) -> None:
    """The constraint waits for </think>, so that the first call follows no schema."""
    engine.tokenizer = ByteTokenizer(TEMPLATE + "<think>\n" * opened)
    thought = f"Perhaps {CALL.replace('city', 'town')}?"
    engine.reply = f"{'' if opened else '<think>'}{thought}</think>\n\n{CALL}"
    fields = {"tools": [TOOL], "separate_reasoning": separate} | fields
    message = post(client, **fields).json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    left = {"content": None, "reasoning": thought}
    if not separate:
        left = {"content": engine.reply.removesuffix(f"\n\n{CALL}"), "reasoning": None}
    assert {name: message.get(name) for name in left} == left
    deltas = [chunk["choices"][0]["delta"] for chunk in events(client, **fields) if chunk["choices"]]
    streamed = {name: "".join(delta.get(name) or "" for delta in deltas) for name in left}
    assert streamed == {name: text or "" for name, text in left.items()}
    pieces = [piece["function"]["arguments"] for delta in deltas for piece in delta.get("tool_calls") or []]
    assert "".join(pieces) == call["function"]["arguments"]


@pytest.mark.parametrize("name", ["auto", "required"])
def test_a_tool_may_be_called_like_a_choice(client: TestClient, engine: FakeEngine, name: str) -> None:
    function = {"type": "function", "function": {"name": name}}
    post(client, tools=[CLOCK, function], tool_choice=function)
    assert "clock" not in grammar(engine).grammar


@covers("FunctionDefinition", "strict")
def test_auto_is_constrained_where_a_tool_is_strict(client: TestClient, engine: FakeEngine) -> None:
    post(client, tools=[TOOL])
    assert grammar(engine) is None
    post(client, tools=[STRICT])
    assert "weather" in grammar(engine).grammar


@covers("AllowedToolsChoice", "allowed_tools")
@covers("AllowedTools", "mode", "tools")
def test_allowed_tools_are_the_only_ones(client: TestClient, engine: FakeEngine) -> None:
    allowed = {"mode": "required", "tools": [NAMED]}
    engine.reply = CALL.replace("weather", "clock")
    fields = {"tools": [TOOL, CLOCK], "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    message = post(client, **fields).json()["choices"][0]["message"]
    assert "clock" not in grammar(engine).grammar and "clock" not in prompt(engine)
    assert "tool_calls" not in message and "clock" in message["content"]


def test_none_shows_no_tools_and_parses_none(client: TestClient, engine: FakeEngine) -> None:
    engine.reply = CALL
    choice = post(client, tools=[TOOL], tool_choice="none", skip_special_tokens=False).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
    assert "weather" not in prompt(engine)


@covers("ToolFields", "parallel_tool_calls")
def test_one_call_where_parallel_calls_are_off(client: TestClient, engine: FakeEngine) -> None:
    engine.reply = TWO_CALLS
    message = post(client, tools=[TOOL], parallel_tool_calls=False).json()["choices"][0]["message"]
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"city": "Paris"}']
    chunks = events(client, tools=[TOOL], parallel_tool_calls=False)
    calls = [c["choices"][0]["delta"]["tool_calls"][0] for c in chunks if "tool_calls" in c["choices"][0]["delta"]]
    assert {call["index"] for call in calls} == {0}


@pytest.mark.parametrize(
    ("constraint", "written"),
    [
        ({"response_format": {"type": "json_object"}}, 'answer_text: %json {"type": "object", "x'),
        ({"guided_choice": ["yes", "no"]}, '"yes" | "no"'),
        ({"guided_regex": "a/b"}, "/a\\/b/"),
    ],
)
def test_an_answer_in_a_format_or_a_call(
    client: TestClient, engine: FakeEngine, constraint: dict[str, Any], written: str
) -> None:
    assert post(client, tools=[TOOL], **constraint).status_code == 200
    assert "weather" in grammar(engine).grammar and written in grammar(engine).grammar
    post(client, tools=[TOOL], tool_choice="required", **constraint)
    assert written not in grammar(engine).grammar


def test_special_markers_stay_visible_to_the_parser_only_where_it_looks(client: TestClient, engine: FakeEngine) -> None:
    post(client, tools=[TOOL])
    post(client)
    with_tools, without = (set(params.shown_special_token_ids) for _, params, _ in engine.seen)
    assert with_tools == {258, 259, 260, 261} and without == {258, 259}


HISTORY = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "12 C"},
]


@covers("ChatMessageParam", "tool_calls", "tool_call_id")
@covers("HistoryToolCall", "id", "function")
@covers("FunctionCall", "name", "arguments")
def test_history_reaches_the_template(client: TestClient, engine: FakeEngine) -> None:
    assert post(client, messages=HISTORY, tools=[TOOL]).status_code == 200
    assert '"arguments": {"city": "Paris"}' in prompt(engine) and "[tool]12 C" in prompt(engine)


class TestTemplateWithoutTools:
    """The model's template knows none: the server describes them."""

    @pytest.fixture
    def engine(self, engine: FakeEngine) -> FakeEngine:
        engine.tokenizer = ByteTokenizer("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]")
        return engine

    def test_tools_are_described_in_the_prompt(self, client: TestClient, engine: FakeEngine) -> None:
        engine.reply = '{"name": "weather", "arguments": {"city": "Paris"}}'
        choice = post(client, tools=[TOOL]).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'
        assert prompt(engine).startswith("[user]You can call functions.") and '"Weather now"' in prompt(engine)
        assert '{"name": "function_name", "arguments": {"argument": "value"}}' in prompt(engine)
        assert prompt(engine).endswith("\n\nHi[assistant]")

    def test_in_the_system_message_if_there_is_one(self, client: TestClient, engine: FakeEngine) -> None:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        post(client, messages=messages, tools=[TOOL])
        assert prompt(engine).startswith("[system]Be brief.\n\nYou can call functions.")
        assert prompt(engine).endswith("[user]Hi[assistant]")

    def test_calls_and_results_become_text_of_alternating_roles(self, client: TestClient, engine: FakeEngine) -> None:
        post(client, messages=[*HISTORY, {"role": "user", "content": "Thanks"}])
        assert prompt(engine) == (
            '[user]Weather?[assistant]{"name": "weather", "arguments": {"city": "Paris"}}'
            "[user]Result of weather: 12 C\nThanks[assistant]"
        )


def test_tools_can_be_turned_off(make_client: Any, engine: FakeEngine) -> None:
    client = make_client(engine, tool_call_parser="none", reasoning_parser="none")
    error = post(client, tools=[TOOL]).json()["error"]
    assert error["param"] == "tools" and "tool_call_parser" in error["message"]
    engine.reply = "<think>a</think>b"
    assert post(client, skip_special_tokens=False).json()["choices"][0]["message"]["content"] == engine.reply


def test_deep_and_odd_schemas_are_answered(client: TestClient) -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(60):
        schema = {"type": "object", "properties": {"a": schema}}
    fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "deep", "schema": schema}}}
    assert post(client, **fields).status_code in (200, 400)
    body = json.dumps({"messages": []})[:-1] + ',"tools":' + '{"a":' * 5000 + "1" + "}" * 5000 + "}"
    response = client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
