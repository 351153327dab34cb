"""What the tests of /v1/responses share: a tool, and streams read event by event."""

from __future__ import annotations

import json
from typing import Any

from fastapi.testclient import TestClient
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.serving.fake_engine import FakeEngine

EVENT = TypeAdapter(ResponseStreamEvent)


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": None,
}


PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "think"}


def prompt_text(engine: FakeEngine, at: int = -1) -> str:
    return bytes(token for token in engine.seen[at][0] if token < 256).decode()


def events_of(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each of which must be one that the openai package knows, field by field."""
    answer = client.post("/v1/responses", json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    return parse_events(answer.text)


def parse_events(text: str) -> list[dict[str, Any]]:
    events = []
    for block in text.split("\n\n"):
        if block.startswith("event: "):
            name, data = block.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            EVENT.validate_python(event, extra="ignore")
            events.append(event)
    return events


def types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]
