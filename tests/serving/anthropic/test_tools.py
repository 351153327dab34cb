"""Calls of tools, and what they returned."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from jaxllm.serving.anthropic.blocks import template_call_id, tool_use_id
from tests.serving.anthropic.shared import CALL, HELLO, WEATHER, ScriptedEngine
from tests.support.covers import covers

if TYPE_CHECKING:
    import anthropic


@covers("CountTokensRequest", "tools")
@pytest.mark.parametrize("stream", [False, True])
def test_tool_loop(sdk: anthropic.Anthropic, engine: ScriptedEngine, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]

    def ask() -> anthropic.types.Message:
        fields: dict[str, Any] = {"model": "fake", "max_tokens": 500, "messages": messages, "tools": [WEATHER]}
        if not stream:
            return sdk.messages.create(**fields)
        with sdk.messages.stream(**fields) as events:
            return events.get_final_message()

    engine.reply = f"Let me look.\n{CALL}\n{CALL.replace('Paris', 'Rome')}"
    answer = ask()
    assert answer.stop_reason == "tool_use"
    text, *calls = answer.content
    assert text.type == "text" and text.text.strip() == "Let me look."
    assert [(call.type, call.name, call.input) for call in calls] == [
        ("tool_use", "get_weather", {"city": "Paris"}),
        ("tool_use", "get_weather", {"city": "Rome"}),
    ]
    assert "get_weather" in engine.last_prompt
    assert answer.id.startswith("msg_") and all(call.id.startswith("toolu_") for call in calls)
    messages += [
        answer.to_param(),
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": calls[0].id, "content": [{"type": "text", "text": "12 C"}]},
                {"type": "tool_result", "tool_use_id": calls[1].id, "content": "no such city", "is_error": True},
            ],
        },
    ]
    engine.reply = "It is 12 C."
    answer = ask()
    assert answer.stop_reason == "end_turn" and answer.content[0].to_dict()["text"] == "It is 12 C."
    assert engine.last_prompt.endswith("[tool]12 C[tool]Error: no such city[assistant]")


def test_ids_that_mistrals_templates_take_come_back_as_they_were() -> None:
    for given, sent in (("call_5f", "toolu_5f"), ("aB3dE6gH9", "toolu_aB3dE6gH9")):
        assert tool_use_id(given) == sent
    assert template_call_id("toolu_aB3dE6gH9") == "aB3dE6gH9"
    assert template_call_id("toolu_01A09q90qw90lq917835lq9") == "toolu_01A09q90qw90lq917835lq9"


def test_input_streams_as_it_comes(sdk: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    engine.reply = CALL
    with sdk.messages.stream(model="fake", max_tokens=500, messages=HELLO, tools=[WEATHER]) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
    assert len(parts) > 3 and json.loads("".join(parts)) == {"city": "Paris"}


@covers("ToolChoiceAuto", "disable_parallel_tool_use")
def test_one_call_at_most(sdk: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    engine.reply = f"{CALL}\n{CALL}"
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    answer = sdk.messages.create(model="fake", max_tokens=500, messages=HELLO, tools=[WEATHER], tool_choice=choice)
    assert [block.type for block in answer.content] == ["tool_use"]


@pytest.mark.parametrize(("end", "reason"), [(40, "max_tokens"), (1000, "end_turn")])
def test_a_call_that_was_not_finished_is_not_to_be_made(
    sdk: anthropic.Anthropic, engine: ScriptedEngine, end: int, reason: str
) -> None:
    """Whether max_tokens cuts it off or the model stops in it."""
    engine.reply = CALL if reason == "max_tokens" else CALL[:-20]
    answer = sdk.messages.create(model="fake", max_tokens=end, messages=HELLO, tools=[WEATHER])
    assert [block.type for block in answer.content] == ["tool_use"]
    assert answer.stop_reason == reason


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}], ids=lambda choice: choice["type"]
)
def test_forced_calls_are_constrained(sdk: anthropic.Anthropic, engine: ScriptedEngine, choice: Any) -> None:
    engine.reply = CALL
    answer = sdk.messages.create(model="fake", max_tokens=500, messages=HELLO, tools=[WEATHER], tool_choice=choice)
    assert answer.stop_reason == "tool_use"
    assert engine.last_params.structured_outputs is not None
