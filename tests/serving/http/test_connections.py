"""Connections that send too much or too slowly, on raw sockets."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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


def request(body: dict[str, Any], *more: bytes, path: str = "/v1/completions") -> bytes:
    content = json.dumps(body).encode()
    lines = [b"POST %s HTTP/1.1" % path.encode(), b"Host: localhost", b"Content-Type: application/json", *more]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(content), b"", content])


def until(connection: socket.socket, end: bytes) -> bytes:
    """What comes, up to an end, which must come."""
    received = b""
    while not received.endswith(end):
        part = connection.recv(65536)
        assert part, received
        received += part
    return received


def unread(count: int) -> bytes:
    """Requests whose answers are more than the system keeps for a client that reads none."""
    return count * b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextmanager
def connected_narrowly(url: str) -> Iterator[socket.socket]:
    """With little room for what is not read."""
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(10)
        connection.connect((host, int(port)))
        yield connection


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


def test_connections_beyond_the_limit_are_refused_while_all_wait_for_an_answer(
    listen: Callable[..., str], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 3)
    engine.delay = 30
    url = listen(engine)
    with connected(url) as one, connected(url) as two, connected(url) as three:
        for connection in (one, two, three):
            connection.sendall(request({"prompt": "Hi"}))
        wait_for(lambda: len(engine.active) == 3)
        with connected(url) as fourth:
            assert until_closed(fourth).startswith(b"HTTP/1.1 503 ")
    wait_for(lambda: httpx.get(f"{url}/health").status_code == 200)


def test_the_connection_that_has_waited_for_its_client_longest_makes_room(
    listen: Callable[..., str], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 3)
    engine.delay = 0.02
    url = listen(engine)
    with connected(url) as streaming, connected(url) as idle, connected(url) as fresh:
        streaming.sendall(request({"prompt": "Hi", "stream": True, "max_tokens": 100}))
        for connection in (idle, fresh):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            until(connection, b"}")
        assert httpx.get(f"{url}/health").status_code == 200
        assert until_closed(idle) == b""
        fresh.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(fresh, b"}")
        assert until(streaming, b"0\r\n\r\n").count(b"data: ") > 10


def test_who_reads_nothing_is_disconnected(
    listen: Callable[..., str], engine: FakeEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "CHECK_SECONDS", 0.05)
    url = listen(engine, send_timeout=0.5)
    with connected_narrowly(url) as connection:
        connection.sendall(unread(60))
        gone = select.poll()
        gone.register(connection, 0)  # for errors alone
        assert gone.poll(10_000)
    assert httpx.get(f"{url}/health").status_code == 200
    assert not errors(caplog)


def test_who_reads_slowly_gets_all(
    listen: Callable[..., str], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "CHECK_SECONDS", 0.05)
    url = listen(engine, send_timeout=1.5)
    whole = httpx.get(f"{url}/openapi.json").content
    with connected_narrowly(url) as connection:
        connection.sendall(unread(20))
        received = bytearray()
        while len(received) < 20 * len(whole):
            part = connection.recv(65536)
            assert part
            received += part
            time.sleep(3.0 * len(part) / (20 * len(whole)))  # in all twice as long as one may read nothing
    assert received.count(whole[:1000]) == 20


def test_who_leaves_answers_unread_is_no_error(
    listen: Callable[..., str], engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    url = listen(engine)
    httpx.get(f"{url}/openapi.json")  # the first time takes long
    with connected_narrowly(url) as connection:
        connection.sendall(unread(60))
        time.sleep(0.5)
    httpx.get(f"{url}/health")
    time.sleep(0.1)
    assert not errors(caplog)


def test_who_leaves_several_requests_frees_the_first(listen: Callable[..., str], engine: FakeEngine) -> None:
    engine.delay = 30
    with connected(listen(engine)) as connection:
        connection.sendall(2 * request({"prompt": "Hi", "stream": True}))
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert engine.active
    wait_for(lambda: not engine.active, 5)


def test_endlessly_many_requests_at_once_end_their_connection(listen: Callable[..., str], engine: FakeEngine) -> None:
    engine.delay = 30
    url = listen(engine)
    with connected(url) as connection:
        connection.sendall(request({"prompt": "Hi"}) + 200 * b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert until_closed(connection) == b""
    wait_for(lambda: not engine.active, 5)
    with connected(url) as connection:
        last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        connection.sendall(89 * b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + last)
        assert until_closed(connection).count(b"HTTP/1.1 200 ") == 90


def test_a_refusal_does_not_get_into_the_answer_before_it(listen: Callable[..., str], engine: FakeEngine) -> None:
    engine.delay = 0.02
    with connected(listen(engine)) as connection:
        connection.sendall(request({"prompt": "Hi", "stream": True}) + b"no HTTP at all\r\n\r\n")
        assert b"HTTP/1.1 400 " not in until_closed(connection)


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"foo"])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("apart", [True, False])
def test_a_wish_for_another_protocol_is_left_unheard(
    listen: Callable[..., str], engine: FakeEngine, protocol: bytes, chunked: bool, apart: bool
) -> None:
    """RFC 9110 section 7.8. JDK's HttpClient wishes for h2c with each request."""
    wish = [
        b"Connection: Upgrade, HTTP2-Settings",
        b"Upgrade: " + protocol,
        b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk",
    ]
    whole = request({"prompt": "Hi", "max_tokens": 3}, *wish)
    if chunked:
        head, _, content = whole.partition(b"\r\n\r\n")
        head = head[: head.index(b"Content-Length")] + b"Transfer-Encoding: chunked"
        whole = head + b"\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(content), content)
    with connected(listen(engine)) as connection:
        for _ in range(2):
            if apart:
                head, body = whole[:-20], whole[-20:]
                connection.sendall(head)
                time.sleep(0.05)
                connection.sendall(body)
            else:
                connection.sendall(whole)
            assert until(connection, b"}").startswith(b"HTTP/1.1 200 ")
        connection.sendall(2 * whole)
        received = b""
        while received.count(b"HTTP/1.1 200 ") < 2:
            received += until(connection, b"}")


def test_a_proxy_is_wanted_in_vain(listen: Callable[..., str], engine: FakeEngine) -> None:
    with connected(listen(engine)) as connection:
        connection.sendall(b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: foo\r\n\r\nabc")
        assert until_closed(connection).startswith(b"HTTP/1.1 501 ")


EXPECTING = b"Expect: 100-continue"


def test_who_expects_to_be_told_to_go_on_is(listen: Callable[..., str], engine: FakeEngine) -> None:
    head, _, content = request({"prompt": "Hi"}, EXPECTING).partition(b"\r\n\r\n")
    with connected(listen(engine)) as connection:
        for _ in range(2):
            connection.sendall(head + b"\r\n\r\n")
            assert until(connection, b"\r\n\r\n").startswith(b"HTTP/1.1 100 ")
            connection.sendall(content)
            assert until(connection, b"}").startswith(b"HTTP/1.1 200 ")


def test_who_is_refused_before_the_body_may_not_take_the_connection_on(
    listen: Callable[..., str], engine: FakeEngine
) -> None:
    """Else the next request is taken for the body, which the client keeps to itself."""
    head = request({"prompt": "Hi"}, EXPECTING).partition(b"\r\n\r\n")[0]
    with connected(listen(engine, api_key="sesame")) as connection:
        connection.sendall(head + b"\r\n\r\n")
        answer = until_closed(connection)
    assert answer.startswith(b"HTTP/1.1 401 ") and b"connection: close\r\n" in answer


def test_an_older_client_is_not_told_to_go_on(listen: Callable[..., str], engine: FakeEngine) -> None:
    old = request({"prompt": "Hi"}, EXPECTING).replace(b"HTTP/1.1", b"HTTP/1.0")
    with connected(listen(engine)) as connection:
        connection.sendall(old)
        assert until_closed(connection).startswith(b"HTTP/1.1 200 ")


def with_trailer(trailer: bytes) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    content = b'{"prompt": "Hi"}'
    return head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n%s" % (len(content), content, trailer)


def test_a_trailer_is_no_header(listen: Callable[..., str], engine: FakeEngine) -> None:
    with connected(listen(engine, api_key="sesame")) as connection:
        connection.sendall(with_trailer(b"Authorization: Bearer sesame\r\n\r\n"))
        assert until(connection, b"}").startswith(b"HTTP/1.1 401 ")


def test_an_endless_trailer_ends_its_connection(listen: Callable[..., str], engine: FakeEngine) -> None:
    with connected(listen(engine)) as connection:
        connection.sendall(with_trailer(b"X: "))
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            for _ in range(1000):
                connection.sendall(b"a" * 65536)


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [("1.1", 1, 200), ("1.1", 0, 400), ("1.1", 2, 400), ("1.0", 0, 200), ("1.0", 1, 200), ("1.0", 2, 400)],
)
def test_a_request_names_one_host(
    listen: Callable[..., str], engine: FakeEngine, version: str, hosts: int, status: int
) -> None:
    """RFC 9112 section 3.2; HTTP/1.0 knew of none."""
    lines = [f"GET /v1/models HTTP/{version}", *["Host: localhost"] * hosts, "Connection: close", "", ""]
    with connected(listen(engine)) as connection:
        connection.sendall("\r\n".join(lines).encode())
        answer = until_closed(connection)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert status == 200 or f"has {hosts} Host headers; it must have one".encode() in answer


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


def completion(**fields: Any) -> bytes:
    """A whole request."""
    body = json.dumps({"prompt": "Hi"} | fields).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_sends_no_more_gets_its_answer(listen: Callable[..., str], stream: bool) -> None:
    """As `nc -N` does."""
    with connected(listen(FakeEngine(delay=0.2))) as connection:
        connection.sendall(completion(max_tokens=20, stream=stream))
        connection.shutdown(socket.SHUT_WR)
        answer = until_closed(connection)
    assert b"HTTP/1.1 200 OK" in answer and b'"finish_reason":"length"' in answer


def test_a_client_that_is_gone_ends_its_request(listen: Callable[..., str]) -> None:
    engine = FakeEngine(delay=0.05)
    with connected(listen(engine)) as connection:
        connection.sendall(completion(max_tokens=200))
        wait_for(lambda: bool(engine.active))
    wait_for(lambda: not engine.active, 3)
