"""The audit log: a line for each request, without a word of what was said."""

from __future__ import annotations

import json
import logging
import stat
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from jaxllm.config.server import ServerConfig
from jaxllm.errors import ConfigError
from jaxllm.serving.request_log import AuditLog
from tests.serving.access.conftest import CHAT, Keyed, key, write_keys
from tests.serving.batches.running import Running, chat
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import FakeEngine


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
def server(keyed: Callable[..., Keyed], file: Path) -> Keyed:
    return keyed({"alice": {}, "bob": {"models": ["none"]}}, audit_log=file)


def lines(file: Path, count: int) -> list[dict[str, Any]]:
    """That many entries, once they have been written."""
    wait_for(lambda: file.read_text().count("\n") >= count)
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(found) == count
    return found


def test_who_called_what_and_what_became_of_it(server: Keyed, file: Path) -> None:
    made = server.post("alice", "/v1/chat/completions", CHAT)
    server.get("alice", "/v1/responses/resp_secret")
    server.post("bob", "/v1/completions", {"prompt": "Hi"})
    server.client.get("/models", headers=key("nobody"))
    server.client.get("/nothing/here")
    found = lines(file, 5)
    names = ("key", "method", "route", "model", "status")
    assert [tuple(entry[name] for name in names) for entry in found] == [
        ("alice", "POST", "/chat/completions", "fake", 200),
        ("alice", "GET", "/responses/{response_id}", None, 404),
        ("bob", "POST", "/completions", None, 404),
        (None, "GET", "/models", None, 401),
        (None, "GET", None, None, 404),
    ]
    assert found[0]["id"] == made.json()["id"] == made.headers["x-request-id"]
    assert all(entry["id"] and entry["address"] == "testclient" for entry in found)
    written = datetime.fromisoformat(found[0]["time"])
    assert datetime.now(UTC) - timedelta(minutes=1) < written <= datetime.now(UTC)
    text = file.read_text()
    assert not any(word in text for word in ("Hi", "Paris", "secret", "key-of", "nothing"))


def test_probes_and_pages_are_left_out(server: Keyed, file: Path) -> None:
    for path in ("/health", "/metrics", "/ready", "/livez", "/", "/docs", "/openapi.json"):
        assert server.client.get(path).status_code == 200
    server.get("alice", "/v1/models")
    assert lines(file, 1)[0]["route"] == "/models"


def test_a_stream_and_a_foreign_page(make_client: Callable[..., TestClient], file: Path) -> None:
    client = make_client(FakeEngine(), audit_log=file)
    client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    client.get("/v1/models", headers={"Origin": "https://evil.example"})
    assert [(entry["status"], entry["key"]) for entry in lines(file, 2)] == [(200, None), (403, None)]


def test_a_client_that_goes_away(keyed_server: Running, file: Path) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{keyed_server.url}/completions", json={"prompt": "Hi"}, headers=key("alice"),
            timeout=httpx.Timeout(20, read=0.2),
        )  # fmt: skip
    [entry] = lines(file, 1)
    assert (entry["status"], entry["model"], entry["address"]) == (499, "fake", "127.0.0.1")


def test_a_proxy_of_this_machine_says_who_its_client_is(keyed_server: Running, file: Path) -> None:
    headers = key("alice") | {"X-Forwarded-For": "203.0.113.9"}
    assert httpx.get(f"{keyed_server.url}/models", headers=headers, timeout=20).status_code == 200
    assert lines(file, 1)[0]["address"] == "203.0.113.9"


def test_lines_of_a_batch_have_no_address(start_audited: Callable[..., Running], file: Path) -> None:
    server = start_audited(FakeEngine())
    server.client.api_key = "key-of-alice"
    server.finished(server.submit([chat(0)]))
    wait_for(lambda: '"address": null' in file.read_text())
    [entry] = [entry for line in file.read_text().splitlines() if (entry := json.loads(line))["address"] is None]
    assert (entry["key"], entry["route"], entry["status"]) == ("alice", "/chat/completions", 200)


@pytest.fixture
def start_audited(tmp_path: Path, file: Path) -> Iterator[Callable[..., Running]]:
    servers: list[Running] = []

    def make(engine: FakeEngine) -> Running:
        keys = write_keys(tmp_path / "keys.yaml", alice={})
        servers.append(Running(engine, tmp_path / "data", api_key_file=keys, audit_log=file))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


@pytest.fixture
def keyed_server(start_audited: Callable[..., Running]) -> Running:
    return start_audited(FakeEngine(delay=0.3))


def test_nobody_else_may_read_it_and_what_was_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text("before\n")
    path.unlink()
    for number in range(2):
        log = AuditLog(path)
        log.write({"number": number, "word": "é"})
        log.close()
    assert path.read_text() == '{"number": 0, "word": "é"}\n{"number": 1, "word": "é"}\n'
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_log_that_was_moved_away_is_begun_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, moved = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    log = AuditLog(path)
    log.write({"a": 1})
    wait_for(lambda: path.read_text() != "")
    path.rename(moved)
    log.write({"a": 2})
    wait_for(lambda: moved.read_text().count("\n") == 2)
    log.reopen()
    log.write({"a": 3})
    wait_for(lambda: path.exists() and path.read_text() != "")
    path.unlink()
    path.mkdir()
    with caplog.at_level(logging.ERROR):
        log.reopen()
    log.close()
    assert "the audit log stays where it is" in caplog.text and moved.read_text() == '{"a": 1}\n{"a": 2}\n'


def test_a_line_that_cannot_be_written_is_in_the_servers_log(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full, which is a disk that is full")
    log = AuditLog(Path("/dev/full"))
    with caplog.at_level(logging.ERROR):
        log.write({"id": "lost"})
        wait_for(lambda: 'the audit log cannot be written: {"id": "lost"}' in caplog.text)


def test_a_place_that_cannot_be_written_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"audit_log is .*no such file or directory"):
        AuditLog(tmp_path / "none" / "audit.jsonl")
    assert ServerConfig().audit_log is None
