"""What a service manager is told, and what a stop looks like from outside."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from jaxllm.serving import running
from jaxllm.serving.running import Watchdog, notify
from tests.serving import fake_engine
from tests.serving.conftest import wait_for
from tests.support.covers import covers

pytestmark = pytest.mark.programs

ROOT = Path(fake_engine.__file__).parents[2]


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket that systemd would listen on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield receiver


def test_lines_are_sent_together(told: socket.socket) -> None:
    notify("READY=1", "STATUS=Serving")
    assert told.recv(1000) == b"READY=1\nSTATUS=Serving"


def test_a_name_in_the_abstract_namespace_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"jaxllm-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"\0{name}")
        receiver.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        notify("READY=1")
        assert receiver.recv(1000) == b"READY=1"


def test_without_systemd_nothing_is_sent_and_a_broken_socket_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")
    assert not caplog.records
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    notify("READY=1")
    assert "systemd was not told READY=1: No such file or directory" in caplog.text


def test_the_watchdog_is_fed_as_often_as_it_asks_for(told: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(running.time, "monotonic", lambda: now)
    monkeypatch.setenv("WATCHDOG_USEC", "4000000")
    fed = Watchdog.asked_for()
    assert fed is not None
    for now in (100.0, 101.0, 102.1):  # noqa: B007
        fed.feed()
    notify("END")
    assert [told.recv(100) for _ in range(3)] == [b"WATCHDOG=1", b"WATCHDOG=1", b"END"]
    monkeypatch.setenv("WATCHDOG_PID", "1")  # it is meant for another process
    assert Watchdog.asked_for() is None
    monkeypatch.delenv("WATCHDOG_USEC")
    assert Watchdog.asked_for() is None


@pytest.fixture
def server(told: socket.socket) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server with a lame-duck period of half a second, and its URL."""
    command = [sys.executable, "-m", fake_engine.__name__, "0", "0.05", "30"]
    environment = os.environ | {"FAKE_LAMEDUCK": "0.5"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield process, line.split(" on ")[1].split("/v1")[0]
    finally:
        process.kill()
        process.communicate()


@covers("GET /readyz")
def test_a_lame_duck_answers_and_is_not_ready(server: tuple[subprocess.Popen[str], str], told: socket.socket) -> None:
    process, url = server
    assert told.recv(1000) == b"READY=1\nSTATUS=Serving fake"
    assert httpx.get(f"{url}/readyz").status_code == 200
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("Stopping in 0.5 s; requests are answered until then")
    assert told.recv(1000).startswith(b"STOPPING=1")
    for path in ("/ready", "/readyz"):
        assert httpx.get(url + path).status_code == 503
    assert httpx.get(f"{url}/livez").status_code == httpx.get(f"{url}/health").status_code == 200
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=20)
    assert answer.status_code == 200 and answer.json()["choices"][0]["finish_reason"] == "length"
    assert process.wait(20) == 0


def test_a_second_signal_ends_a_lame_duck_at_once(server: tuple[subprocess.Popen[str], str]) -> None:
    process, url = server
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: httpx.get(f"{url}/ready").status_code == 503)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM
