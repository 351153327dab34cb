"""Connections that send too much or too slowly, on raw sockets."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest

from jaxllm.serving.http import connections
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import FakeEngine

BODY = b"Content-Type: application/json\r\nContent-Length: 5000\r\n\r\n"


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        yield connection


def until_closed(connection: socket.socket) -> bytes:
    received = b""
    try:
        while part := connection.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return received


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.5)
    monkeypatch.setattr(connections, "BODY_SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(connections, "CHECK_SECONDS", 0.05)


@pytest.mark.parametrize(
    "head",
    [
        b"".join(b"X-%d: a\r\n" % i for i in range(200)),
        b"X-Long: " + b"a" * 100_000,
        b"".join(b"X-%d: %s\r\n" % (i, b"a" * 10_000) for i in range(20)),
    ],
    ids=["many", "one", "several"],
)
@pytest.mark.parametrize("ends", [True, False])
def test_headers_without_end_are_refused(
    listen: Callable[..., str], engine: FakeEngine, head: bytes, ends: bool
) -> None:
    url = listen(engine, api_key="sesame")
    with connected(url) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n\r\n" * ends)
        assert until_closed(connection).startswith(b"HTTP/1.1 431 ")
    assert httpx.get(f"{url}/health").status_code == 200


def test_a_body_that_goes_on_behind_its_answer_is_no_header(listen: Callable[..., str], engine: FakeEngine) -> None:
    """It is let pass by, and the next request on the connection is answered."""
    body = b"a" * 200_000
    with connected(listen(engine)) as connection:
        connection.sendall(b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (2 * len(body)))
        answer = b""
        while not answer.endswith(b"}"):  # its headers and its body may come apart
            answer += connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 404 ")
        for _ in range(2):
            connection.sendall(body)
            time.sleep(0.1)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert until_closed(connection).startswith(b"HTTP/1.1 200 ")


def test_an_endless_path_is_refused(listen: Callable[..., str], engine: FakeEngine) -> None:
    with connected(listen(engine)) as connection:
        connection.sendall(b"GET /" + b"a" * 100_000)
        assert until_closed(connection).startswith(b"HTTP/1.1 431 ")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nX-A: "], ids=["nothing", "headers"])
def test_slow_headers_end_their_connection(listen: Callable[..., str], engine: FakeEngine, sent: bytes) -> None:
    with connected(listen(engine)) as connection:
        started = time.monotonic()
        connection.sendall(sent)
        connection.settimeout(0.1)
        received = b""
        while not received:
            assert time.monotonic() - started < 10
            try:
                if sent:
                    connection.sendall(b"a")  # dribbling does not help
                received = connection.recv(1000)
            except TimeoutError:
                continue
        assert received.startswith(b"HTTP/1.1 408 ")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("dribbles", [True, False])
def test_slow_bodies_end_their_connection(listen: Callable[..., str], engine: FakeEngine, dribbles: bool) -> None:
    with connected(listen(engine)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + BODY)
        connection.settimeout(0.1)
        started = time.monotonic()
        while time.monotonic() - started < 3:
            try:
                if dribbles:
                    connection.sendall(b" ")
                assert connection.recv(1000) == b""
                break
            except TimeoutError:
                continue
            except (ConnectionResetError, BrokenPipeError):
                break
        else:
            raise AssertionError("the connection stayed open")


@pytest.mark.usefixtures("impatient")
def test_a_slow_answer_and_a_kept_connection_are_let_be(listen: Callable[..., str], engine: FakeEngine) -> None:
    engine.delay = 0.1
    url = listen(engine)
    with httpx.Client(base_url=url, timeout=10) as client:
        for _ in range(2):
            assert client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 12}).status_code == 200
            time.sleep(0.8)
        assert client.get("/health").status_code == 200


def test_connections_beyond_the_limit_are_refused(
    listen: Callable[..., str], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 3)
    url = listen(engine)
    with connected(url), connected(url), connected(url), connected(url) as fourth:
        assert until_closed(fourth).startswith(b"HTTP/1.1 503 ")
    wait_for(lambda: httpx.get(f"{url}/health").status_code == 200)


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_to_http_1_0_has_no_chunks(listen: Callable[..., str], engine: FakeEngine, stream: bool) -> None:
    """As nginx speaks unless it is told otherwise: the end of the connection is the end of a stream."""
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream": stream}).encode()
    head = b"POST /v1/chat/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with connected(listen(engine)) as connection:
        connection.sendall(head % len(body) + body)
        head, _, answer = until_closed(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and b"transfer-encoding" not in head
    if stream:
        events = answer.decode().removesuffix("\n\n").split("\n\n")
        assert all(event.startswith("data: ") for event in events) and events[-1] == "data: [DONE]"
    else:
        assert json.loads(answer)["usage"]["completion_tokens"] == 3
