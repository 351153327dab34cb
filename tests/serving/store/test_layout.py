"""Databases that any earlier version has made are brought to the newest, once, and never back."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from fastapi.testclient import TestClient
from sqlalchemy import Connection, select, text

import jaxllm.serving.app  # noqa: F401  every table is known then
from jaxllm.errors import ConfigError
from jaxllm.serving.responses.stores import ConversationRow, ResponseRow
from jaxllm.serving.store.database import Base, Database, sqlite_url
from jaxllm.serving.store.layout import TableLayout
from tests.serving.fake_engine import FakeEngine

NEWEST = "4"


def differences(connection: Connection) -> list[object]:
    """What the tables would need to be those of the code."""
    return list(compare_metadata(MigrationContext.configure(connection), Base.metadata))


async def opened(url: str | Path) -> list[object]:
    """Open a database, and say what is missing of it then."""
    database = Database(sqlite_url(url) if isinstance(url, Path) else url)
    await database.open()
    async with database._engine.connect() as connection:
        found = await connection.run_sync(differences)
    await database.close()
    return found


def version(directory: Path) -> str | None:
    with closing(sqlite3.connect(directory / "jaxllm.db")) as connection:
        return str(connection.execute("SELECT version_num FROM alembic_version").fetchone()[0])


def test_new_tables_are_those_of_the_code(tmp_path: Path) -> None:
    """A change of a table without a file in versions/ is found here."""
    assert asyncio.run(opened(tmp_path / "new")) == [] and version(tmp_path / "new") == NEWEST


def test_tables_of_the_first_version_become_those_of_the_code(earlier: Path) -> None:
    assert asyncio.run(opened(earlier)) == [] and version(earlier) == NEWEST


def test_ages_are_found_in_what_is_there(earlier: Path) -> None:
    async def main() -> tuple[int | None, int | None]:
        database = Database(sqlite_url(earlier))
        async with database.session() as session:
            made = await session.scalar(select(ResponseRow.created_at).where(ResponseRow.id == "resp_1"))
            used = await session.scalar(select(ConversationRow.used_at))
        await database.close()
        return made, used

    assert asyncio.run(main()) == (1700000005, 1700000000)


def test_servers_that_start_at_once_bring_it_forward_once(earlier: Path) -> None:
    async def main() -> list[TableLayout | None]:
        databases = [Database(sqlite_url(earlier)) for _ in range(4)]
        befores = await asyncio.gather(*(database.open() for database in databases))
        for database in databases:
            await database.close()
        return befores

    assert sorted(before.version or "" for before in asyncio.run(main()) if before) == ["1", *[NEWEST] * 3]


def test_a_newer_version_is_refused_in_one_line_at_the_start(
    make_client: Callable[..., TestClient], engine: FakeEngine, earlier: Path
) -> None:
    asyncio.run(opened(earlier))
    with closing(sqlite3.connect(earlier / "jaxllm.db")) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '99'")
        connection.commit()
    with pytest.raises(ConfigError, match=f"tables of version 99, which a newer jaxllm .* up to {NEWEST}") as raised:
        make_client(engine, data_dir=earlier)
    assert "\n" not in str(raised.value) and version(earlier) == "99"


def test_to_look_changes_nothing(earlier: Path) -> None:
    async def main() -> TableLayout:
        database = Database(sqlite_url(earlier))
        layout = await database.layout()
        await database.close()
        return layout

    assert asyncio.run(main()) == TableLayout("1", NEWEST)
    with closing(sqlite3.connect(earlier / "jaxllm.db")) as connection:
        assert not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'").fetchone()


def test_a_step_that_fails_leaves_the_version_that_was_there(earlier: Path) -> None:
    with closing(sqlite3.connect(earlier / "jaxllm.db")) as connection:
        connection.execute("UPDATE responses SET body = '{}'")  # the third version looks for its time in it
        connection.commit()
    with pytest.raises(KeyError):
        asyncio.run(opened(earlier))
    with closing(sqlite3.connect(earlier / "jaxllm.db")) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        assert "alembic_version" not in tables or not connection.execute("SELECT * FROM alembic_version").fetchall()
        assert "owner" not in {row[1] for row in connection.execute("PRAGMA table_info(files)")}


def test_postgresql_s_tables_are_those_of_the_code(database_url: str) -> None:
    assert asyncio.run(opened(database_url)) == []


def test_postgresql_s_servers_that_start_at_once_wait_for_each_other(database_url: str) -> None:
    async def main() -> list[str | None]:
        databases = [Database(database_url) for _ in range(4)]
        befores = await asyncio.gather(*(database.open() for database in databases))
        async with databases[0].session() as session:
            rows = (await session.execute(text("SELECT version_num FROM alembic_version"))).all()
        for database in databases:
            await database.close()
        assert [row[0] for row in rows] == [NEWEST]
        return [before.version for before in befores if before is not None]

    assert sorted(asyncio.run(main()), key=str) == [NEWEST, NEWEST, NEWEST, None]
