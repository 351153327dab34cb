"""/models/sse tells what becomes of each model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import openai
import pytest

from jaxllm.errors import CheckpointError
from tests.serving.conftest import wait_for
from tests.serving.on_demand import Serve, Several, Starts, serve, starts
from tests.support.covers import covers

DAMAGED = "its files are damaged, or not of a kind that is served; the server's log has the details"

__all__ = ["serve", "starts"]


class Follower:
    """Reads events in a thread."""

    def __init__(self, lines: Iterator[str]):
        self.seen: list[dict[str, Any]] = []
        self.comments = 0
        self._thread = threading.Thread(target=self._read, args=(lines,), daemon=True)
        self._thread.start()

    def of(self, model: str) -> list[str]:
        return [event["data"]["status"] for event in self.seen if event["model"] == model]

    def last(self, model: str) -> dict[str, Any]:
        return [event["data"] for event in self.seen if event["model"] == model][-1]

    def ended(self) -> bool:
        return not self._thread.is_alive()

    def _read(self, lines: Iterator[str]) -> None:
        with suppress(httpx.ReadError):  # the test has closed the connection
            for line in lines:
                if line.startswith(":"):
                    self.comments += 1
                elif line:
                    self.seen.append(json.loads(line.removeprefix("data: ")))


@contextmanager
def following(server: Several) -> Iterator[Follower]:
    with httpx.stream("GET", f"{server.url}/models/sse", timeout=30) as response:
        assert response.status_code == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        follower = Follower(response.iter_lines())
        wait_for(lambda: len(follower.seen) == len(server.registry.names))
        yield follower


@covers("GET /v1/models/sse")
def test_each_change_is_told_to_who_follows(serve: Serve, starts: Starts) -> None:
    server = serve("a", "b", hidden={"hidden": True})
    gate = starts.held["a"] = threading.Event()
    with following(server) as follower:
        assert follower.seen == [
            {"model": name, "event": "model_status", "data": {"status": "unloaded"}} for name in ("a", "b")
        ]
        server.post("/models/load", "a")
        wait_for(lambda: follower.last("a").get("progress", {}).get("value") == 3 / 7)
        assert follower.last("a") == {
            "status": "loading",
            "progress": {"stages": ["Loading a"], "current": "Loading a", "value": 3 / 7},
        }
        gate.set()
        wait_for(lambda: follower.last("a")["status"] == "loaded")
        info = {"max_model_len": 256, "has_chat_template": True, "num_parameters": 10**6}
        assert follower.last("a") == {"status": "loaded", "info": info}
        wait_for(lambda: not server.models[0].calls)
        server.ask("b")  # which takes the place of a
        wait_for(lambda: follower.last("b")["status"] == "loaded")
        assert follower.last("a") == {"status": "unloaded"}
    assert starts.events[:2] == ["start a", "started a"]  # to follow loads nothing
    assert not {event["model"] for event in follower.seen} - {"a", "b"}


def test_why_a_load_failed_is_told(serve: Serve, starts: Starts) -> None:
    server = serve("a")
    starts.broken["a"] = CheckpointError("it is cut short")
    with following(server) as follower:
        with pytest.raises(openai.InternalServerError):
            server.ask("a")
        wait_for(lambda: follower.last("a") == {"status": "failed", "error": DAMAGED})


def test_it_ends_when_the_server_stops(serve: Serve) -> None:
    server = serve("a")
    with following(server) as follower:
        server.app.state.server.drain()
        wait_for(follower.ended)
    assert not server.registry.changes._bells


def test_silence_is_filled(serve: Serve) -> None:
    server = serve("a", sse_keep_alive=0.05)
    with following(server) as follower:
        wait_for(lambda: follower.comments >= 2)
