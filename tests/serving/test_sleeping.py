"""Models sleep and are woken up, by vLLM's routes and by requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from fastapi.testclient import TestClient
from openai import APIError

from tests.serving.conftest import wait_for
from tests.serving.fake_engine import FakeEngine
from tests.serving.on_demand import Serve, Several, Starts, serve, starts
from tests.support.covers import covers

__all__ = ["serve", "starts"]


def post(server: Several, route: str, **query: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{route}", params=query, timeout=20)


def sleeps(server: Several, **query: Any) -> bool:
    sleeping: bool = httpx.get(f"{server.url}/is_sleeping", params=query).json()["is_sleeping"]
    return sleeping


@covers("POST /v1/sleep")
@covers("POST /v1/wake_up")
@covers("GET /v1/is_sleeping")
@covers("POST /v1/sleep", "level")
@pytest.mark.parametrize("level", [None, 1, 2])
def test_the_only_model_sleeps_and_wakes_up(make_client: Callable[..., TestClient], level: int | None) -> None:
    engine = FakeEngine()
    client = make_client(engine)
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}
    for _ in range(2):  # what sleeps already goes on sleeping
        assert client.post("/sleep", params={} if level is None else {"level": level}).status_code == 200
    assert client.get("/is_sleeping").json() == {"is_sleeping": True} and engine.slept == [level or 1]
    assert client.get("/v1/models").json()["data"][0]["status"] == {"value": "sleeping"}
    for path in ("/health", "/ready", "/metrics", "/props", "/server_info", "/load"):
        assert client.get(path).status_code == 200
    assert engine.is_asleep  # which wakes nothing
    for _ in range(2):
        assert client.post("/wake_up").status_code == 200
    assert client.get("/is_sleeping").json() == {"is_sleeping": False} and not engine.is_asleep
    assert client.post("/completions", json={"prompt": "Hi"}).status_code == 200


@covers("POST /v1/sleep", "model")
@covers("POST /v1/wake_up", "model")
@covers("GET /v1/is_sleeping", "model")
def test_one_of_several_models_sleeps(serve: Serve, starts: Starts) -> None:
    server = serve("a", "b", "c", max_loaded=2)
    server.ask("a")
    server.ask("b")
    assert post(server, "/sleep", model="b", level=2).status_code == 200
    assert server.states() == {"a": "loaded", "b": "sleeping", "c": "unloaded"}
    assert sleeps(server, model="b") and not sleeps(server, model="a") and not sleeps(server)
    assert server.ask("c") == "I am c."  # in the place that b has given back
    assert server.states() == {"a": "loaded", "b": "sleeping", "c": "loaded"}
    assert post(server, "/wake_up", model="b").status_code == 200
    assert server.states() == {"a": "unloaded", "b": "loaded", "c": "loaded"}  # a was not used for longest
    assert starts.events.count("start b") == 1


def test_a_request_wakes_its_model_up(serve: Serve) -> None:
    server = serve("a")
    server.ask("a")
    post(server, "/sleep")
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(server.ask, ["a"] * 3)) == ["I am a."] * 3
    assert server.states() == {"a": "loaded"}


def test_counters_go_on_after_a_sleep(serve: Serve) -> None:
    server = serve("a")

    def steps() -> float:
        text = httpx.get(server.url.removesuffix("/v1") + "/metrics").text
        return float(next(line for line in text.splitlines() if line.startswith("jaxllm:steps_total")).split()[-1])

    server.ask("a")
    assert steps() == 4
    post(server, "/sleep")
    assert steps() == 4
    server.ask("a")
    assert steps() == 8


@covers("POST /v1/sleep", "mode")
def test_what_runs_is_aborted_or_waited_for(serve: Serve, starts: Starts) -> None:
    server = serve("a")
    starts.delays["a"] = 0.05
    server.ask("a", max_tokens=1)
    for mode, tokens in (("abort", 200), ("wait", 6)):  # 10 s, if nothing ended it
        starts.engines["a"].delay, starts.engines["a"].reply = 0.05, "on and on " * 30
        stream = server.client.completions.create(model="a", prompt="Hi", max_tokens=tokens, stream=True)
        chunks = iter(stream)
        next(chunks)
        with ThreadPoolExecutor(1) as pool:
            put = pool.submit(post, server, "/sleep", mode=mode)
            if mode == "abort":
                with pytest.raises(APIError, match="'a' was put to sleep before the answer was complete"):
                    list(chunks)
            else:
                assert list(chunks)[-1].choices[0].finish_reason == "length"
            assert put.result().status_code == 200
        assert server.states() == {"a": "sleeping"}


def test_who_comes_while_it_falls_asleep_wakes_it_up(serve: Serve, starts: Starts) -> None:
    server = serve("a")
    starts.delays["a"] = 0.05
    stream = server.client.completions.create(model="a", prompt="Hi", max_tokens=7, stream=True)
    next(iter(stream))
    with ThreadPoolExecutor(2) as pool:
        put = pool.submit(post, server, "/sleep", mode="wait")
        wait_for(lambda: server.states() == {"a": "sleeping"})
        asked = pool.submit(server.ask, "a", max_tokens=7)
        for _ in stream:
            pass
        assert put.result().status_code == 200 and asked.result() == "I am a."
    assert starts.engines["a"].slept == [1] and server.states() == {"a": "loaded"}


def test_a_model_that_is_not_loaded_cannot_sleep_any_deeper(serve: Serve, starts: Starts) -> None:
    server = serve("a", "b")
    for route in ("/sleep", "/wake_up"):
        assert post(server, route, model="a").status_code == 200
    assert server.states() == {"a": "unloaded", "b": "unloaded"} and not starts.events
    starts.held["a"] = threading.Event()
    server.post("/models/load", "a")
    refused = post(server, "/sleep", model="a")
    assert refused.status_code == 409 and "'a' is loading: it cannot be put to sleep" in refused.text
    assert post(server, "/sleep", model="x").status_code == 404


def test_a_model_that_sleeps_can_be_unloaded(serve: Serve, starts: Starts) -> None:
    server = serve("a")
    server.ask("a")
    post(server, "/sleep")
    server.post("/models/unload", "a")
    assert server.states() == {"a": "unloaded"} and starts.events[-1] == "stopped a"
    assert server.ask("a") == "I am a."


def test_asleep_on_a_cpu_the_weights_still_take_memory(serve: Serve, starts: Starts) -> None:
    starts.sizes = {"a": 3000, "b": 2500}
    server = serve("a", "b", max_loaded=None, memory=4000)
    server.ask("a")
    post(server, "/sleep", model="a")
    assert server.models[0].held_bytes == 0  # of an accelerator it has none
    engine = starts.engines["a"]
    engine.kept, engine.client.info.platform = 2000, "cpu"
    assert server.models[0].held_bytes == 2000
    assert server.ask("b") == "I am b."  # 2000 + 2500 is too much
    assert server.states() == {"a": "unloaded", "b": "loaded"}


@covers("POST /v1/wake_up", "tags")
def test_what_cannot_be_honoured_is_refused(client: TestClient, engine: FakeEngine) -> None:
    for route, name, value in (("sleep", "level", 0), ("sleep", "level", 3), ("sleep", "mode", "keep")):
        answer = client.post(f"/{route}", params={name: value})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name, answer.text
    client.post("/sleep")
    answer = client.post("/wake_up", params={"tags": "weights"})
    assert answer.status_code == 400 and "are woken up together: send both, or none" in answer.text
    assert engine.is_asleep
    assert client.post("/wake_up", params={"tags": ["weights", "kv_cache"]}).status_code == 200
    engine.sleeps = False
    answer = client.post("/sleep")
    assert answer.status_code == 400 and "in a process of its own (engine_process) can sleep" in answer.text


def test_a_model_that_cannot_be_woken_up_says_why(
    serve: Serve, starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve("a")
    server.ask("a")
    post(server, "/sleep")

    def fail(*arguments: Any) -> None:
        raise RuntimeError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(starts.engines["a"], "wake_up", fail)
        with pytest.raises(openai.InternalServerError, match="could not be loaded: its engine did not start"):
            server.ask("a")
        assert server.status("a") == {
            "value": "failed",
            "error": "its engine did not start; the server's log has the details",
        }
    assert server.ask("a") == "I am a."
