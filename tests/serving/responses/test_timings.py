"""How long a response took, on request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi.testclient import TestClient

from tests.serving.fake_engine import CACHED, PADDING, REPLY, FakeEngine
from tests.serving.responses.fake_tools import FORECAST, MCP, says, weather
from tests.serving.responses.shared import events_of
from tests.serving.sending import send


def test_a_response_tells_its_timings_where_it_is_asked(client: TestClient, engine: FakeEngine) -> None:
    assert "timings" not in send(client, "/v1/responses")
    engine.delay = 0.01
    response = send(client, "/v1/responses", timings_per_token=True)
    timings = response["timings"]
    assert timings["predicted_n"] == response["usage"]["output_tokens"] > 0
    assert timings["cache_n"] == CACHED and timings["prompt_n"] == response["usage"]["input_tokens"] - CACHED
    assert timings["queue_ms"] >= 0 and timings["prompt_ms"] >= 0 and timings["predicted_ms"] > 0
    assert timings["padding_n"] == PADDING
    assert client.get(f"/v1/responses/{response['id']}").json()["timings"] == timings


def test_the_last_event_of_a_stream_has_the_timings(client: TestClient) -> None:
    first, *_, last = events_of(client, input="Hi", timings_per_token=True)
    assert "timings" not in first["response"]
    assert last["response"]["timings"]["predicted_n"] == len(REPLY)


def test_timings_are_those_of_all_turns(tools: Callable[..., Any]) -> None:
    client, _ = tools(weather(), script=[says(FORECAST), says(FORECAST)])
    response = client.responses.create(
        model="fake", input="weather?", tools=[MCP], extra_body={"timings_per_token": True}
    )
    timings = response.model_extra["timings"]
    assert timings["padding_n"] == 3 * PADDING and timings["cache_n"] == 3 * CACHED
    assert timings["predicted_n"] == response.usage.output_tokens
