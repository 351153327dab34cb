"""What a server answers before its model is loaded, and how it ends where that fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxllm.config import ServeConfig
from jaxllm.errors import ConfigError
from jaxllm.progress import tell
from jaxllm.serving.entrance import Server
from jaxllm.serving.http.listening import address, bind
from jaxllm.serving.server import run_server
from jaxllm.serving.state import Registry
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import FakeEngine, single_model
from tests.support.covers import covers

HELLO = [{"role": "user", "content": "Hi"}]


class Slow:
    """A start that tells how far it is and goes on when it is let."""

    def __init__(self, config: ServeConfig):
        self.config = config
        self.told, self.may_end = threading.Event(), threading.Event()
        self.error: Exception | None = None

    def __call__(self) -> Registry:
        tell("Loading fake", 3, 7)
        self.told.set()
        assert self.may_end.wait(60)
        if self.error is not None:
            raise self.error
        return single_model(self.config, FakeEngine())  # type: ignore[arg-type]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., tuple[httpx.Client, Slow, Server]]]:
    running: list[tuple[Server, Slow, threading.Thread]] = []

    def start(**settings: Any) -> tuple[httpx.Client, Slow, Server]:
        config = ServeConfig(model="fake", port=0, data_dir=tmp_path, **settings)
        slow = Slow(config)
        listener = bind(config.host, 0)
        server = Server(config.of_server, slow, listener)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        running.append((server, slow, thread))
        assert slow.told.wait(30)
        return httpx.Client(base_url=address(listener), timeout=10), slow, server

    yield start
    for server, slow, thread in running:
        slow.may_end.set()
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


@covers("GET /livez")
def test_probes_answer_at_once_and_tell_how_far_it_is(begin: Any) -> None:
    client, slow, _ = begin()
    assert client.get("/livez").json() == {"status": "ok"}
    for path in ("/ready", "/health", "/ping"):
        answer = client.get(path)
        assert answer.status_code == 503 and answer.headers["Retry-After"] == "1"
        assert answer.json() == {"status": "loading", "doing": "Loading fake", "done": 3, "total": 7}
    assert client.get("/version").status_code == 200
    slow.may_end.set()
    wait_for(lambda: client.get("/ready").status_code == 200)
    assert client.get("/livez").json() == {"status": "ok"}
    assert client.get("/health").json() == {"status": "ok"}
    body = {"messages": HELLO, "max_tokens": 3}
    assert client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == "The"


def test_requests_are_refused_in_their_own_api_s_shape(begin: Any) -> None:
    client, _, _ = begin(root_path="/llm", api_key="secret")
    said = "the model is loading: Loading fake (3 of 7); /ready answers 200 when it is done"
    for path in ("/v1/chat/completions", "/completions", "/llm/v1/responses", "/v2/rerank", "/nowhere"):
        refused = client.post(path, json={})
        assert refused.status_code == 503 and refused.headers["Retry-After"] == "1", path
        assert refused.json()["error"]["message"] == said and refused.json()["error"]["code"] == "loading"
    for path in ("/v1/messages", "/messages/count_tokens", "/llm/v1/messages"):
        refused = client.post(path, json={})
        assert refused.status_code == 529 and refused.headers["Retry-After"] == "1"  # what Anthropic's clients retry
        assert refused.json() == {
            "type": "error",
            "error": {"type": "overloaded_error", "message": said},
            "request_id": refused.headers["request-id"],
        }
    assert client.post("/api/chat", json={}).json() == {"error": said}


def test_the_page_is_served_while_the_model_loads(begin: Any) -> None:
    client, _, _ = begin()
    page = client.get("/", headers={"Accept": "text/html"})
    assert page.status_code == 200 and "<html" in page.text and "Content-Security-Policy" in page.headers
    without, _, _ = begin(web=False)
    assert without.get("/").status_code == 503


def test_foreign_pages_are_refused_before_the_model_is_loaded(begin: Any) -> None:
    client, _, _ = begin()
    assert client.get("/ready", headers={"Origin": "https://example.com"}).status_code == 403


def test_a_start_that_fails_ends_the_server_with_its_error(tmp_path: Path) -> None:
    config = ServeConfig(model="fake", port=0, data_dir=tmp_path)
    slow = Slow(config)
    slow.error = ConfigError("model is 'fake', which is none")
    slow.may_end.set()
    with bind(config.host, 0) as listener, pytest.raises(ConfigError, match="model is 'fake', which is none"):
        run_server(config.of_server, slow, listener)
