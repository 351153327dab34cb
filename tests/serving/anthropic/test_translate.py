"""Messages requests become conversations, and parser events content blocks, without a server."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.chat.conversation import Call, Message, NamedTool, Tool
from jaxllm.chat.events import Content, Event, Reasoning, ToolArguments, ToolCall
from jaxllm.serving.anthropic.blocks import template_call_id, tool_use_id
from jaxllm.serving.anthropic.message import (
    BlockBuilder,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    parse_input,
)
from jaxllm.serving.anthropic.request import MessagesRequest
from jaxllm.serving.anthropic.routes import conversation, generation_settings, messages
from tests.support.covers import covers

WEATHER = {"name": "weather", "description": "Weather now", "input_schema": {"type": "object", "properties": {}}}
CALL = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Köln"}}


def request(*messages: Any, **fields: Any) -> MessagesRequest:
    return MessagesRequest.model_validate({"max_tokens": 9, "messages": list(messages)} | fields)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "cache_control": {"type": "ephemeral", "ttl": "1h"}}


@covers("CountTokensRequest", "messages", "system")
@covers("MessageParam", "role", "content")
@covers("CacheControl", "ttl")
@covers("TextBlockParam", "text")
@covers("Cacheable", "cache_control")
def test_system_and_turns() -> None:
    body = request(user("One"), user([text("Two")]), assistant("Yes"), user("Go"), system=[text("Be"), text("brief")])
    assert messages(body.system, body.turns) == [
        Message("system", "Be\nbrief"),
        Message("user", "One\nTwo"),
        Message("assistant", "Yes"),
        Message("user", "Go"),
    ]


@covers("ThinkingBlockParam", "thinking", "signature")
@covers("ToolUseBlockParam", "id", "name", "input")
@covers("ToolResultBlockParam", "tool_use_id", "content", "is_error")
def test_tool_history() -> None:
    thought = {"type": "thinking", "thinking": "Look it up", "signature": "x"}
    second = {"type": "tool_use", "id": "c2", "name": "weather", "input": {}}
    results = [
        {"type": "tool_result", "tool_use_id": "c1", "content": [text("12 °C")]},
        {"type": "tool_result", "tool_use_id": "c2", "content": "no such city", "is_error": True},
    ]
    body = request(
        user("Weather?"), assistant([thought, text("I'll look"), CALL, second]), user([*results, text("Well?")])
    )
    _, answer, *rest = messages(body.system, body.turns)
    calls = [Call("c1", "weather", {"city": "Köln"}), Call("c2", "weather", {})]
    assert answer == Message("assistant", "I'll look", reasoning="Look it up", calls=calls)
    assert rest == [
        Message("tool", "12 °C", call_id="c1"),
        Message("tool", "Error: no such city", call_id="c2"),
        Message("user", "Well?"),
    ]


@covers("CountTokensRequest", "tool_choice")
@covers("ToolChoiceAuto", "type", "disable_parallel_tool_use")
@pytest.mark.parametrize(
    ("choice", "tools", "expected", "parallel"),
    [
        ({"type": "auto"}, 1, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, 1, "required", False),
        ({"type": "none"}, 0, "auto", True),
    ],
)
def test_tool_choice(choice: dict[str, Any], tools: int, expected: str, parallel: bool) -> None:
    chat = conversation(request(user("x"), tools=[WEATHER], tool_choice=choice))
    assert (len(chat.tools), chat.tool_choice, chat.parallel_tool_calls) == (tools, expected, parallel)


@covers("ToolParam", "strict")
def test_named_tool_choice_and_strict() -> None:
    choice = {"type": "tool", "name": "weather"}
    chat = conversation(request(user("x"), tools=[WEATHER | {"strict": True}], tool_choice=choice))
    assert chat.tool_choice == NamedTool("weather")
    assert chat.tools == [Tool("weather", "Weather now", WEATHER["input_schema"], strict=True)]


@covers("CountTokensRequest", "thinking")
@covers("ThinkingEnabled", "budget_tokens")
@covers("TurnConfig", "effort")
@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, True),
        ({"thinking": {"type": "adaptive"}}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"output_config": {"effort": "low"}}, True),
    ],
)
def test_thinking(fields: dict[str, Any], thinks: bool | None) -> None:
    rendering = conversation(request(user("x"), **fields)).rendering
    assert rendering.thinks is thinks
    budget = fields.get("thinking", {}).get("budget_tokens")
    assert rendering.template_arguments(None).get("thinking_budget") == budget


def test_prefill_continues_the_last_message() -> None:
    rendering = conversation(request(user("x"), assistant("The answer is"))).rendering
    assert rendering.continues_last and not rendering.opens_answer
    assert not conversation(request(user("x"))).rendering.continues_last


@covers("CountTokensRequest", "output_config")
@covers("OutputConfig", "format")
@covers("JSONOutputFormat", "schema")
def test_sampling_and_format() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    config = {"format": {"type": "json_schema", "schema": schema}}
    body = request(user("x"), temperature=0.2, top_p=0.9, top_k=5, stop_sequences=["a", "b"], output_config=config)
    assert generation_settings(body).sampling == {"temperature": 0.2, "top_p": 0.9, "top_k": 5, "stop": ["a", "b"]}
    structured = conversation(body).structured_outputs
    assert structured and json.loads(structured.json or "") == schema


def build(events: list[Event], **options: Any) -> tuple[list[Any], list[Any]]:
    """(stream events, blocks)"""
    builder = BlockBuilder(**options)
    sent = [out for event in events for out in builder.add([event])]
    return sent + list(builder.finish()), builder.blocks


def replay(sent: list[Any]) -> list[dict[str, Any]]:
    """What a client makes of the events."""
    blocks: list[dict[str, Any]] = []
    open_block: int | None = None
    for event in sent:
        match event:
            case ContentBlockStart(index, block):
                assert open_block is None and index == len(blocks)
                open_block = index
                blocks.append({"type": block.__struct_config__.tag, "text": ""})
                blocks[-1]["name"] = getattr(block, "name", None)
            case ContentBlockDelta(index, delta):
                assert index == open_block
                if delta.__struct_config__.tag != "signature_delta":
                    blocks[-1]["text"] += getattr(delta, delta.__struct_fields__[0])
            case ContentBlockStop(index):
                assert index == open_block
                open_block = None
    assert open_block is None
    return blocks


def as_replayed(block: Any) -> dict[str, Any]:
    match block:
        case TextBlock(said):
            return {"type": "text", "text": said, "name": None}
        case ThinkingBlock(thought):
            return {"type": "thinking", "text": thought, "name": None}
        case ToolUseBlock(name=name, input=value):
            return {"type": "tool_use", "input": value, "name": name}
    raise AssertionError(block)


def test_blocks_in_order() -> None:
    sent, blocks = build([
        Reasoning("Let me "), Reasoning("think."), Content("\n\n"), Content(" Hi"), Content(" you "), Content("\n"),
        ToolCall(0, "c1", "f"), ToolArguments(0, '{"a"'), ToolArguments(0, ": 1}"), Content("\n"),
        ToolCall(1, "c2", "g"), Content("  "),
    ])  # fmt: skip
    assert [as_replayed(block) for block in blocks] == [
        {"type": "thinking", "text": "Let me think.", "name": None},
        {"type": "text", "text": "\n\n Hi you \n", "name": None},
        {"type": "tool_use", "input": {"a": 1}, "name": "f"},
        {"type": "tool_use", "input": {}, "name": "g"},
    ]
    assert [block["text"] for block in replay(sent)] == ["Let me think.", "\n\n Hi you \n", '{"a": 1}', ""]
    assert blocks[0].signature


def test_omitted_thinking_is_signed_but_empty() -> None:
    shown = build([Reasoning("secret"), Content("x")])[1]
    sent, hidden = build([Reasoning("secret"), Content("x")], show_thinking=False)
    assert hidden[0].thinking == "" and hidden[0].signature == shown[0].signature
    assert "secret" not in str(sent)


words = st.text(max_size=5)
calls = st.integers(0, 9).map(lambda index: ToolCall(index, "c", "f"))
runs = st.lists(st.one_of(words.map(Content), words.map(Reasoning), calls))


@given(runs)
def test_a_stream_amounts_to_the_whole(events: list[Event]) -> None:
    sent, blocks = build(events)
    streamed = replay(sent)
    whole = [as_replayed(block) for block in blocks]
    for block in streamed:
        if block["type"] == "tool_use":
            block["input"], _ = parse_input(block.pop("text"))
    assert streamed == whole
    assert all(block["text"].strip() for block in whole if block["type"] == "text")


@pytest.mark.parametrize(
    ("arguments", "value", "finished"),
    [
        ('{"a": 1}', {"a": 1}, True),
        ('{"a": [1, 2', {"a": [1, 2]}, False),
        ('{"a": "unfin', {"a": "unfin"}, False),
        ("", {}, False),
        ('{"a": 1}}', {"a": 1}, False),
        ("oops", {}, False),
        ("[1]", {}, False),
    ],
)
def test_input_of_a_call_that_was_cut_off(arguments: str, value: dict[str, Any], finished: bool) -> None:
    assert parse_input(arguments) == (value, finished)


@pytest.mark.parametrize("call_id", ["functions.get_weather:0", "functions.a-b.c_d:12", "aB3dE6gH9"])
def test_a_models_own_ids_come_back_to_its_template(call_id: str) -> None:
    sent = tool_use_id(call_id)
    assert re.fullmatch(r"toolu_[a-zA-Z0-9_-]+", sent)
    assert template_call_id(sent) == call_id
