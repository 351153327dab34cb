"""Samplers and what ends an answer, on the routes of OpenAI's: refused in a line, or told as it was."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.serving.fake_engine import REPLY, FakeEngine
from tests.serving.openai.test_chat import HELLO, events
from tests.serving.openai.test_fields import ROUTES, send, text


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("fields", "name", "said"),
    [
        ({"dry_base": 0.5}, "dry_base", "dry_base is 0.5; it must be from 1 to 100"),
        ({"typical_p": 2}, "typical_p", "typical_p is 2.0; it must be from 0 to 1"),
        ({"stop_regex": "(a"}, "stop_regex", "stop_regex has '(a', which cannot be used"),
        ({"stop_regex": ["a"] * 5}, "stop_regex", "stop_regex has 5 entries; it may have 4"),
        ({"xtc_probability": 0.5, "use_beam_search": True}, "xtc_probability", "is not available with use_beam_search"),
        ({"stop_regex": "a", "use_beam_search": True}, "stop_regex", "is not available with use_beam_search"),
        ({"repetition_detection": {"max_pattern_size": 4}}, "min_count", "min_count is 0; it must be 2 or more"),
    ],
)
def test_samplers_and_stops_are_refused_in_a_line(
    client: TestClient, path: str, fields: dict[str, Any], name: str, said: str
) -> None:
    base: dict[str, Any] = {"messages": HELLO} if "chat" in path else {"prompt": "Hi"}
    response = client.post(path, json=base | fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, name)
    assert said in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("fields", "shown", "reason", "stop"),
    [
        ({"stop_regex": "[A-Z]ar"}, "The capital of France is ", "stop", "[A-Z]ar"),
        ({"stop_regex": "l o", "include_stop_str_in_output": True}, "The capital o", "stop", "l o"),
        ({"stop_regex": "l o", "min_tokens": 20}, REPLY, "stop", None),
        ({"repetition_detection": {"max_pattern_size": 3, "min_count": 9}}, REPLY, "stop", None),
    ],
)
def test_what_ends_an_answer_is_told(
    client: TestClient, path: str, stream: bool, fields: dict[str, Any], shown: str, reason: str, stop: str | None
) -> None:
    asked = {"max_tokens": 99, **fields}
    said = events(client, path, **asked) if stream else [send(client, path, **asked).json()]
    choices = [choice for event in said for choice in event["choices"]]
    content = "".join(c["delta"].get("content") or "" if "delta" in c else text(c) for c in choices)
    assert (content, choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == (shown, reason, stop)


@pytest.mark.parametrize("path", [*ROUTES, "/v1/responses"])
def test_an_answer_that_repeats_itself_is_ended(make_client: Any, path: str) -> None:
    client = make_client(FakeEngine(reply="so " * 30))
    fields = {"repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 4}}
    if "responses" in path:
        body = client.post(path, json={"input": "Hi", **fields}).json()
        assert (body["status"], body["output"][0]["content"][0]["text"]) == ("completed", "so " * 4)
    else:
        [choice] = send(client, path, max_tokens=99, **fields).json()["choices"]
        assert (text(choice), choice["finish_reason"]) == ("so " * 4, "repetition")
        assert choice["stop_reason"] == "repetition_detected"
