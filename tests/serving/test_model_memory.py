"""Models that together take no more memory than they may, and which of them goes for another."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from jaxllm.config import ModelConfig, ServeConfig
from jaxllm.errors import ConfigError
from jaxllm.serving.catalog import ServerModels
from jaxllm.serving.served_model import LoadableModel
from tests.serving.conftest import wait_for
from tests.serving.on_demand import Serve, Starts, refusal, serve, starts

__all__ = ["serve", "starts"]

GIB = 2**30


def test_as_many_models_are_loaded_as_fit(serve: Serve, starts: Starts) -> None:
    starts.sizes = {"a": 2 * GIB, "b": 3 * GIB, "c": 4 * GIB}
    server = serve("a", "b", "c", max_loaded=None, memory=6 * GIB)
    for name in ("a", "b", "a"):
        server.ask(name)
    assert server.states() == {"a": "loaded", "b": "loaded", "c": "unloaded"}
    assert server.ask("c") == "I am c."  # b was not used for longest, and a may stay: 2 + 4
    assert server.states() == {"a": "loaded", "b": "unloaded", "c": "loaded"}
    server.ask("b")
    assert server.states() == {"a": "unloaded", "b": "loaded", "c": "unloaded"}  # neither fits beside it with the other


def test_nobody_goes_for_a_model_that_has_no_room(serve: Serve, starts: Starts) -> None:
    """Although one of the two would be idle: without the other that is not enough."""
    starts.sizes = {"a": 2 * GIB, "b": 2 * GIB, "c": 4 * GIB}
    starts.delays = {"b": 0.2}
    server = serve("a", "b", "c", max_loaded=None, memory=4 * GIB)
    server.ask("a")
    with ThreadPoolExecutor(2) as pool:
        with server.busy("b"):
            asked = pool.submit(server.ask, "c")
            wait_for(lambda: server.models[2].planned_bytes == 4 * GIB)
            late = pool.submit(server.ask, "a")  # it was asked for after c
            time.sleep(0.1)
            assert server.states() == {"a": "loaded", "b": "loaded", "c": "loading"} and not late.done()
        assert (asked.result(), late.result()) == ("I am c.", "I am a.")
    assert starts.events[-3:] == ["stopped c", "start a", "started a"]


def test_a_model_that_cannot_start_unloads_nobody(serve: Serve, starts: Starts) -> None:
    server = serve("a", "b")
    starts.misfits["b"] = "b needs 9 GiB of memory, and model_memory is 6 GiB"
    server.ask("a")
    with pytest.raises(openai.InternalServerError) as raised:
        server.ask("b")
    status, code, message = refusal(raised.value)
    assert (status, code) == (503, "model_failed") and "model 'b' could not be loaded: its settings" in message
    assert server.states() == {"a": "loaded", "b": "failed"}
    assert starts.events == ["start a", "started a"]


def test_pinned_models_leave_no_room(serve: Serve, starts: Starts) -> None:
    starts.sizes = {"a": 5 * GIB, "b": 2 * GIB}
    server = serve("b", a={"pinned": True}, max_loaded=None, memory=6 * GIB)
    server.ask("a")
    with pytest.raises(openai.InternalServerError) as raised:
        server.ask("b")
    status, code, message = refusal(raised.value)
    assert (status, code) == (503, "model_failed")
    assert "a stay loaded (pinned) and leave no room for b: it takes 2 GiB, and model_memory is 6 GiB" in message


def test_models_that_are_preloaded_must_fit_together(starts: Starts) -> None:
    starts.sizes = {"a": 4 * GIB, "b": 3 * GIB}
    models = ServerModels(ServeConfig())
    models._config = ServeConfig(model="a", model_memory=6 * GIB)
    models._are_several = True
    models._models = [LoadableModel(ModelConfig(model=name), starts, preload=True) for name in "ab"]
    with pytest.raises(ConfigError, match="model 'b': it takes 3 GiB of memory, and those preloaded before it 4 GiB"):
        models.start()
    models.shutdown()


def test_probes_and_listings_reset_no_timer(serve: Serve, starts: Starts) -> None:
    server = serve("a")
    server.ask("a")
    wait_for(lambda: not server.models[0].calls)
    before = server.models[0].last_used
    base = server.url.removesuffix("/v1")
    for path in (
        "/health",
        "/ready",
        "/livez",
        "/load",
        "/metrics",
        "/models",
        "/v1/models/a",
        "/props",
        "/server_info",
    ):
        assert httpx.get(base + path).status_code == 200
    assert server.models[0].last_used == before
