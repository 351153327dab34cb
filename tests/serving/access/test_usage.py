"""What each key has used: told to itself, kept in the database, and shown in the metrics."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import URL
from sqlalchemy.exc import OperationalError

from jaxllm.serving.access import usage as usage_module
from jaxllm.serving.access.usage import Account, Ledger, UsageStore, Used
from jaxllm.serving.store.database import Database, sqlite_url
from tests.serving.access.conftest import CHAT, Keyed, write_keys
from tests.serving.fake_engine import CACHED, REPLY, FakeEngine
from tests.serving.store.conftest import database_url, postgres
from tests.support.covers import covers

__all__ = ["database_url", "postgres"]

ROOT = Path(__file__).parents[3]


def today() -> date:
    """Asked for in each test: a run of all may go past midnight."""
    return datetime.now(UTC).date()


def used(answer: Any) -> list[tuple[str, int, int, int, int]]:
    """Model, requests, and tokens of prompts, of those cached, and of answers."""
    names = ("model", "num_model_requests", "input_tokens", "input_cached_tokens", "output_tokens")
    return [tuple(day[name] for name in names) for day in answer.json()["data"]]


@covers("GET /v1/usage")
def test_a_key_is_told_its_own_usage(keyed: Callable[..., Keyed]) -> None:
    server = keyed({"alice": {}, "bob": {}}, others={"second": FakeEngine(reply="Me.")})
    usage = server.post("alice", "/v1/chat/completions", CHAT).json()["usage"]
    server.post("alice", "/v1/chat/completions", CHAT | {"stream": True})
    server.post("alice", "/v1/completions", {"model": "second", "prompt": "Hi"})
    server.post("bob", "/v1/embeddings", {"input": "abc"})
    told = server.get("alice", "/v1/usage")
    prompt = usage["prompt_tokens"]
    assert told.json()["api_key"] == "alice" and {day["date"] for day in told.json()["data"]} == {today().isoformat()}
    assert used(told) == [("fake", 2, 2 * prompt, 2 * CACHED, 2 * len(REPLY)), ("second", 1, 3, CACHED, 3)]
    assert used(server.get("bob", "/v1/usage")) == [("fake", 1, 4, CACHED, 0)]


@covers("GET /v1/usage", "since", "until")
def test_usage_of_some_days(keyed: Callable[..., Keyed], monkeypatch: pytest.MonkeyPatch) -> None:
    server = keyed({"alice": {}})
    now = datetime.now(UTC)
    for days in (40, 2, 0):
        monkeypatch.setattr(usage_module.time, "time", lambda days=days: (now - timedelta(days=days)).timestamp())
        server.state.usage.add("alice", "fake", Used(requests=days + 1))

    def counts(query: str) -> list[int]:
        return [requests for _, requests, *_ in used(server.get("alice", f"/v1/usage{query}"))]

    two_days_ago, yesterday = (today() - timedelta(days=days) for days in (2, 1))
    assert counts("") == [3, 1], "of thirty days, the oldest first"
    assert counts(f"?since={today() - timedelta(days=50)}") == [41, 3, 1]
    assert counts(f"?since={two_days_ago}&until={yesterday}") == [3]
    assert counts(f"?since={yesterday}&until={yesterday}") == []
    refused = server.get("alice", "/v1/usage?since=soon").json()["error"]
    assert refused["param"] == "since" and refused["message"] == "since is 'soon'; it must be a day, as 2027-01-31"
    refused = server.get("alice", "/v1/usage?since=2027-01-02&until=2027-01-01").json()["error"]
    assert refused["param"] == "since" and "may not be the later day" in refused["message"]


def test_the_example_shows_limits_and_usage(listen: Callable[..., str], tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.yaml", alice={"tokens_per_minute": 100})
    url = listen(FakeEngine(), api_key_file=keys)
    command = [sys.executable, "examples/usage.py", url, "key-of-alice"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    said, limit, left, reset, usage = shown.splitlines()
    assert said == REPLY[:8] and limit == "x-ratelimit-limit-tokens: 100" and left.startswith("x-ratelimit-remaining")
    assert reset.startswith("x-ratelimit-reset-tokens: ") and usage.startswith(f"{today()} fake: 1 requests, 25 tokens")


def test_usage_outlives_the_server(keyed: Callable[..., Keyed], make_client: Any, tmp_path: Path) -> None:
    server = keyed({"alice": {}})
    server.post("alice", "/v1/chat/completions", CHAT)
    told = used(server.get("alice", "/v1/usage"))
    server.client.__exit__()
    with closing(sqlite3.connect(tmp_path / "data" / "jaxllm.db")) as database:
        assert database.execute("SELECT owner, model, requests FROM usage_by_day").fetchall() == [("alice", "fake", 1)]
    again = keyed({"alice": {}})
    assert used(again.get("alice", "/v1/usage")) == told
    again.post("alice", "/v1/chat/completions", CHAT)
    assert used(again.get("alice", "/v1/usage"))[0][1] == 2
    server.client.__enter__()  # its fixture ends it


def test_without_a_file_of_keys_usage_is_that_since_the_start(client: TestClient, tmp_path: Path) -> None:
    client.post("/v1/completions", json={"prompt": "Hi"})
    answer = client.get("/v1/usage")
    assert answer.json()["api_key"] is None and used(answer)[0][:3] == ("fake", 1, 3)
    assert not (tmp_path / "data" / "jaxllm.db").exists(), "nothing is written for it"


def metrics_by_key(answer: Any) -> dict[tuple[str, str], float]:
    assert answer.status_code == 200, answer.text
    return {
        (sample.name.removeprefix("jaxllm:"), sample.labels["api_key"]): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.labels.get("model_name") == "fake" and "api_key" in sample.labels
    }


def test_metrics_by_key(keyed: Callable[..., Keyed]) -> None:
    server = keyed({"alice": {}, "carol": {"admin": True}}, api_key="shared")
    shared = {"Authorization": "Bearer shared"}
    server.post("alice", "/v1/completions", {"prompt": "Hi", "max_tokens": 4})
    server.client.post("/v1/completions", json={"prompt": "Hi"}, headers=shared)
    found = metrics_by_key(server.get("carol", "/metrics"))
    assert found == metrics_by_key(server.client.get("/metrics", headers=shared))
    assert found["key_requests_total", "alice"] == found["key_requests_total", "-"] == 1
    assert found["key_prompt_tokens_total", "alice"] == 3 and found["key_generation_tokens_total", "alice"] == 4
    assert found["key_prompt_tokens_cached_total", "alice"] == CACHED
    own = metrics_by_key(server.get("alice", "/metrics"))
    assert own == {(name, key): value for (name, key), value in found.items() if key == "alice"}


def test_without_a_key_metrics_name_none(keyed: Callable[..., Keyed]) -> None:
    server = keyed({"alice": {}})
    server.post("alice", "/v1/completions", {"prompt": "Hi", "max_tokens": 4}).raise_for_status()
    shown = server.client.get("/metrics")
    assert "alice" not in shown.text and "jaxllm:generation_tokens_total" in shown.text
    assert server.get("mallory", "/metrics").status_code == 401


def test_a_server_without_a_file_of_keys_has_no_metrics_by_key(client: TestClient) -> None:
    client.post("/v1/completions", json={"prompt": "Hi"})
    assert "api_key" not in client.get("/metrics").text


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str | URL:
    return sqlite_url(tmp_path) if request.param == "sqlite" else request.getfixturevalue("database_url")


def test_servers_that_write_at_once_add_up(url: str | URL) -> None:
    async def main() -> list[tuple[Account, Used]]:
        databases = [Database(url) for _ in range(2)]
        stores = [UsageStore(Ledger(), database, keeps=True) for database in databases]
        for _ in range(10):
            for store in stores:
                store._ledger.add("alice", "fake", Used(1, 2, 3, 4))
            await asyncio.gather(*(store.write() for store in stores))
        found = await stores[0].of("alice", "2000-01-01", "2100-01-01")
        for database in databases:
            await database.close()
        return found

    [(_, used)] = asyncio.run(main())
    assert used == Used(20, 40, 60, 80)


def test_what_cannot_be_written_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        database = Database(sqlite_url(tmp_path))
        ledger = Ledger()
        store = UsageStore(ledger, database, keeps=True)
        ledger.add("alice", "fake", Used(1))
        with monkeypatch.context() as patch:
            patch.setattr(database, "transaction", _full)
            await store.write()
        assert "could not be written" in caplog.text and len(ledger.pending) == 1
        ledger.add("alice", "fake", Used(1))
        await store.write()
        assert not ledger.pending and (await store.of("alice", "2000-01-01", "2100-01-01"))[0][1] == Used(2)
        await database.close()

    asyncio.run(main())


def _full() -> None:
    raise OperationalError("INSERT", {}, Exception("database or disk is full"))
