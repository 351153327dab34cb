"""A stream whose model is still to be loaded says so in comments, and ends as the other streams of its API do."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from jaxllm.errors import CheckpointError
from jaxllm.serving.http import streaming
from tests.serving.conftest import wait_for
from tests.serving.on_demand import Serve, Several, Starts, serve, starts

__all__ = ["serve", "starts"]

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/chat/completions": CHAT,
    "/completions": {"prompt": "Hi", "max_tokens": 50},
    "/responses": {"input": "Hi"},
    "/messages": CHAT | {"max_tokens": 50},
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "NOTICE_SECONDS", 0.05)
    monkeypatch.setattr(streaming, "LOOK_SECONDS", 0.02)


@contextmanager
def streamed(server: Several, path: str, **fields: Any) -> Iterator[Iterator[str]]:
    """The lines of a stream of model a."""
    body = {"model": "a", "stream": True} | BODIES[path] | fields
    with httpx.stream("POST", server.url + path, json=body, timeout=20) as response:
        assert response.status_code == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        yield response.iter_lines()


@pytest.mark.parametrize("path", BODIES)
def test_comments_go_before_the_answer(serve: Serve, starts: Starts, path: str) -> None:
    server = serve("a")
    gate = starts.held["a"] = threading.Event()
    with streamed(server, path) as lines:
        comments = []
        while "(3 of 7)" not in (line := next(lines)):  # what it waits for changes until then
            comments.append(line)
        assert line == ": loading a: Loading a (3 of 7)"
        assert all(comment == "" or comment.startswith(": loading a: ") for comment in comments)
        gate.set()
        rest = [line for line in lines if line.startswith("data: ")]
    assert said(rest) == "I am a."
    again = list(answer(server, path))
    assert len(rest) == len(again)  # loaded, it says the same without comments


def said(events: list[str]) -> str:
    """The text that an API's events bring."""
    text = ""
    for line in events:
        match json.loads(line.removeprefix("data: ").replace("[DONE]", "null")):
            case {"choices": [{"delta": {"content": str(piece)}}]} | {"choices": [{"text": piece}]}:
                text += piece
            case {"type": "response.output_text.delta", "delta": piece} | {"delta": {"text": piece}}:
                text += piece
    return text


def answer(server: Several, path: str) -> Iterator[str]:
    with streamed(server, path) as lines:
        yield from (line for line in lines if line.startswith("data: "))


def test_a_client_reads_it_as_any_stream(serve: Serve, starts: Starts) -> None:
    server = serve("a")
    gate = starts.held["a"] = threading.Event()
    threading.Timer(0.3, gate.set).start()
    stream = server.client.completions.create(model="a", prompt="Hi", max_tokens=50, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "I am a."


@pytest.mark.parametrize("path", BODIES)
def test_a_load_that_fails_becomes_an_event_of_the_api(serve: Serve, starts: Starts, path: str) -> None:
    server = serve("a")
    gate = starts.held["a"] = threading.Event()
    starts.broken["a"] = CheckpointError("it is cut short")
    with streamed(server, path) as lines:
        assert next(lines).startswith(": loading a")
        gate.set()
        events = [line for line in lines if line and not line.startswith(":")]
    if path == "/messages":
        assert events[0] == "event: error"
        told = json.loads(events[1].removeprefix("data: "))
        assert told["type"] == "error" and told["error"]["type"] == "overloaded_error"
    else:
        told = json.loads(events[0].removeprefix("data: "))
        assert told["error"]["code"] == "model_failed" and events[-1] == "data: [DONE]"
    assert "its files are damaged" in told["error"]["message"]
    wait_for(lambda: not server.models[0].calls)


def test_what_fails_at_once_has_its_own_status(serve: Serve, starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "NOTICE_SECONDS", 60)  # on a busy machine a load takes its time
    server = serve("a", "b")
    starts.misfits["a"] = "it is too large"
    with pytest.raises(openai.InternalServerError, match="its settings cannot be honoured"):
        server.client.completions.create(model="a", prompt="Hi", stream=True)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        server.client.completions.create(model="b", prompt="Hi", stream=True, temperature=-1)


def test_what_fails_after_the_load_is_an_event_too(serve: Serve, starts: Starts) -> None:
    server = serve("a")
    gate = starts.held["a"] = threading.Event()
    with streamed(server, "/completions", prompt="x" * 3000) as lines:
        assert next(lines).startswith(": loading a")
        gate.set()
        events = [line for line in lines if line.startswith("data: ")]
    assert "context" in json.loads(events[0].removeprefix("data: "))["error"]["message"]


def test_a_client_that_leaves_ends_its_wait_and_not_the_load(serve: Serve, starts: Starts) -> None:
    server = serve("a")
    gate = starts.held["a"] = threading.Event()
    with streamed(server, "/completions") as lines:
        next(lines)
        assert len(server.models[0].calls) == 1
    wait_for(lambda: not server.models[0].calls)
    gate.set()
    wait_for(lambda: server.states() == {"a": "loaded"})


def test_an_answer_that_is_no_stream_waits_without_a_byte(serve: Serve, starts: Starts) -> None:
    server = serve("a")
    gate = starts.held["a"] = threading.Event()
    threading.Timer(0.3, gate.set).start()
    assert server.ask("a") == "I am a."
