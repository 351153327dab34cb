"""The line of the log that tells of a request, in text and in JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from jaxllm.logs import JSONLines
from jaxllm.serving.request_log import LOG
from tests.serving.access.conftest import key, write_keys
from tests.serving.api_surface import BODIES
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import CACHED, REPLY, FakeEngine
from tests.serving.openai.test_chat import HELLO


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, Any]]]:
    """The lines so far, as JSON shows them."""
    caplog.set_level(logging.INFO, LOG)
    lines = JSONLines("api")
    return lambda: [json.loads(lines.format(record)) for record in caplog.records if record.name == LOG]


@pytest.fixture
def client(make_client: Callable[..., TestClient], engine: FakeEngine) -> TestClient:
    return make_client(engine, log_format="json")


GENERATING = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", GENERATING)
def test_one_line_tells_of_a_request(
    client: TestClient, engine: FakeEngine, logged: Callable[[], list[dict[str, Any]]], path: str, stream: bool
) -> None:
    response = client.post(path, json=BODIES[path] | {"stream": stream}, headers={"X-Request-Id": "mine"})
    assert response.status_code == 200
    [line] = logged()
    assert (line["request_id"], line["method"], line["endpoint"], line["status"]) == ("mine", "POST", path, 200)
    assert (line["model"], line["key"], line["client_gone"]) == ("fake", None, False)
    assert line["input_tokens"] == len(engine.seen[-1][0]) and line["cached_tokens"] == CACHED
    assert line["output_tokens"] > 0 and len(line["finish_reasons"]) == 1
    times = [line[f"{name}_seconds"] for name in ("queue", "prefill", "decode")]
    assert all(seconds >= 0 for seconds in times) and sum(times) <= line["duration_seconds"] + 0.05
    assert "France" not in json.dumps(line) and "prompts" not in line


def test_texts_are_logged_where_that_is_asked_for(
    make_client: Callable[..., TestClient], engine: FakeEngine, logged: Callable[[], list[dict[str, Any]]]
) -> None:
    client = make_client(engine, log_format="json", log_prompts=True)
    client.post("/v1/chat/completions", json={"messages": HELLO, "n": 2})
    [line] = logged()
    assert line["answers"] == [REPLY, REPLY] and line["finish_reasons"] == ["stop", "stop"]
    assert line["prompts"] == ["[user]Hi[assistant]"]


def test_what_is_refused_has_a_line_too(client: TestClient, logged: Callable[[], list[dict[str, Any]]]) -> None:
    client.post("/v1/chat/completions", json={"messages": 3})
    client.get("/v1/nowhere")
    lines = logged()
    assert [line["status"] for line in lines] == [400, 404]
    assert lines[0]["model"] is None and lines[0]["output_tokens"] == 0 and lines[0]["queue_seconds"] is None


def test_vectors_have_tokens_in(client: TestClient, logged: Callable[[], list[dict[str, Any]]]) -> None:
    used = client.post("/v1/embeddings", json={"input": ["Hi", "there"]}).json()["usage"]["prompt_tokens"]
    [line] = logged()
    assert line["input_tokens"] == used and line["output_tokens"] == 0 and line["cached_tokens"] == 2 * CACHED


def test_probes_have_a_line_only_where_they_fail(
    client: TestClient, engine: FakeEngine, logged: Callable[[], list[dict[str, Any]]]
) -> None:
    assert client.get("/health").status_code == client.get("/metrics").status_code == 200
    assert logged() == []
    engine.die()
    assert client.get("/health").status_code == 503
    assert [line["endpoint"] for line in logged()] == ["/health"]


def test_a_response_in_the_background_has_its_line_when_it_has_ended(
    client: TestClient, engine: FakeEngine, logged: Callable[[], list[dict[str, Any]]]
) -> None:
    engine.delay = 0.01
    begun = client.post("/v1/responses", json={"input": "Hi", "background": True}).json()
    assert logged() == [] and begun["status"] == "queued"
    wait_for(lambda: bool(logged()))
    [line] = [line for line in logged() if line["method"] == "POST"]
    assert line["output_tokens"] == len(REPLY) and line["request_id"] == begun["id"]


def test_a_client_that_goes_away(listen: Callable[..., str], logged: Callable[[], list[dict[str, Any]]]) -> None:
    url = listen(FakeEngine(delay=0.05, reply="x" * 200), log_format="json")
    with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "Hi", "stream": True, "max_tokens": 200}) as got:
        next(got.iter_lines())
    wait_for(lambda: bool(logged()))
    [line] = logged()
    assert line["client_gone"] and line["status"] == 200 and line["finish_reasons"] == ["abort"]
    assert 0 < line["output_tokens"] < 200


def test_each_line_of_a_batch_has_one(
    make_client: Callable[..., TestClient], engine: FakeEngine, logged: Callable[[], list[dict[str, Any]]]
) -> None:
    client = make_client(engine, log_format="json")
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi", "max_tokens": 2}}
    sent = client.post("/v1/files", files={"file": ("b.jsonl", json.dumps(row))}, data={"purpose": "batch"}).json()
    asked = {"input_file_id": sent["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    client.post("/v1/batches", json=asked)
    wait_for(lambda: any(line["endpoint"] == "/v1/completions" for line in logged()))
    lines = {line["endpoint"]: line for line in logged()}
    assert lines["/v1/completions"]["output_tokens"] == 2 and lines["/v1/batches"]["output_tokens"] == 0


def test_text_tells_the_same_in_one_line(
    make_client: Callable[..., TestClient], engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client(engine, enable_request_logging=True)
    with caplog.at_level(logging.INFO, LOG):
        client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 3})
    [line] = [record.getMessage() for record in caplog.records if record.name == LOG]
    assert f"3 tokens in ({CACHED} cached), 3 out, queue " in line and line.endswith(" s, length")
    assert "\n" not in line and "Hi" not in line


def test_it_can_be_switched_off_with_json(
    make_client: Callable[..., TestClient], engine: FakeEngine, logged: Callable[[], list[dict[str, Any]]]
) -> None:
    make_client(engine, log_format="json", enable_request_logging=False).get("/v1/models")
    assert logged() == []


def test_the_key_is_named(
    make_client: Callable[..., TestClient],
    engine: FakeEngine,
    logged: Callable[[], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    keys = write_keys(tmp_path / "keys.yaml", alice={})
    client = make_client(engine, log_format="json", api_key_file=keys)
    body = {"prompt": "Hi", "max_tokens": 2}
    client.post("/v1/completions", json=body, headers=key("alice"))
    client.post("/v1/completions", json=body)
    assert [(line["status"], line["key"]) for line in logged()] == [(200, "alice"), (401, None)]
    assert "key-of-alice" not in json.dumps(logged())
