"""HEAD and a slash at the end of a path: other spellings of the same route."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fastapi.testclient import TestClient

from tests.serving.fake_engine import FakeEngine
from tests.serving.http.test_connections import connected, until_closed

HELLO = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/ready", "/livez", "/metrics", "/version", "/", "/docs"])
def test_head_is_get_without_the_body(client: TestClient, path: str) -> None:
    whole, head = client.get(path), client.head(path)
    assert whole.status_code == head.status_code == 200
    assert whole.content and not head.content
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert head.headers.get("content-length") == whole.headers.get("content-length")


def test_head_is_refused_as_get_is(make_client: Callable[..., TestClient], engine: FakeEngine) -> None:
    client = make_client(engine, api_key="sesame")
    assert client.head("/v1/models").status_code == client.get("/v1/models").status_code == 401
    assert client.head("/nowhere").status_code == 404
    key = {"Authorization": "Bearer sesame"}
    assert client.head("/v1/chat/completions", headers=key).status_code == 405


def test_head_over_a_socket_says_how_long_the_body_would_be(listen: Callable[..., str], engine: FakeEngine) -> None:
    with connected(listen(engine)) as connection:
        connection.sendall(b"HEAD /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        head, _, body = until_closed(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK") and b"content-length: " in head and not body


def test_a_slash_at_the_end_changes_nothing(client: TestClient) -> None:
    assert client.get("/v1/models/").json() == client.get("/v1/models").json()
    assert client.get("/health/").status_code == 200
    assert client.post("/v1/chat/completions/", json=HELLO).status_code == 200
    assert client.get("/v1/models/fake/").json()["id"] == "fake"
    assert client.get("/v1/nowhere/").status_code == 404


def test_a_slash_under_a_prefix(make_client: Callable[..., TestClient], engine: FakeEngine) -> None:
    client = make_client(engine, root_path="/llm")
    assert client.get("/llm/v1/models/").status_code == 200
    assert client.get("/llm/", headers={"Accept": "text/html"}).headers["content-type"].startswith("text/html")
    assert "src='/llm/docs/" in client.get("/llm/docs/").text.replace('"', "'")
