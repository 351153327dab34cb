"""What a trainer does over HTTP: it pauses a model, changes its weights, and goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from jaxllm.engine.messages import NameWeights, Pause, ResetPrefixCache, Resume, UpdateWeights
from tests.serving.access.conftest import key, write_keys
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import NEW_WEIGHTS, FakeEngine
from tests.serving.on_demand import Serve, Starts, serve, starts
from tests.support.covers import covers

__all__ = ["serve", "starts"]

HELLO = {"prompt": "Hi", "max_tokens": 6}


@covers("POST /v1/pause")
@covers("POST /v1/pause", "mode")
@covers("POST /v1/pause", "clear_cache")
@covers("POST /v1/resume")
@covers("GET /v1/is_paused")
@pytest.mark.parametrize(("query", "orders"), [
    ({}, [Pause("keep"), ResetPrefixCache()]),
    ({"mode": "abort", "clear_cache": "false"}, [Pause("keep")]),
    ({"mode": "wait"}, [Pause("wait"), ResetPrefixCache()]),
    ({"mode": "keep"}, [Pause("keep")]),
])  # fmt: skip
def test_a_model_pauses(make_client: Callable[..., TestClient], query: dict[str, str], orders: list[Any]) -> None:
    engine = FakeEngine()
    client = make_client(engine)
    assert client.get("/is_paused").json() == {"is_paused": False}
    assert client.post("/pause", params=query).json() == {"status": "paused"}
    assert client.get("/is_paused").json() == {"is_paused": True} and engine.client.orders == orders
    if query.get("mode") == "keep":
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(client.post, "/completions", json=HELLO)
            wait_for(lambda: bool(engine.active))
            assert not answer.done()
            assert client.post("/resume").json() == {"status": "resumed"}
            assert answer.result(10).status_code == 200
    else:
        refused = client.post("/completions", json=HELLO)
        assert refused.status_code == 503 and refused.headers["Retry-After"]
        assert refused.json()["error"]["code"] == "engine_paused"
        assert "takes no requests until it is told to resume" in refused.json()["error"]["message"]
        assert client.post("/resume").json() == {"status": "resumed"}
    assert engine.client.orders == [*orders, Resume()]
    assert client.get("/is_paused").json() == {"is_paused": False}
    assert client.post("/completions", json=HELLO).status_code == 200


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_what_runs_is_ended_or_waited_for(listen: Callable[..., str], mode: str) -> None:
    engine = FakeEngine(delay=0.05, reply="on and on " * 30)
    url = listen(engine)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, f"{url}/v1/completions", json=HELLO | {"max_tokens": 40}, timeout=30)
        wait_for(lambda: bool(engine.active))
        assert httpx.post(f"{url}/pause", params={"mode": mode}, timeout=30).status_code == 200
        assert not engine.active
        ended = answer.result(10)
        if mode == "wait":
            assert ended.json()["usage"]["completion_tokens"] == 40
        else:
            assert ended.status_code == 503 and ended.json()["error"]["code"] == "engine_paused"
            assert ended.json()["error"]["message"] == "the model was paused before the answer was complete"


@covers("POST /v1/update_weights")
@covers("UpdateWeightsRequest", "model_path")
@covers("UpdateWeightsRequest", "weight_version")
@covers("GET /v1/weight_info")
@covers("POST /v1/reset_prefix_cache")
def test_weights_are_changed_and_named(make_client: Callable[..., TestClient]) -> None:
    engine = FakeEngine()
    client = make_client(engine)
    assert client.get("/weight_info").json() == {"weight_version": "initial"}
    assert client.post("/update_weights", json={"model_path": NEW_WEIGHTS}).json() == {"weight_version": "1"}
    named = {"model_path": NEW_WEIGHTS, "weight_version": "step 7"}
    assert client.post("/update_weights", json=named).json() == {"weight_version": "step 7"}
    assert client.get("/weight_info").json() == {"weight_version": "step 7"}
    refused = client.post("/update_weights", json={"model_path": "/models/other", "weight_version": "step 8"})
    assert refused.status_code == 400 and refused.json()["error"] == {
        "message": "/models/other is another model than the one that runs", "type": "invalid_request_error",
        "param": "model_path", "code": "weights_refused",
    }  # fmt: skip
    assert client.get("/weight_info").json() == {"weight_version": "step 7"}
    for wrong in ({}, {"model_path": ""}, {"model_path": NEW_WEIGHTS, "weight_version": ""}):
        assert client.post("/update_weights", json=wrong).status_code == 400
    assert client.post("/reset_prefix_cache").json() == {"success": True}
    expected = [UpdateWeights(NEW_WEIGHTS, "1"), UpdateWeights(NEW_WEIGHTS, "step 7")]
    assert [o for o in engine.client.orders if o != UpdateWeights("/models/other", "step 8")] == [
        *expected, ResetPrefixCache(),
    ]  # fmt: skip


@pytest.mark.parametrize("level", [1, 2])
def test_weights_that_slept_keep_their_name(make_client: Callable[..., TestClient], level: int) -> None:
    engine = FakeEngine()
    engine.kept = 1 if level == 1 else 0
    client = make_client(engine)
    client.post("/update_weights", json={"model_path": NEW_WEIGHTS, "weight_version": "tuned"})
    client.post("/sleep", params={"level": level})
    client.post("/wake_up")
    assert client.get("/weight_info").json() == {"weight_version": "tuned" if level == 1 else "initial"}
    assert (engine.client.orders[-1:] == [NameWeights("tuned")]) == (level == 1)


@covers("POST /v1/pause", "model")
@covers("POST /v1/resume", "model")
@covers("GET /v1/is_paused", "model")
@covers("POST /v1/reset_prefix_cache", "model")
@covers("UpdateWeightsRequest", "model")
@covers("GET /v1/weight_info", "model")
def test_one_of_several_models_is_changed(serve: Serve, starts: Starts) -> None:
    server = serve("a", "b")
    at = {"params": {"model": "b"}, "timeout": 20}
    assert httpx.get(f"{server.url}/is_paused", **at).json() == {"is_paused": False}  # type: ignore[arg-type]
    assert httpx.get(f"{server.url}/weight_info", **at).json() == {"weight_version": None}  # type: ignore[arg-type]
    assert server.states() == {"a": "unloaded", "b": "unloaded"}
    for path in ("/pause", "/resume", "/reset_prefix_cache"):
        assert httpx.post(f"{server.url}{path}", **at).status_code == 200  # type: ignore[arg-type]
    body = {"model": "b", "model_path": NEW_WEIGHTS}
    assert httpx.post(f"{server.url}/update_weights", json=body, timeout=20).json() == {"weight_version": "1"}
    assert server.states() == {"a": "unloaded", "b": "loaded"}
    assert [type(order) for order in starts.engines["b"].client.orders] == [
        Pause, ResetPrefixCache, Resume, ResetPrefixCache, UpdateWeights,
    ]  # fmt: skip
    unknown = httpx.post(f"{server.url}/pause", params={"model": "c"}, timeout=20)
    assert unknown.status_code == 404


def test_only_some_keys_change_weights(serve: Serve, tmp_path: Path) -> None:
    server = serve("first", api_key_file=write_keys(tmp_path / "keys.yaml", alice={}, boss={"admin": True}))
    for name, refused in (("alice", True), ("boss", False)):
        for path in ("/pause", "/resume", "/reset_prefix_cache", "/update_weights"):
            body = {"json": {"model_path": NEW_WEIGHTS}} if path == "/update_weights" else {}
            answer = httpx.post(server.url + path, headers=key(name), timeout=20, **body)
            assert (answer.status_code == 403) == refused, (name, path)
            if refused:
                assert "may not pause models and change their weights" in answer.json()["error"]["message"]


def test_a_pause_that_waits_holds_up_nothing_else(listen: Callable[..., str]) -> None:
    engine = FakeEngine(delay=0.05, reply="on and on " * 30)
    url = listen(engine)
    done = threading.Event()

    def pause() -> None:
        httpx.post(f"{url}/pause", params={"mode": "wait"}, timeout=30)
        done.set()

    with ThreadPoolExecutor(2) as pool:
        pool.submit(httpx.post, f"{url}/v1/completions", json=HELLO | {"max_tokens": 40}, timeout=30)
        wait_for(lambda: bool(engine.active))
        pool.submit(pause)
        wait_for(lambda: httpx.get(f"{url}/is_paused").json()["is_paused"])
        assert not done.is_set() and httpx.get(f"{url}/health").status_code == 200
