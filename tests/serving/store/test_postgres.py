"""PostgreSQL keeps what SQLite keeps, for several servers at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select

from jaxllm.errors import ConfigError
from jaxllm.serving.access.usage import Account, UsageRow, Used, addition
from jaxllm.serving.store.database import Database
from tests.serving.batches.running import Running
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import FakeEngine
from tests.serving.store.conftest import Postgres

pytestmark = pytest.mark.programs

MakeClient = Callable[..., TestClient]


@pytest.fixture
def on_postgres(make_client: MakeClient, engine: FakeEngine, database_url: str) -> TestClient:
    return make_client(engine, database_url=database_url)


def test_responses_and_conversations(on_postgres: TestClient) -> None:
    conversation = on_postgres.post("/v1/conversations", json={"metadata": {"a": "ü"}}).json()["id"]
    body = {"input": "Hi", "conversation": conversation, "metadata": {"b": "c"}}
    first = on_postgres.post("/v1/responses", json=body).json()
    assert on_postgres.get(f"/v1/responses/{first['id']}").json() == first
    next_one = on_postgres.post("/v1/responses", json={"input": "And?", "previous_response_id": first["id"]})
    assert next_one.status_code == 200, next_one.text
    items = on_postgres.get(f"/v1/conversations/{conversation}/items", params={"order": "asc"}).json()["data"]
    assert [item["role"] for item in items] == ["user", "assistant"]
    assert on_postgres.delete(f"/v1/responses/{first['id']}").status_code == 200
    assert on_postgres.get(f"/v1/responses/{first['id']}").status_code == 404
    assert on_postgres.delete(f"/v1/conversations/{conversation}").status_code == 200


def test_a_batch_runs_and_is_resumed(tmp_path: Path, database_url: str) -> None:
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi", "max_tokens": 3}}
        for n in range(6)
    ]
    server = Running(FakeEngine(delay=0.2), tmp_path / "data", database_url=database_url, max_batch_concurrency=1)
    batch = server.submit(lines, endpoint="/v1/completions")
    wait_for(lambda: server.client.batches.retrieve(batch).request_counts.completed > 0)
    server.stop()
    server = Running(FakeEngine(), tmp_path / "data", database_url=database_url)
    try:
        finished = server.finished(batch)
        assert finished.status == "completed" and finished.request_counts.completed == 6
        assert len(server.results(finished.output_file_id)) == 6
    finally:
        server.stop()


def test_items_of_two_servers_get_into_one_conversation(
    make_client: MakeClient, database_url: str, tmp_path: Path
) -> None:
    clients = [make_client(FakeEngine(), database_url=database_url, data_dir=tmp_path / name) for name in "ab"]
    conversation = clients[0].post("/v1/conversations", json={}).json()["id"]

    def add(number: int) -> int:
        items = [{"type": "message", "role": "user", "content": str(number)}]
        return clients[number % 2].post(f"/v1/conversations/{conversation}/items", json={"items": items}).status_code

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(add, range(40))) == {200}
    url = f"/v1/conversations/{conversation}/items"
    items = clients[1].get(url, params={"limit": 100}).json()["data"]
    assert sorted(int(item["content"][0]["text"]) for item in items) == list(range(40))


def test_names_that_postgresql_cannot_hold_are_the_client_s_fault(on_postgres: TestClient) -> None:
    for path in ("files/%00", "responses/%00", "conversations/%00", "batches/%00", "files?after=%00"):
        answer = on_postgres.get(f"/v1/{path}")
        assert 400 <= answer.status_code < 500, (path, answer.text)
    for path, body in (
        ("responses", {"input": "Hi", "previous_response_id": "\0"}),
        ("responses", {"input": "a\0b"}),
        ("conversations", {"metadata": {"a": "\0"}}),
        ("batches", {"input_file_id": "\0", "endpoint": "/v1/completions", "completion_window": "24h"}),
    ):
        answer = on_postgres.post(f"/v1/{path}", json=body)
        assert answer.status_code < 500, (path, answer.text)
    upload = {"file": ("a\0b", b"{}")}
    assert on_postgres.post("/v1/files", files=upload, data={"purpose": "batch"}).status_code < 500


def test_usage_of_two_servers_adds_up(database_url: str) -> None:
    account, used = Account("team", "2026-11-26", "tiny"), Used(1, 10, 5, 3)

    async def main() -> Used:
        databases = [Database(database_url) for _ in range(2)]

        async def add(number: int) -> None:
            async with databases[number % 2].transaction() as session:
                await session.execute(addition("postgresql", account, used))

        await asyncio.gather(*(add(number) for number in range(20)))
        async with databases[0].session() as session:
            row = (await session.scalars(select(UsageRow))).one()
        for database in databases:
            await database.close()
        return Used(row.requests, row.prompt_tokens, row.cached_tokens, row.completion_tokens)

    assert asyncio.run(main()) == Used(20, 200, 100, 60)


def test_a_restart_of_postgresql_is_survived(on_postgres: TestClient, postgres: Postgres) -> None:
    first = on_postgres.post("/v1/responses", json={"input": "Hi"}).json()["id"]
    postgres.stop()
    assert on_postgres.get(f"/v1/responses/{first}").status_code == 500
    postgres.start()
    assert on_postgres.get(f"/v1/responses/{first}").status_code == 200


@pytest.mark.parametrize(
    ("port", "name"), [(1, "x"), (None, "no_such_database")], ids=["nobody listens", "no database"]
)
def test_a_database_that_cannot_be_reached_is_one_line(postgres: Postgres, port: int | None, name: str) -> None:
    url = f"postgresql://jaxllm:secret@127.0.0.1:{port or postgres.port}/{name}"
    with pytest.raises(
        ConfigError, match=r"the database of stored objects \(postgresql.*\) cannot be reached"
    ) as error:
        asyncio.run(Database(url).open())
    assert "secret" not in str(error.value) and "\n" not in str(error.value)
