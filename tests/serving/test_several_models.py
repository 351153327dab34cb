"""A server of several models: each answers to its own names, and one whose engine died speaks for itself only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from tests.serving.batches.conftest import start
from tests.serving.batches.running import Running, chat
from tests.serving.batches.test_resumption import Poisoned
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import FakeEngine

__all__ = ["start"]

MakeClient = Callable[..., TestClient]


@pytest.fixture
def other() -> FakeEngine:
    return FakeEngine(reply="Elsewhere.")


@pytest.fixture
def both(make_client: MakeClient, engine: FakeEngine, other: FakeEngine) -> TestClient:
    """A server of models "fake" and "other"."""
    return make_client(engine, {"other": other})


def ask(client: TestClient, model: str | None, **fields: Any) -> Any:
    named = {} if model is None else {"model": model}
    return client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 100, **named, **fields})


def test_a_request_goes_to_the_model_that_it_names(both: TestClient, engine: FakeEngine) -> None:
    assert ask(both, "other").json()["choices"][0]["text"] == "Elsewhere."
    assert ask(both, None).json()["model"] == "fake" and ask(both, "fake").json()["choices"][0]["text"] == engine.reply
    assert [model["id"] for model in both.get("/v1/models").json()["data"]] == ["fake", "other"]
    assert both.get("/v1/models/other").json()["root"] == "other"
    assert both.get("/v1/server_info").json()["models"] == ["fake", "other"]
    assert both.get("/v1/props").json()["model_alias"] == "fake"


def test_a_dead_model_speaks_for_itself_only(both: TestClient, engine: FakeEngine, other: FakeEngine) -> None:
    assert both.get("/health").json() == {"status": "ok"}
    other.die()
    refused = ask(both, "other")
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_dead"
    assert "other" in refused.json()["error"]["message"]
    assert ask(both, "fake").status_code == 200
    health = both.get("/health")
    assert health.status_code == 200 and health.json() == {"status": "degraded", "stopped_models": ["other"]}
    assert both.get("/ready").status_code == both.get("/metrics").status_code == 200
    engine.die()
    for probe in ("/health", "/ping", "/ready"):
        assert both.get(probe).status_code == 503
    assert "fake, other" in both.get("/health").json()["error"]["message"]


def test_a_dead_model_leaves_the_streams_of_another_alone(start: Callable[..., Running]) -> None:
    other = FakeEngine(delay=0.02)
    server = start(FakeEngine(delay=0.02), others={"other": other})
    body = {"prompt": "Hi", "max_tokens": 100, "stream": True}
    with httpx.stream("POST", f"{server.url}/completions", json=body, timeout=20) as response:
        lines = response.iter_lines()
        next(lines)
        other.die()
        rest = "".join(lines)
    assert "engine_dead" not in rest and '"finish_reason":"stop"' in rest and rest.endswith("[DONE]")


def test_metrics_of_each_model_are_one_family(make_client: MakeClient, engine: FakeEngine, other: FakeEngine) -> None:
    client = make_client(engine, {"other": other}, vllm_metrics=True)
    ask(client, "fake"), ask(client, "other"), ask(client, "other")
    text = client.get("/metrics").text
    types = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for prefix in ("jaxllm", "vllm"):
        finished = families[f"{prefix}:request_success"].samples
        counts = {(s.labels["model_name"], s.labels["finished_reason"]): s.value for s in finished}
        assert (counts["fake", "stop"], counts["other", "stop"]) == (1, 2)
        assert {s.labels["model_name"] for s in families[f"{prefix}:num_requests_running"].samples} == {"fake", "other"}


def test_a_batch_goes_on_while_another_model_is_dead(start: Callable[..., Running]) -> None:
    other = FakeEngine()
    server = start(FakeEngine(), others={"other": other})
    server.engine.die()
    batch = server.finished(server.submit([chat(number, model="other") for number in range(20)]))
    assert batch.request_counts.model_dump() == {"total": 20, "completed": 20, "failed": 0}


def test_lines_of_one_model_are_not_blamed_for_the_crashes_of_another(start: Callable[..., Running]) -> None:
    batch_id = ""
    for _ in range(2):
        slow, poisoned = FakeEngine(delay=5), Poisoned(delay=0.001)
        server = start(slow, others={"other": poisoned})
        batch_id = batch_id or server.submit([chat(0), chat(1), chat(13, model="other"), chat(2)])
        wait_for(lambda: poisoned.is_dead and len(slow.active) == 0)  # noqa: B023
        assert server.client.batches.retrieve(batch_id).status == "in_progress"
        server.stop()
    server = start(FakeEngine(), others={"other": FakeEngine()})
    batch = server.finished(batch_id)
    assert batch.request_counts.model_dump() == {"total": 4, "completed": 3, "failed": 1}
    assert server.results(batch.error_file_id).keys() == {"line-13"}


def test_the_lines_of_each_model_have_places_of_their_own(start: Callable[..., Running]) -> None:
    other = FakeEngine(delay=0.01)
    server = start(FakeEngine(delay=0.01), others={"other": other}, max_batch_concurrency=2)
    batch_id = server.submit([chat(number, model=("fake", "other")[number % 2]) for number in range(8)])
    assert server.finished(batch_id).request_counts.completed == 8
    assert (server.engine.most_active, other.most_active) == (2, 2)
