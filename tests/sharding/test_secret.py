"""Processes that have the same secret know each other, and nobody else does."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxllm.errors import ConfigError
from jaxllm.sharding.wire import admit, group_secret, introduce


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    leads, follows = socket.socketpair()
    with leads, follows:
        leads.settimeout(5)
        follows.settimeout(5)
        yield leads, follows


def meeting(pair: tuple[socket.socket, socket.socket], leads: bytes, follows: bytes) -> tuple[bool, bool]:
    def let_in() -> bool:
        admitted = admit(pair[0], leads)
        if not admitted:
            pair[0].close()
        return admitted

    with ThreadPoolExecutor(1) as pool:
        admitted = pool.submit(let_in)
        known = introduce(pair[1], follows)
        return admitted.result(), known


def test_the_same_secret_opens_and_another_does_not(pair: tuple[socket.socket, socket.socket]) -> None:
    assert meeting(pair, b"one", b"one") == (True, True)


def test_another_secret_is_turned_away(pair: tuple[socket.socket, socket.socket]) -> None:
    assert meeting(pair, b"one", b"two") == (False, False)


def test_what_was_said_once_opens_nothing_again() -> None:
    """An answer is to one question: whoever has heard it cannot give it at the next."""
    heard: list[bytes] = []

    class Recorded(socket.socket):
        def sendall(self, data: bytes, *flags: int) -> None:  # type: ignore[override]
            heard.append(data)
            super().sendall(data, *flags)

    leads, follows = socket.socketpair()
    with leads, Recorded(fileno=follows.detach()) as recorded, ThreadPoolExecutor(1) as pool:
        admitted = pool.submit(admit, leads, b"one")
        assert introduce(recorded, b"one") and admitted.result()
    leads, follows = socket.socketpair()
    with leads, follows, ThreadPoolExecutor(1) as pool:
        admitted = pool.submit(admit, leads, b"one")
        follows.sendall(heard[0])
        assert not admitted.result()


def test_who_leads_must_have_it_too(pair: tuple[socket.socket, socket.socket]) -> None:
    leads, follows = pair

    def pretend() -> None:
        leads.sendall(b"jaxllm 1" + bytes(32))
        leads.recv(64)
        leads.sendall(bytes(32))

    threading.Thread(target=pretend).start()
    assert not introduce(follows, b"one")


def test_something_else_at_the_address_is_no_leader(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].sendall(b"HTTP/1.1 400 Bad Request\r\n" + bytes(64))
    with pytest.raises(OSError, match="no jaxllm"):
        introduce(pair[1], b"one")


def test_without_one_a_file_of_this_user_has_it(tmp_path: Path) -> None:
    file = tmp_path / "data" / "secret"
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: group_secret(None, file), range(4)))
    assert len(found) == 1 and len(found.pop()) >= 32
    assert os.stat(file).st_mode & 0o777 == 0o600 and [path.name for path in file.parent.iterdir()] == ["secret"]
    assert group_secret("stated", file) == b"stated"


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("known to all")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="others may use it: chmod 600"):
        group_secret(None, file)
