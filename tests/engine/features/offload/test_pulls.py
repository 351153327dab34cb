"""Pages between two servers: what arrives is what was there, and whatever goes wrong ends in time and is said."""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from jaxllm.engine.features.offload import page_listener
from jaxllm.engine.features.offload.page_listener import (
    MOST_DIGESTS,
    AllGiven,
    FromGiver,
    NoPages,
    PageListener,
    PagesWanted,
    SomePages,
)
from jaxllm.engine.features.offload.pages import Digest, HostPages, Page
from jaxllm.engine.features.offload.pulls import PULLING_THREADS, Pulls
from jaxllm.engine.messages import PagesAt
from jaxllm.errors import ConfigError, JaxLLMError
from jaxllm.sharding.wire import Wire, admit, frame, introduce

SIZE = 100
"""Bytes of a page."""
STATE_SIZE = 250
"""Bytes of a state."""
SECONDS = 20
"""For what takes much less."""
SECRET = b"secret"


def page(number: int) -> Page:
    return np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)


def name(number: int) -> Digest:
    return number.to_bytes(32, "big")


NAMES = [name(number) for number in range(8)]


@contextmanager
def giving(pages: dict[Digest, Page] | None = None, **other: object) -> Iterator[PageListener]:
    """A server that has these pages, by default those of NAMES."""
    kept = {digest: page(number) for number, digest in enumerate(NAMES)} if pages is None else pages

    def give(digests: Sequence[Digest]) -> Iterator[Page]:
        for digest in digests:
            if digest not in kept:
                return
            yield kept[digest]

    options = {"secret": SECRET, "contents": "these", "give": give} | other
    listener = PageListener(("127.0.0.1", 0), **options)
    try:
        yield listener
    finally:
        listener.close()


@contextmanager
def pulling(budget: int = 100 * SIZE, timeout: float = SECONDS, **other: object) -> Iterator[Pulls]:
    sizes = {"page_bytes": SIZE, "state_bytes": STATE_SIZE}
    options = {"secret": SECRET, "contents": "these", **sizes, "must_come": False} | other
    pulls = Pulls(HostPages(budget), timeout=timeout, **options)
    try:
        yield pulls
    finally:
        pulls.close()
        assert not pulls._coming and not pulls._running, "nothing is claimed any more"


@contextmanager
def strange(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """The port of a server that answers each connection in its own way."""
    listener = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()

    def accept() -> None:
        while not ended.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(SECONDS)
                try:
                    answer(connection)
                except OSError:
                    continue  # the other side has gone, as some tests want it

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(SECONDS)
        assert not thread.is_alive()


def at(port: int) -> PagesAt:
    return PagesAt("127.0.0.1", port)


def test_pages_arrive_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_listener, "PART_BYTES", 3 * SIZE)  # so that there are several parts
    with giving() as listener, pulling() as pulls:
        pulls.begin(at(listener.port), NAMES).run()
        for number, digest in enumerate(NAMES):
            np.testing.assert_array_equal(pulls.host.get(digest), page(number))
            assert pulls.host.get(digest).base is None, "a page does not keep alive those that came with it"
        assert (pulls.num_pulls, pulls.num_failed, pulls.num_pages, listener.num_given) == (1, 0, 8, 8)
        assert pulls.seconds > 0


def test_what_is_here_is_not_fetched_again() -> None:
    with giving() as listener, pulling() as pulls:
        pulls.begin(at(listener.port), NAMES[:5]).run()
        pulls.begin(at(listener.port), NAMES).run()
        pulls.begin(at(1), NAMES).run()  # where nobody listens
        assert (pulls.num_pages, listener.num_given, pulls.num_failed) == (8, 8, 0)


def test_requests_that_wait_for_the_same_pages_fetch_them_once() -> None:
    may_give = threading.Event()

    def give(digests: Sequence[Digest]) -> Iterator[Page]:
        may_give.wait(SECONDS)
        yield from (page(NAMES.index(digest)) for digest in digests)

    with giving(give=give) as listener, pulling() as pulls:
        jobs = [pulls.jobs.submit(pulls.begin(at(listener.port), NAMES[:count]).run) for count in (4, 6, 6)]
        wait_for(lambda: len(pulls._running) == 3)
        assert not any(job.done() for job in jobs)
        may_give.set()
        for job in jobs:
            job.result(SECONDS)
        assert (pulls.num_pages, listener.num_given, pulls.num_failed) == (6, 6, 0)


def test_a_request_fetches_what_another_was_to_bring_and_has_not() -> None:
    asked, may_give = [threading.Event(), threading.Event()], threading.Event()

    def give(digests: Sequence[Digest]) -> Iterator[Page]:
        first, second = asked
        if not first.is_set():
            first.set()
            may_give.wait(SECONDS)
        else:
            second.set()
        yield from (page(NAMES.index(digest)) for digest in digests)

    with giving(give=give) as listener, pulling() as pulls:
        first, second = (pulls.begin(at(listener.port), NAMES) for _ in range(2))
        jobs = [pulls.jobs.submit(first.run)]
        assert asked[0].wait(SECONDS)
        jobs.append(pulls.jobs.submit(second.run))
        wait_for(lambda: len(pulls._running) == 2)
        assert not asked[1].is_set(), "it waits for the first"
        first.cancel()
        for job in jobs:
            job.result(SECONDS)
        may_give.set()
        assert (pulls.num_pulls, pulls.num_failed, pulls.num_pages) == (1, 0, 8)


@pytest.mark.parametrize("host", ["a" * 200, "no.such.host.invalid", "..", "xn--"])
def test_a_host_that_there_is_not(host: str, caplog: pytest.LogCaptureFixture) -> None:
    with pulling() as pulls:
        pulls.begin(PagesAt(host, 7), NAMES).run()
        assert pulls.num_failed == 1 and host in caplog.text


def test_complaints_about_hosts_that_requests_make_up_do_not_fill_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("jaxllm.engine.features.offload.pulls.MOST_PLACES", 3)
    with pulling() as pulls:
        for number in range(6):
            pulls.note(PagesAt(f"host-{number}", 7), 0.0, "it is gone")
        assert len(caplog.records) == 3 and pulls.num_failed == 6


@pytest.mark.parametrize(
    ("giver", "problem"),
    [
        ({"secret": b"another"}, "its cluster_secret is another"),
        ({"contents": "others"}, "its pages are of another model, or were made with other settings"),
        ({"give": lambda digests: iter([page(0)[:50]])}, "no pages of this model"),
        ({"pages": {name(0): page(0), name(2): page(2)}}, "it has 1 of the 8 pages that were asked for"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_a_server_does_not_give_is_said_once_and_counted(
    giver: dict[str, object], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "jaxllm.engine.features.offload.pulls"), giving(**giver) as listener:
        with pulling() as pulls:
            for _ in range(3):
                pulls.begin(at(listener.port), NAMES).run()
            assert (pulls.num_pulls, pulls.num_failed) == (3, 3)
        with pulling(must_come=True) as pulls, pytest.raises(JaxLLMError, match=problem):
            pulls.begin(at(listener.port), NAMES).run()
    said = [record.message for record in caplog.records if record.name.endswith("pulls")]
    assert len(said) == 1 and problem in said[0] and f"127.0.0.1:{listener.port}" in said[0] and "\n" not in said[0]


def test_it_is_said_again_once_pages_have_come_meanwhile(caplog: pytest.LogCaptureFixture) -> None:
    with giving({name(0): page(0)}) as listener, pulling() as pulls:
        for digests in ([name(5)], [name(0)], [name(5)]):
            pulls.begin(at(listener.port), digests).run()
    assert len([record for record in caplog.records if record.name.endswith("pulls")]) == 2


def test_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pulling() as pulls:
        pulls.begin(at(port), NAMES).run()
        assert pulls.num_failed == 1 and "connection refused" in caplog.text


def with_proof(answer: Callable[[socket.socket], None]) -> Callable[[socket.socket], None]:
    """After a greeting that is right."""

    def greet(connection: socket.socket) -> None:
        assert admit(connection, SECRET)
        Wire(connection, PagesWanted).receive(SECONDS)
        answer(connection)

    return greet


def pages_frame(count: int) -> bytes:
    return frame(SomePages(), [np.stack([page(number) for number in range(count)])])


ANSWERS = {
    "another protocol": (lambda c: c.sendall(b"HTTP/1.1 400 Bad Request\r\n" + bytes(60)), "no jaxllm of this kind"),
    "an end before the greeting": (lambda c: None, "the connection was closed"),
    "cut in the middle": (with_proof(lambda c: c.sendall(pages_frame(4)[:-7])), "the connection was closed"),
    "no message": (with_proof(lambda c: c.sendall(struct.pack("<IQ", 3, 0) + b"abc")), "cannot be read"),
    "a huge frame": (with_proof(lambda c: c.sendall(struct.pack("<IQ", 2**31, 2**40))), "at most"),
    "more than was asked for": (with_proof(lambda c: c.sendall(pages_frame(9))), "more than were asked for"),
    "no array": (with_proof(lambda c: c.sendall(frame(SomePages()))), "no pages of this model"),
    "no pages": (with_proof(lambda c: c.sendall(frame(SomePages(), [np.zeros((0, SIZE), np.uint8)]))), "no pages"),
    "a number": (with_proof(lambda c: c.sendall(frame(SomePages(), [np.uint8(1)]))), "no pages of this model"),
    "other numbers": (with_proof(lambda c: c.sendall(frame(SomePages(), [np.zeros((1, 25), np.int32)]))), "no pages"),
    "a refusal": (with_proof(lambda c: c.sendall(frame(NoPages("it is tired")))), "it is tired"),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_nonsense_is_refused_and_nothing_of_it_is_kept(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    answer, problem = ANSWERS[kind]
    with strange(answer) as port, pulling() as pulls:
        pulls.begin(at(port), NAMES).run()
        assert (pulls.num_failed, len(pulls.host)) == (1, 0) and problem in caplog.text


def test_a_server_that_drips_is_left_in_time(caplog: pytest.LogCaptureFixture) -> None:
    def drip(connection: socket.socket) -> None:
        for byte in pages_frame(8):
            connection.sendall(bytes([byte]))
            time.sleep(0.02)

    began = time.monotonic()
    with strange(with_proof(drip)) as port, pulling(timeout=0.4) as pulls:
        pulls.begin(at(port), NAMES).run()
        assert pulls.num_failed == 1 and "its 0.4 seconds (kv_timeout) were over" in caplog.text
    assert 0.4 <= time.monotonic() - began < SECONDS


def test_so_is_one_that_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    ended = threading.Event()
    with strange(lambda connection: ended.wait(SECONDS) and None) as port, pulling(timeout=0.3) as pulls:
        pulls.begin(at(port), NAMES).run()
        ended.set()
        assert pulls.num_failed == 1 and "its 0.3 seconds (kv_timeout) were over" in caplog.text


def test_a_request_that_found_no_thread_in_time_waits_no_longer(caplog: pytest.LogCaptureFixture) -> None:
    with giving() as listener, pulling(timeout=0.05) as pulls:
        pull = pulls.begin(at(listener.port), NAMES)
        time.sleep(0.1)
        pull.run()
        assert pulls.num_failed == 1 and "before there was a thread" in caplog.text and listener.num_given == 0


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_pull_that_is_not_wanted_any_more_ends_at_once(how: str) -> None:
    asked, ended = threading.Event(), threading.Event()

    def wait(connection: socket.socket) -> None:
        asked.set()
        if connection.recv(1) == b"":  # it sees the connection end
            ended.set()

    with strange(with_proof(wait)) as port, pulling(timeout=600) as pulls:
        pull = pulls.begin(at(port), NAMES)
        thread = threading.Thread(target=pull.run, daemon=True)
        thread.start()
        assert asked.wait(SECONDS)
        pull.cancel() if how == "cancel" else pulls.close()
        thread.join(SECONDS)
        assert not thread.is_alive() and ended.wait(SECONDS)
        assert (pulls.num_pulls, pulls.num_failed) == (0, 0), "it is no failure"


def test_one_that_was_cancelled_before_it_began_asks_nobody() -> None:
    with giving() as listener, pulling() as pulls:
        pull = pulls.begin(at(listener.port), NAMES)
        pull.cancel()
        pull.run()
        assert listener.num_given == 0 and pulls.num_pulls == 0


def test_no_more_is_fetched_than_host_memory_holds(caplog: pytest.LogCaptureFixture) -> None:
    with giving() as listener, pulling(budget=3 * SIZE) as pulls:
        pulls.begin(at(listener.port), NAMES).run()
        assert pulls.num_failed == 1 and "has room for 3 of its 8 pages" in caplog.text
        assert listener.num_given == 3 and [digest in pulls.host for digest in NAMES[:4]] == [True] * 3 + [False]


def asking(port: int, secret: bytes = SECRET) -> Wire[FromGiver]:
    connection = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
    assert introduce(connection, secret)
    return Wire(connection, FromGiver)


def test_a_stranger_gets_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with giving() as listener:
        connection = socket.create_connection(("127.0.0.1", listener.port), timeout=SECONDS)
        assert not introduce(connection, b"guessed")
        connection.close()
        with socket.create_connection(("127.0.0.1", listener.port), timeout=SECONDS) as other:
            other.sendall(frame(PagesWanted("these", NAMES)).ljust(200, b"\0"))  # without a proof
            received = b""
            while part := receive(other):
                received += part
        assert received.startswith(b"jaxllm") and len(received) < 60, "a greeting, and no pages"
        assert listener.num_given == 0
        wait_for(lambda: caplog.text.count("its cluster_secret is another") == 2)
        pull = asking(listener.port)
        pull.send(PagesWanted("these", NAMES))
        assert isinstance(pull.receive(SECONDS)[0], SomePages)
        pull.close()


def receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(100)
    except ConnectionResetError:
        return b""


def test_a_question_that_is_too_long_is_refused() -> None:
    with giving() as listener:
        wire = asking(listener.port)
        wire.send(PagesWanted("these", [name(0)] * (MOST_DIGESTS + 1)))
        answer, _ = wire.receive(SECONDS)
        assert isinstance(answer, NoPages) and f"accepted are {MOST_DIGESTS}" in answer.reason
        wire.close()
        wire = asking(listener.port)
        wire.send(PagesWanted("these", []))
        assert wire.receive(SECONDS) == (AllGiven(), [])
        wire.close()


def test_whoever_comes_when_too_many_are_there_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_listener, "MOST_CONNECTIONS", 1)
    with giving() as listener, socket.create_connection(("127.0.0.1", listener.port), timeout=SECONDS) as first:
        first.recv(1)  # it is being served
        with socket.create_connection(("127.0.0.1", listener.port), timeout=SECONDS) as second:
            assert second.recv(1) == b""


def test_closing_ends_the_connections() -> None:
    with giving() as listener:
        wire = asking(listener.port)
        listener.close()
        with pytest.raises(ConnectionError):
            wire.receive(SECONDS)
        wire.close()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", listener.port), timeout=SECONDS)


def test_a_port_that_is_taken_is_refused_in_a_line() -> None:
    with giving() as listener:
        line = f"kv_transfer_config.kv_ip is 127.0.0.1 and kv_port {listener.port}, where this server cannot listen"
        with pytest.raises(ConfigError, match=line):
            PageListener(("127.0.0.1", listener.port), SECRET, "these", lambda digests: iter(()))


def test_many_requests_at_once() -> None:
    with giving() as listener, pulling() as pulls:
        wanted = [NAMES[: 1 + number % 8] for number in range(4 * PULLING_THREADS)]
        for job in [pulls.jobs.submit(pulls.begin(at(listener.port), digests).run) for digests in wanted]:
            job.result(SECONDS)
        assert (pulls.num_pulls, pulls.num_failed, pulls.num_pages) == (len(wanted), 0, 8)


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
