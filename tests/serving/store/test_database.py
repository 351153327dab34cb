"""The database of stored objects."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import insert, select

from jaxllm.errors import ConfigError
from jaxllm.serving.batches.stores import FileRow
from jaxllm.serving.store.database import Database, sqlite_url
from tests.serving.fake_engine import FakeEngine


def row(name: str) -> dict[str, object]:
    return {"id": name, "bytes": 1, "created_at": 2, "filename": "", "purpose": "batch"}


async def names(database: Database) -> set[str]:
    async with database.session() as session:
        return set((await session.scalars(select(FileRow.id))).all())


async def add(database: Database, name: str) -> None:
    async with database.transaction() as session:
        await session.execute(insert(FileRow).values(**row(name)))


def test_nothing_is_on_disk_until_something_is_stored(tmp_path: Path) -> None:
    async def main() -> None:
        database = Database(sqlite_url(tmp_path / "deep" / "data"))
        assert not database.exists and not list(tmp_path.iterdir())
        assert await names(database) == set()
        assert database.exists and (tmp_path / "deep" / "data" / "jaxllm.db").is_file()
        await database.close()

    asyncio.run(main())


def test_writers_of_two_servers_wait_for_each_other(tmp_path: Path) -> None:
    async def main() -> set[str]:
        databases = [Database(sqlite_url(tmp_path)) for _ in range(2)]  # which also create the tables at once
        await asyncio.gather(*(add(databases[i % 2], f"file-{i}") for i in range(100)))
        found = await names(databases[0])
        for database in databases:
            await database.close()
        return found

    assert asyncio.run(main()) == {f"file-{i}" for i in range(100)}


def test_the_first_opening_waits_for_another_server_that_creates_its_tables(tmp_path: Path) -> None:
    async def main() -> set[str]:
        database = Database(sqlite_url(tmp_path))
        other = sqlite3.connect(tmp_path / "jaxllm.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")  # SQLite refuses at once to change the journal's mode now
        opening = asyncio.create_task(add(database, "kept"))
        await asyncio.sleep(0.2)
        assert not opening.done()
        other.execute("COMMIT")
        other.close()
        await opening
        found = await names(database)
        await database.close()
        return found

    assert asyncio.run(main()) == {"kept"}


def test_readers_do_not_wait_for_a_writer(tmp_path: Path) -> None:
    async def main() -> None:
        database = Database(sqlite_url(tmp_path))
        await add(database, "old")
        async with database.transaction() as session:
            await session.execute(insert(FileRow).values(**row("new")))
            assert await asyncio.wait_for(names(database), 2) == {"old"}
        assert await names(database) == {"old", "new"}
        await database.close()

    asyncio.run(main())


def test_an_error_rolls_the_transaction_back(tmp_path: Path) -> None:
    async def main() -> set[str]:
        database = Database(sqlite_url(tmp_path))
        with pytest.raises(ZeroDivisionError):
            async with database.transaction() as session:
                await session.execute(insert(FileRow).values(**row("half")))
                raise ZeroDivisionError
        await add(database, "whole")
        found = await names(database)
        await database.close()
        return found

    assert asyncio.run(main()) == {"whole"}


def test_closed_cleanly_all_is_in_one_file(tmp_path: Path) -> None:
    async def main() -> None:
        database = Database(sqlite_url(tmp_path))
        await add(database, "kept")
        await database.close()

    asyncio.run(main())
    assert [path.name for path in tmp_path.iterdir()] == ["jaxllm.db"]
    with sqlite3.connect(tmp_path / "jaxllm.db") as connection:
        assert connection.execute("select id from files").fetchall() == [("kept",)]
        assert connection.execute("pragma journal_mode").fetchone() == ("wal",)


@pytest.mark.parametrize("url", ["nonsense", "sqlite:///x.db", "mysql://user:secret@host/db", "foo://x"])
def test_wrong_url_is_one_line_without_the_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^database_url cannot be used .*sqlite\+aiosqlite:///PATH") as error:
        Database(url)
    assert "secret" not in str(error.value) and "\n" not in str(error.value)


def test_an_earlier_versions_objects_are_still_served(
    make_client: Callable[..., TestClient], engine: FakeEngine, earlier: Path
) -> None:
    client = make_client(engine, data_dir=earlier)
    assert client.get("/v1/files/file-1").json()["filename"] == "in.jsonl"
    assert client.get("/v1/batches/batch_1").json()["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
    assert client.get("/v1/conversations/conv_1").json()["metadata"] == {"topic": "capitals"}
    assert client.get("/v1/conversations/conv_1/items").json()["data"][0]["content"][0]["text"] == "Hi"
    made = client.post("/v1/responses", json={"input": "And you?", "conversation": "conv_1"})
    assert client.get(f"/v1/responses/{made.json()['id']}").json()["status"] == "completed"
