"""A request says how long its model stays loaded after it."""

from __future__ import annotations

import time
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from jaxllm.serving.http.request_model import FOREVER, KeepAliveFields
from tests.serving.conftest import wait_for
from tests.serving.on_demand import Serve, Several, Starts, serve, starts
from tests.support.covers import covers

__all__ = ["serve", "starts"]


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("10m", 600), ("1h30m", 5400), ("1.5s", 1.5), ("250ms", 0.25), ("+2m", 120), ("0", 0), ("0s", 0), ("-0s", 0),
        (300, 300), (0, 0), (0.5, 0.5), (-1, FOREVER), (-0.5, FOREVER), ("-1m", FOREVER), (None, None),
    ],
)  # fmt: skip
def test_a_time_is_spelled_as_ollama_spells_it(said: Any, meant: float | None) -> None:
    assert KeepAliveFields.model_validate({"keep_alive": said}).keep_alive == meant


@pytest.mark.parametrize("said", ["", "10", "10 m", "m", "-", "ten minutes", "1d", True, [], {}, "9" * 100 + "h"])
def test_what_is_no_time_is_refused(said: Any) -> None:
    with pytest.raises(ValidationError, match='it must be seconds, or a time such as "10m"'):
        KeepAliveFields.model_validate({"keep_alive": said})


def ask(server: Several, model: str, keep_alive: Any) -> None:
    assert server.ask(model, extra_body={"keep_alive": keep_alive}) == f"I am {model}."


@covers("KeepAliveFields", "keep_alive")
def test_a_model_goes_when_its_request_said_so(serve: Serve, starts: Starts) -> None:
    server = serve("a", "b", max_loaded=2)
    server.ask("b")
    ask(server, "a", 0)
    wait_for(lambda: starts.events[-1] == "stopped a")
    assert server.states() == {"a": "unloaded", "b": "loaded"}
    ask(server, "a", "100ms")
    wait_for(lambda: starts.events[-1] == "stopped a")
    assert server.states() == {"a": "unloaded", "b": "loaded"}


def test_the_last_request_that_says_something_counts(serve: Serve, starts: Starts) -> None:
    server = serve(a={"ttl": 0.01})
    ask(server, "a", -1)
    server.ask("a")  # it says nothing: what was said before stays
    time.sleep(1.2)  # idle models are looked for twice in this time
    assert server.states() == {"a": "loaded"}
    ask(server, "a", 0)
    wait_for(lambda: server.states() == {"a": "unloaded"})
    server.ask("a")  # loaded anew it has its own ttl again
    wait_for(lambda: starts.events[-1] == "stopped a" and server.states() == {"a": "unloaded"})


def test_a_model_that_stays_for_good_still_makes_room(serve: Serve, starts: Starts) -> None:
    server = serve("a", "b")
    ask(server, "a", -1)
    assert server.ask("b") == "I am b."
    assert server.states() == {"a": "unloaded", "b": "loaded"}


def test_a_pinned_model_cannot_be_told_to_go(serve: Serve) -> None:
    server = serve("b", a={"pinned": True}, max_loaded=2)
    ask(server, "a", -1)
    with pytest.raises(openai.BadRequestError) as raised:
        ask(server, "a", "10m")
    assert "keep_alive is 600 s: model 'a' is not unloaded; leave it out, or send -1" in str(raised.value)
    assert raised.value.param == "keep_alive"
    assert not server.models[0].calls and not server.models[1].calls


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/responses", {"input": "Hi"}),
        ("/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}),
        ("/embeddings", {"input": "Hi"}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
def test_every_kind_of_request_may_say_it(serve: Serve, starts: Starts, path: str, body: dict[str, Any]) -> None:
    server = serve("a")
    answer = httpx.post(server.url + path, json={"model": "a", "keep_alive": 0} | body, timeout=20)
    assert answer.status_code == 200, answer.text
    wait_for(lambda: starts.events[-1] == "stopped a")
