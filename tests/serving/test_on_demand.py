"""Several models in one server, each loaded by the first request for it and unloaded when another needs its place."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxllm.cli.main import main
from jaxllm.engine.messages import EngineStats
from jaxllm.engine.scale.routing import GAUGES, added, counted
from jaxllm.errors import CheckpointError, ConfigError, EngineDeadError
from tests.serving.batches.running import chat
from tests.serving.conftest import wait_for
from tests.serving.on_demand import Serve, Several, Starts, refusal, serve, starts
from tests.support.covers import covers

__all__ = ["serve", "starts"]

PROBES = ("/health", "/ready", "/ping", "/livez", "/load", "/metrics", "/v1/models", "/models/b", "/v1/server_info")


def probe(server: Several) -> dict[str, int]:
    base = server.url.removesuffix("/v1")
    return {path: httpx.get(base + path).status_code for path in PROBES}


def test_the_first_request_for_a_model_loads_it(serve: Serve, starts: Starts) -> None:
    server = serve("a", "b", max_loaded=2)
    assert server.states() == {"a": "unloaded", "b": "unloaded"}
    assert server.ask("b") == "I am b."
    assert server.states() == {"a": "unloaded", "b": "loaded"}
    assert server.ask("b") == "I am b." and server.ask(None) == "I am a."
    assert starts.events == ["start b", "started b", "start a", "started a"]


@covers("GET /v1/props", "model")
def test_probes_and_listings_load_nothing(serve: Serve, starts: Starts) -> None:
    server = serve("a", "b")
    assert set(probe(server).values()) == {200} and starts.events == []
    model = server.client.models.retrieve("a").model_dump()
    assert (model["max_model_len"], model["has_chat_template"], model["num_parameters"]) == (None, None, None)
    info = httpx.get(f"{server.url}/server_info").json()
    assert (info["models"], set(info["engine"].values()), info["system_fingerprint"]) == (["a", "b"], {None}, None)
    for path in ("/props", "/tokenizer_info"):
        answer = httpx.get(server.url + path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_loaded")
    server.ask("a")
    server.ask("b")
    assert httpx.get(server.url + "/props", params={"model": "b"}).json()["model_alias"] == "b"
    assert httpx.get(server.url + "/props", params={"model": "a"}).status_code == 503
    model = server.client.models.retrieve("a").model_dump()  # what it was found to be is remembered
    assert model["status"]["value"] == "unloaded" and (model["max_model_len"], model["num_parameters"]) == (256, 10**6)
    assert model["has_chat_template"] is True


def test_all_who_wait_wait_for_one_load(serve: Serve, starts: Starts) -> None:
    server = serve("a")
    gate = starts.held["a"] = threading.Event()
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(server.ask, "a") for _ in range(4)]
        wait_for(lambda: len(server.models[0].calls) == 4)
        wait_for(lambda: server.status("a")["doing"] == "Loading a")
        status = server.status("a")
        assert (status["value"], status["doing"], status["done"], status["total"]) == ("loading", "Loading a", 3, 7)
        gate.set()
        assert [one.result() for one in asked] == ["I am a."] * 4
    assert starts.events == ["start a", "started a"]


def test_a_load_goes_on_when_its_client_is_gone(serve: Serve, starts: Starts) -> None:
    server = serve("a")
    gate = starts.held["a"] = threading.Event()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/completions", json={"model": "a", "prompt": "Hi"}, timeout=httpx.Timeout(5, read=0.2))
    gate.set()
    wait_for(lambda: server.states() == {"a": "loaded"})
    wait_for(lambda: not server.models[0].calls)


def test_the_model_that_was_not_used_for_longest_makes_room(serve: Serve, starts: Starts) -> None:
    server = serve("a", "b", "c", max_loaded=2)
    for name in ("a", "b", "a"):
        server.ask(name)
    assert server.ask("c") == "I am c."
    assert server.states() == {"a": "loaded", "b": "unloaded", "c": "loaded"}
    assert starts.events[-3:] == ["stopped b", "start c", "started c"]  # its memory is free before the next loads


def test_a_model_that_is_loading_makes_no_room(serve: Serve, starts: Starts) -> None:
    server = serve("a", "b")
    starts.held["a"] = threading.Event()
    server.post("/models/load", "a")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.ask, "b")
        wait_for(lambda: server.states() == {"a": "loading", "b": "loading"} and starts.events == ["start a"])
        starts.held["a"].set()
        assert asked.result() == "I am b."
    assert starts.events == ["start a", "started a", "stopped a", "start b", "started b"]


def test_a_pinned_model_stays(serve: Serve, starts: Starts) -> None:
    server = serve("b", "c", a={"pinned": True}, max_loaded=2)
    for name in ("a", "b", "c"):
        server.ask(name)
    assert server.states() == {"b": "unloaded", "c": "loaded", "a": "loaded"}
    with pytest.raises(openai.ConflictError, match="model 'a' is pinned: it cannot be unloaded now"):
        server.post("/models/unload", "a")


def test_a_model_that_cannot_be_loaded_says_why_and_is_tried_again(
    serve: Serve, starts: Starts, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients are told in one line without paths; the log has the whole error."""
    server = serve("a", "b", max_loaded=2)
    starts.broken["a"] = CheckpointError("/models/a/model.safetensors is cut short")
    reason = "its files are damaged, or not of a kind that is served; the server's log has the details"
    for _ in range(2):
        with pytest.raises(openai.InternalServerError) as raised:
            server.ask("a")
        status, code, message = refusal(raised.value)
        assert (status, code) == (503, "model_failed") and f"model 'a' could not be loaded: {reason}" in message
        assert "/models" not in message
    shown = server.status("a")
    assert (shown["value"], shown["error"]) == ("failed", reason)
    assert "model a: /models/a/model.safetensors is cut short" in caplog.text
    assert set(probe(server).values()) == {200} and server.ask("b") == "I am b."
    del starts.broken["a"]
    assert server.ask("a") == "I am a." and server.status("a") == {"value": "loaded"}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConfigError("imatrix is '/home/me/a.dat': no such file"), "its settings cannot be honoured"),
        (EngineDeadError("the engine process is gone (exit code 1)"), "its engine did not start"),
        (PermissionError(13, "Permission denied", "/home/me/a.gguf"), "its engine did not start"),
    ],
)
def test_no_path_reaches_clients(
    serve: Serve, starts: Starts, caplog: pytest.LogCaptureFixture, error: Exception, reason: str
) -> None:
    server = serve("a")
    starts.broken["a"] = error
    with pytest.raises(openai.InternalServerError, match=f"could not be loaded: {reason}.*; the server's log"):
        server.ask("a")
    assert server.status("a")["error"].startswith(reason) and str(error) in caplog.text


def test_an_unknown_name_is_refused_with_the_nearest(serve: Serve) -> None:
    server = serve("smollm2", "gemma3", secret={"hidden": True})
    with pytest.raises(openai.NotFoundError) as raised:
        server.ask("smollm")
    assert "'smollm' is not served here; did you mean 'smollm2'; this server has smollm2, gemma3" in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_hidden_model_is_served_and_not_listed(serve: Serve) -> None:
    server = serve("a", b={"hidden": True})
    assert server.ask("b") == "I am b." and server.states() == {"a": "unloaded"}
    assert server.status("b") == {"value": "loaded"}


def test_an_idle_model_is_unloaded_after_its_ttl_and_probes_do_not_keep_it(serve: Serve, starts: Starts) -> None:
    server = serve("b", a={"ttl": 0.6}, max_loaded=2)
    assert (server.ask("a"), server.ask("b")) == ("I am a.", "I am b.")

    def unloaded() -> bool:
        probe(server)
        return server.states() == {"b": "loaded", "a": "unloaded"}

    wait_for(unloaded)
    wait_for(lambda: starts.events[-1] == "stopped a")


def test_a_busy_model_outlives_its_ttl(serve: Serve, starts: Starts) -> None:
    server = serve(a={"ttl": 0.1})
    starts.delays["a"] = 0.15  # 7 tokens: it answers for longer than it may be idle
    assert server.ask("a", max_tokens=7) == "I am a."
    assert starts.events[:2] == ["start a", "started a"]


def test_a_preloaded_model_is_there_before_any_request(serve: Serve, starts: Starts) -> None:
    server = serve("b", a={"preload": True})
    assert starts.events == ["start a", "started a"] and server.states() == {"b": "unloaded", "a": "loaded"}
    starts.engines["a"].ready = False
    assert probe(server)["/ready"] == 503
    assert server.ask("b") == "I am b."
    assert probe(server)["/ready"] == 200  # what was loaded later is not waited for
    starts.engines["b"].ready = False
    assert probe(server)["/ready"] == 200


@covers("POST /v1/models/load")
@covers("POST /v1/models/unload")
@covers("ModelRequest", "model")
def test_models_are_loaded_and_unloaded_by_routes(serve: Serve, starts: Starts) -> None:
    server = serve("a", "b")
    starts.delays["a"] = 0.2
    for _ in range(2):
        assert server.post("/models/load", "a") == {"success": True}
        wait_for(lambda: server.status("a")["value"] == "loaded")
    with (
        server.busy("a"),
        pytest.raises(openai.ConflictError, match="'a' is busy with 1 requests: it cannot be unload"),
    ):
        server.post("/models/unload", "a")
    wait_for(lambda: not server.models[0].calls)
    for _ in range(2):
        assert server.post("/models/unload", "a") == {"success": True}
    assert starts.events == ["start a", "started a", "stopped a"]
    assert server.states() == {"a": "unloaded", "b": "unloaded"}
    for path in ("/models/load", "/models/unload"):
        with pytest.raises(openai.NotFoundError, match="model 'c' is not served here"):
            server.post(path, "c")
    starts.held["b"] = threading.Event()
    server.post("/models/load", "b")
    with pytest.raises(openai.ConflictError, match="model 'b' is loading"):
        server.post("/models/unload", "b")


def test_counters_outlive_an_engine(serve: Serve) -> None:
    server = serve("a", "b")

    def metric(name: str, model: str) -> dict[str, float]:
        text = httpx.get(server.url.removesuffix("/v1") + "/metrics").text
        families = {family.name: family for family in text_string_to_metric_families(text)}
        samples = families[name].samples if name in families else []
        return {one.name: one.value for one in samples if one.labels["model_name"] == model}

    assert metric("jaxllm:steps", "a") == {}
    for name, steps in (("a", 4), ("b", 4), ("a", 8)):
        server.ask(name)
        assert metric("jaxllm:steps", name) == {"jaxllm:steps_total": steps}
    assert metric("jaxllm:steps", "b") == {"jaxllm:steps_total": 4}  # unloaded by now
    assert metric("jaxllm:kv_pages", "b") == {"jaxllm:kv_pages": 0}
    assert metric("jaxllm:request_success", "a") == {"jaxllm:request_success_total": 2}


def test_what_engines_counted_is_added() -> None:
    one = EngineStats(num_steps=2, num_running=5, accepted_by_position=[1, 2], scheduled_tokens={"d": 1}, ready=True)
    other = EngineStats(num_steps=3, num_pages=9, accepted_by_position=[4], scheduled_tokens={"d": 1, "p": 6})
    total = added(one, other)
    assert (total.num_steps, total.accepted_by_position, total.scheduled_tokens) == (5, [5, 2], {"d": 2, "p": 6})
    assert (total.num_running, total.num_pages, total.ready) == (0, 9, False)
    assert counted(one) == EngineStats(num_steps=2, accepted_by_position=[1, 2], scheduled_tokens={"d": 1})
    assert set(EngineStats.__struct_fields__) > GAUGES


def test_no_load_begins_while_the_server_stops(serve: Serve, starts: Starts) -> None:
    server = serve("a", "b", max_loaded=2)
    starts.held["a"] = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.ask, "a")
        wait_for(lambda: starts.events == ["start a"])
        server.app.state.server.drain()
        with pytest.raises(openai.InternalServerError) as raised:
            asked.result()  # its load is given up
    assert refusal(raised.value)[:2] == (503, "shutting_down")
    with pytest.raises(openai.InternalServerError, match="the server is shutting down"):
        server.ask("b")
    assert starts.events == ["start a"]


def test_lines_of_a_batch_load_their_models(serve: Serve, starts: Starts) -> None:
    server = serve("a", "b")
    starts.delays = {"a": 0.001, "b": 0.001}
    batch = server.finished(server.submit([chat(n, model="ab"[n // 4]) for n in range(8)]), 60)
    assert batch.request_counts.model_dump() == {"total": 8, "completed": 8, "failed": 0}
    bodies = [line["response"]["body"] for line in server.results(batch.output_file_id).values()]
    assert {body["choices"][0]["message"]["content"] for body in bodies} == {"I am a.", "I am b."}
    assert [event for event in starts.events if event.startswith("start ")] == ["start a", "start b"]


def test_a_line_of_a_model_that_cannot_be_loaded_fails(serve: Serve, starts: Starts) -> None:
    server = serve("a", "b")
    starts.broken["b"] = CheckpointError("b.gguf is cut short")
    batch = server.finished(server.submit([chat(0, model="a"), chat(1, model="b")]), 60)
    assert batch.request_counts.model_dump() == {"total": 2, "completed": 1, "failed": 1}
    [failed] = server.results(batch.error_file_id).values()
    assert failed["response"]["status_code"] == 503 and "its files are damaged" in str(failed["response"]["body"])


def test_the_command_line_shows_the_models(serve: Serve, starts: Starts, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve("a", "b")
    starts.broken["b"] = CheckpointError("b.gguf is cut short")
    server.ask("a")
    with pytest.raises(openai.InternalServerError):
        server.ask("b")

    def shown(*flags: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["models", "--server", server.url, *flags])
        assert not ended.value.code
        return capsys.readouterr().out

    table = shown()
    assert "unloaded" in table and "failed: its files are damaged" in table and "256" in table
    assert {model["id"]: model["status"]["value"] for model in json.loads(shown("--json"))} == {
        "a": "unloaded",
        "b": "failed",
    }
