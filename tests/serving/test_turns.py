"""Who waits for a model that is not loaded has a turn, however busy those are that are loaded."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

import httpx
import openai
import pytest

from tests.serving.batches.running import chat
from tests.serving.conftest import wait_for
from tests.serving.on_demand import Serve, Several, Starts, refusal, serve, starts

__all__ = ["serve", "starts"]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(30) as threads:
        yield threads


def waiting(server: Several, at: int) -> int:
    """How many requests wait for a model."""
    return sum(call.waits for call in server.models[at].calls)


@contextmanager
def busy(server: Several, name: str) -> Iterator[None]:
    """While a model gives an answer of 40 seconds, which nobody reads to its end."""
    server.ask(name)
    engine = server.starts.engines[name]
    said, engine.reply, engine.delay = engine.reply, "on and on " * 20, 0.2
    with server.busy(name):
        engine.reply = said
        yield
        engine.delay = 0.0


def queue(server: Several, pool: ThreadPoolExecutor, name: str) -> Future[str]:
    """Ask a model, and return when that waits."""
    at = next(at for at, model in enumerate(server.models) if model.name == name)
    before = waiting(server, at)
    asked = pool.submit(server.ask, name)
    wait_for(lambda: waiting(server, at) == before + 1)
    return asked


def begun(starts: Starts) -> str:
    """The models whose engines were started, in order."""
    return "".join(event.removeprefix("start ") for event in starts.events if event.startswith("start "))


def test_busy_models_starve_no_other(serve: Serve, starts: Starts, pool: ThreadPoolExecutor) -> None:
    """5 models, of which one is loaded at a time, and 30 clients who ask again as soon as they are answered."""
    server = serve(*"abcde")
    starts.delays = dict.fromkeys("abcde", 0.005)
    end = time.monotonic() + 4

    def client(number: int) -> Counter[str]:
        said: Counter[str] = Counter()
        while time.monotonic() < end:
            said[server.ask("abcde"[number % 5])] += 1
        return said

    said = sum(pool.map(client, range(30)), Counter())  # nobody is refused
    assert said.keys() == {f"I am {name}." for name in "abcde"}
    assert min(said.values()) * 3 > max(said.values())


def test_first_come_first_served(serve: Serve, starts: Starts, pool: ThreadPoolExecutor) -> None:
    server = serve("a", "b", "c")
    with busy(server, "a"):
        asked = [queue(server, pool, name) for name in "bacb"]
        time.sleep(0.1)
        assert starts.events == ["start a", "started a"] and not any(one.done() for one in asked)
        assert server.states() == {"a": "loaded", "b": "loading", "c": "loading"}
        assert "Waiting for its turn" in server.status("c")["doing"]
    assert [one.result() for one in asked] == ["I am b.", "I am a.", "I am c.", "I am b."]
    assert begun(starts) == "abac"  # both requests for b in one turn


def test_too_many_who_wait_for_a_model_are_refused(serve: Serve, starts: Starts, pool: ThreadPoolExecutor) -> None:
    server = serve("a", "b", "c")
    server.models[1].config = server.models[1].config.model_copy(update={"max_num_waiting": 2})
    with busy(server, "a"):
        asked = [queue(server, pool, name) for name in "bbc"]
        with pytest.raises(openai.InternalServerError) as raised:
            server.ask("b")
        status, code, message = refusal(raised.value)
        assert (status, code) == (503, "at_capacity")
        assert "at capacity: 2 requests wait for b already, and max_num_waiting is 2; retry later" in message
        assert raised.value.response.headers["Retry-After"] == "1"
    assert [one.result() for one in asked] == ["I am b.", "I am b.", "I am c."]


def test_a_busy_model_stays_for_a_while(serve: Serve, starts: Starts, pool: ThreadPoolExecutor) -> None:
    server = serve("a", "b", min_seconds=1000.0)
    with busy(server, "a"):
        asked = queue(server, pool, "b")
        assert server.ask("a", max_tokens=1) == "I" and not asked.done()
    assert asked.result() == "I am b."  # a idle model makes room at once
    assert begun(starts) == "ab"


def test_a_busy_model_stays_no_longer_than_that(serve: Serve, pool: ThreadPoolExecutor) -> None:
    server = serve("a", "b", min_seconds=1.0)
    with busy(server, "a"):
        asked = queue(server, pool, "b")
        until = server.models[0].loaded_at + 1.0
        time.sleep(max(until - time.monotonic(), 0.0))
        late = queue(server, pool, "a")
    assert (asked.result(), late.result()) == ("I am b.", "I am a.")


def test_only_as_many_models_make_room_as_must(serve: Serve, starts: Starts, pool: ThreadPoolExecutor) -> None:
    server = serve("a", "b", "c", max_loaded=2)
    with busy(server, "a"), busy(server, "b"):
        asked = queue(server, pool, "c")
        assert server.ask("b", max_tokens=1) == "I"  # a was loaded before b
        late = queue(server, pool, "a")
        assert not asked.done()
    assert (asked.result(), late.result()) == ("I am c.", "I am a.")


def test_who_waits_goes_on_where_the_other_model_cannot_start(
    serve: Serve, starts: Starts, pool: ThreadPoolExecutor
) -> None:
    server = serve("a", "b")
    starts.misfits["b"] = "b needs 9 GiB of memory"
    with busy(server, "a"):
        asked, late = queue(server, pool, "b"), queue(server, pool, "a")
    assert late.result() == "I am a."
    with pytest.raises(openai.InternalServerError, match="model 'b' could not be loaded"):
        asked.result()
    assert starts.events == ["start a", "started a"]


def test_a_stream_that_waits_for_its_turn_is_told_so(serve: Serve, starts: Starts, pool: ThreadPoolExecutor) -> None:
    server = serve("a", "b")
    starts.held["b"] = Event()
    with busy(server, "a"):
        asked = queue(server, pool, "b")
        body = {"model": "a", "prompt": "Hi", "max_tokens": 2, "stream": True}
        with httpx.stream("POST", f"{server.url}/completions", json=body, timeout=20) as response:
            lines = response.iter_lines()
            assert next(lines) == ": loading a: Waiting for its turn"
    starts.held["b"].set()
    assert asked.result() == "I am b."
    wait_for(lambda: not any(model.calls for model in server.models))


def test_a_batch_makes_no_busy_model_give_way(serve: Serve, starts: Starts) -> None:
    server = serve("a", "b")
    with busy(server, "a"):
        batch_id = server.submit([chat(0, model="b")])
        wait_for(lambda: server.client.batches.retrieve(batch_id).status == "in_progress")
        time.sleep(0.3)
        assert server.ask("a", max_tokens=1) == "I" and begun(starts) == "a"
    assert server.finished(batch_id).request_counts.completed == 1


def test_who_waits_is_refused_when_the_server_stops(serve: Serve, starts: Starts, pool: ThreadPoolExecutor) -> None:
    server = serve("a", "b")
    with busy(server, "a"):
        asked = [queue(server, pool, name) for name in "ba"]
        server.app.state.server.drain()
        for one in asked:
            with pytest.raises(openai.InternalServerError, match="the server is shutting down"):
                one.result()
    assert begun(starts) == "a"
