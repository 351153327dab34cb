"""Memory that large bodies share while they are read."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.serving.fake_engine import FakeEngine
from tests.serving.http.test_connections import connected, until_closed

MIB = 2**20
LARGE = {"prompt": "Hi", "user": "a" * (900 * 1024)}


def test_a_body_that_has_stopped_makes_room_for_one_that_comes(listen: Callable[..., str], engine: FakeEngine) -> None:
    url = listen(engine, max_body_size=MIB, max_body_memory=5 * MIB // 2)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    begun = head + b"Content-Length: %d\r\n\r\n" % MIB + b"a" * (MIB - 100)
    with connected(url) as first, connected(url) as second, connected(url) as third:
        for connection in (first, second, third):
            connection.sendall(begun)
            httpx.post(f"{url}/v1/completions", json={"prompt": "Hi"}).raise_for_status()  # a short one has room
        first.sendall(b"a")
        head, _, answer = until_closed(first).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in head.lower()
        assert json.loads(answer)["error"]["code"] == "bodies_too_large"
        httpx.post(f"{url}/v1/completions", json=LARGE).raise_for_status()
        second.sendall(b"a")
        assert until_closed(second).startswith(b"HTTP/1.1 503 ")
        third.sendall(b"a" * 100)  # it is complete, and no JSON
        assert third.recv(65536).startswith(b"HTTP/1.1 400 ")


def test_memory_is_given_back(listen: Callable[..., str], engine: FakeEngine) -> None:
    url = listen(engine, max_body_size=MIB, max_body_memory=MIB)
    with httpx.Client() as client:
        for _ in range(4):
            assert client.post(f"{url}/v1/completions", json=LARGE).status_code == 200
            assert client.post(
                f"{url}/v1/completions", content=b"{" * MIB, headers={"Content-Type": "application/json"}
            )


def test_a_body_has_room_where_no_other_is(listen: Callable[..., str], engine: FakeEngine) -> None:
    url = listen(engine, max_body_size=MIB, max_body_memory=1000)
    assert httpx.post(f"{url}/v1/completions", json=LARGE).status_code == 200


def test_an_upload_is_not_kept_in_memory(make_client: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk: list[Any] = []
    roll_over = tempfile.SpooledTemporaryFile.rollover

    def noted(file: Any) -> None:
        on_disk.append(file)
        roll_over(file)

    monkeypatch.setattr(tempfile.SpooledTemporaryFile, "rollover", noted)
    files = {"file": ("a.jsonl", b"{}\n" * 50_000)}
    answer = make_client(engine).post("/v1/files", data={"purpose": "batch"}, files=files)
    assert answer.json()["bytes"] == 150_000 and on_disk
