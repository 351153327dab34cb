"""The events of a response's stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient
from openai.types.responses import Response

from tests.serving.conftest import wait_for
from tests.serving.fake_engine import REPLY, FakeEngine
from tests.serving.responses.shared import CALL, PARSERS, WEATHER, events_of, parse_events, types
from tests.support.covers import covers


def test_text_events_in_order(post: Callable[..., Any]) -> None:
    events = events_of(post.client, input="hi")
    deltas = types(events).count("output_text.delta")
    assert deltas > 1
    assert types(events) == [
        "created", "in_progress", "output_item.added", "content_part.added",
        *["output_text.delta"] * deltas,
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    text = "".join(event["delta"] for event in events if event["type"].endswith("text.delta"))
    assert text == events[-4]["text"] == REPLY
    assert events[0]["response"]["status"] == events[1]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == [] and events[2]["item"]["content"] == []
    final = events[-1]["response"]
    assert final["status"] == "completed" and final["output"] == [events[-2]["item"]]
    assert post.client.get(f"/v1/responses/{final['id']}").json() == final


@covers("ResponseRequest", "stream")
def test_the_sdk_helper_finishes(sdk: Callable[..., Any]) -> None:
    client, _ = sdk()
    with client.responses.stream(model="fake", input="hi") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == REPLY


def test_log_probabilities_come_with_their_text(post: Callable[..., Any]) -> None:
    events = events_of(post.client, input="hi", include=["message.output_text.logprobs"])
    for event in events:
        if event["type"] == "response.output_text.delta":
            assert "".join(entry["token"] for entry in event["logprobs"]) == event["delta"]


@pytest.mark.parametrize("reply", [REPLY, CALL, f"<think>hm</think>{REPLY}", f"ok\n{CALL}\n{CALL}", "  \n", " x"])
def test_says_what_the_whole_response_says(
    reply: str,
    make_client: Callable[..., TestClient],
    roomy: Callable[..., FakeEngine],
    tmp_path: Path,
) -> None:
    client = make_client(roomy(reply=reply), data_dir=tmp_path, **PARSERS)
    body = {"input": "hi", "tools": [WEATHER]}
    streamed = events_of(client, **body)[-1]["response"]
    whole = client.post("/v1/responses", json=body).json()

    def said(response: dict[str, Any]) -> list[Any]:
        return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]

    assert said(streamed) == said(whole)
    assert streamed["usage"] == whole["usage"]
    Response.model_validate(whole)


def test_an_error_in_mid_stream_is_told_and_stored(
    make_client: Callable[..., TestClient], roomy: Callable[..., FakeEngine], tmp_path: Path
) -> None:
    engine = roomy()
    engine.fail_after = 4
    client = make_client(engine, data_dir=tmp_path)
    events = events_of(client, input="hi")
    assert types(events)[-3:] == ["output_item.done", "error", "failed"]
    assert "the pages caught fire" in events[-2]["message"]
    response = events[-1]["response"]
    assert response["status"] == "failed" and response["error"]["code"] == "server_error"
    assert response["output"][0]["status"] == "incomplete"
    assert client.get(f"/v1/responses/{response['id']}").json() == response
    whole = client.post("/v1/responses", json={"input": "hi"})
    assert whole.status_code == 500 and "the pages caught fire" in whole.json()["error"]["message"]


def test_silence_is_filled(
    make_client: Callable[..., TestClient], roomy: Callable[..., FakeEngine], tmp_path: Path
) -> None:
    client = make_client(roomy(delay=0.15, reply="ab"), data_dir=tmp_path, sse_keep_alive=0.05)
    for background in (False, True):
        text = client.post("/v1/responses", json={"input": "x", "stream": True, "background": background}).text
        assert ": keep-alive\n\n" in text and types(parse_events(text))[-1] == "completed"


def test_a_full_queue_is_a_status_of_its_own(
    make_client: Callable[..., TestClient], roomy: Callable[..., FakeEngine], tmp_path: Path
) -> None:
    client = make_client(roomy(queue_limit=0), data_dir=tmp_path)
    for body in ({}, {"stream": True}, {"background": True}, {"background": True, "stream": True}):
        answer = client.post("/v1/responses", json={"input": "hi"} | body)
        assert answer.status_code == 429 and answer.headers["Retry-After"]


def test_a_client_that_goes_away_frees_the_engine(sdk: Callable[..., Any]) -> None:
    client, engine = sdk(delay=0.02)
    stream = client.responses.create(model="fake", input="hi", stream=True)
    next(iter(stream))
    assert engine.active
    stream.close()
    wait_for(lambda: not engine.active)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).responses.create(model="fake", input="hi")
    wait_for(lambda: not engine.active)
