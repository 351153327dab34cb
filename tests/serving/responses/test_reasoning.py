"""How much the model thinks, and how its reasoning is returned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient
from openai.types.responses import Response

from tests.serving.fake_engine import REPLY, FakeEngine
from tests.serving.responses.shared import PARSERS, events_of, prompt_text, types
from tests.support.covers import covers

THOUGHTFUL = f"<think>Paris, surely.</think>\n\n{REPLY}"


def test_text(make_client: Callable[..., TestClient], roomy: Callable[..., FakeEngine], tmp_path: Path) -> None:
    client = make_client(roomy(reply=THOUGHTFUL), data_dir=tmp_path, **PARSERS)
    events = events_of(client, input="hi")
    told = "".join(event["delta"] for event in events if event["type"] == "response.reasoning_text.delta")
    response = Response.model_validate(events[-1]["response"])
    reasoning, message = response.output
    assert told == reasoning.content[0].text == "Paris, surely." and reasoning.summary == []
    assert message.content[0].text.strip() == REPLY
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < len(THOUGHTFUL)
    assert types(events)[2:4] == ["output_item.added", "content_part.added"]


@covers("ReasoningConfig", "summary")
def test_as_a_summary(make_client: Callable[..., TestClient], roomy: Callable[..., FakeEngine], tmp_path: Path) -> None:
    client = make_client(roomy(reply=THOUGHTFUL), data_dir=tmp_path, **PARSERS)
    events = events_of(client, input="hi", reasoning={"summary": "auto"})
    told = "".join(event["delta"] for event in events if event["type"] == "response.reasoning_summary_text.delta")
    item = Response.model_validate(events[-1]["response"]).output[0]
    assert told == item.summary[0].text == "Paris, surely." and item.content == []
    assert "reasoning_text.delta" not in types(events)


@covers("PromptFields", "reasoning")
@covers("ReasoningConfig", "effort")
def test_effort_reaches_the_template(sdk: Callable[..., Any]) -> None:
    client, engine = sdk()
    client.responses.create(model="fake", input="hi", reasoning={"effort": "low"})
    assert "(reasoning_effort=low)" in prompt_text(engine)
