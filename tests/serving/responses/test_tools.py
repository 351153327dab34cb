"""Calls of functions, and what they returned."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
from fastapi.testclient import TestClient
from openai.types.responses import Response
from pydantic import BaseModel

from tests.serving.fake_engine import REPLY, FakeEngine
from tests.serving.responses.shared import CALL, PARSERS, WEATHER, events_of, prompt_text, types
from tests.support.covers import covers


@covers("PromptFields", "tools")
@covers("FunctionCallOutputItem", "call_id", "output")
def test_a_call_and_its_output(sdk: Callable[..., Any]) -> None:
    client, engine = sdk(PARSERS, reply=CALL)
    first = client.responses.create(model="fake", input="weather?", tools=[WEATHER])
    (call,) = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Paris"})
    assert call.id.startswith("fc_") and call.call_id and call.status == "completed"
    engine.reply = REPLY
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = client.responses.create(model="fake", input=[output], previous_response_id=first.id, tools=[WEATHER])
    assert second.output_text == REPLY
    assert "rain" in prompt_text(engine)
    sent_back = [{"role": "user", "content": "weather?"}, *first.output, output]
    client.responses.create(model="fake", input=sent_back, tools=[WEATHER])
    assert prompt_text(engine) == prompt_text(engine, -2)


def test_call_events(make_client: Callable[..., TestClient], roomy: Callable[..., FakeEngine], tmp_path: Path) -> None:
    client = make_client(roomy(reply=f"Let me see. {CALL}"), data_dir=tmp_path, **PARSERS)
    events = events_of(client, input="hi", tools=[WEATHER])
    seen = list(dict.fromkeys(types(events)))
    assert seen == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "function_call_arguments.delta",
        "function_call_arguments.done", "completed",
    ]  # fmt: skip
    fragments = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
    done = next(event for event in events if event["type"].endswith("arguments.done"))
    assert len(fragments) > 1 and "".join(fragments) == done["arguments"]
    assert json.loads(done["arguments"]) == {"city": "Paris"} and done["output_index"] == 1
    item = events[-2]["item"]
    assert item["id"] == done["item_id"] and item["arguments"] == done["arguments"]


def test_the_sdk_helper_parses_arguments(sdk: Callable[..., Any]) -> None:
    class Weather(BaseModel):
        city: str

    client, _ = sdk(PARSERS, reply=CALL)
    tool = openai.pydantic_function_tool(Weather, name="weather")
    tools = [{"type": "function", **tool["function"]}]
    with client.responses.stream(model="fake", input="hi", tools=tools) as stream:
        final = stream.get_final_response()
    assert final.output[0].parsed_arguments == {"city": "Paris"}


@covers("PromptFields", "tool_choice", "parallel_tool_calls")
@covers("ChosenFunction", "name")
@covers("AllowedFunctions", "mode", "tools")
def test_choices_are_shown_as_they_were_sent(
    make_client: Callable[..., TestClient], roomy: Callable[..., FakeEngine], tmp_path: Path
) -> None:
    client = make_client(roomy(reply=CALL), data_dir=tmp_path, **PARSERS)
    for choice in (
        "auto", "none", "required", {"type": "function", "name": "weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
    ):  # fmt: skip
        body = {"input": "hi", "tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
        response = client.post("/v1/responses", json=body)
        assert response.status_code == 200, response.text
        shown = response.json()
        assert shown["tool_choice"] == choice and shown["tools"] == [WEATHER]
        assert [item["type"] for item in shown["output"]] == ["message" if choice == "none" else "function_call"]
        Response.model_validate(shown)
