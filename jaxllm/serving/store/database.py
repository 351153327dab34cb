"""The database of stored objects: SQLite in the data directory, or whatever `database_url` names."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, event, make_url
from sqlalchemy.exc import ArgumentError, InvalidRequestError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase

from jaxllm.errors import ConfigError

BUSY_SECONDS = 30.0
"""How long a write to SQLite waits for another process that is writing."""


class Base(DeclarativeBase):
    """The base of every table. Each table is defined by the API whose objects it holds."""


def sqlite_url(data_dir: Path) -> URL:
    """Of the default database."""
    return URL.create("sqlite+aiosqlite", database=str(data_dir.expanduser() / "jaxllm.db"))


class Database:
    """Opens itself on first use: until something is stored, no file and no connection exists.

    Raises ConfigError when `url` is not one SQLAlchemy can use asynchronously.
    """

    def __init__(self, url: str | URL):
        try:
            self._url = make_url(url)
            self._sqlite = self._url.get_backend_name() == "sqlite"
            # Immediate: a transaction that writes queues for SQLite's one write lock instead of failing half-way.
            arguments = {"timeout": BUSY_SECONDS, "isolation_level": "IMMEDIATE"} if self._sqlite else {}
            self._engine = create_async_engine(self._url, connect_args=arguments)
        except (ArgumentError, InvalidRequestError, ImportError) as error:
            accepted = "sqlite+aiosqlite:///PATH, or postgresql+asyncpg://… with `pip install jaxllm[postgres]`"
            raise ConfigError(f"database_url cannot be used ({_first_line(error)}); it must be {accepted}") from None
        if self._sqlite:
            event.listen(self._engine.sync_engine, "connect", _set_pragmas)
        self._sessions = async_sessionmaker(self._engine, expire_on_commit=False)
        self._opening = asyncio.Lock()
        self._writing = asyncio.Lock()
        self._opened = False

    @property
    def exists(self) -> bool:
        """False as long as nothing can have been stored: SQLite's file is not there."""
        return not self._sqlite or self._path is None or self._path.exists()

    async def open(self) -> None:
        """Create what is missing of the directory and the tables; does nothing from the second call on."""
        async with self._opening:
            if self._opened:
                return
            if self._sqlite and self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
            async with self._engine.connect() as connection:
                if self._sqlite:  # two servers may start at once
                    await _log_ahead(connection)
                    await connection.exec_driver_sql("BEGIN IMMEDIATE")
                await connection.run_sync(_create_tables)
                await connection.commit()
            self._opened = True

    @asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncSession]:
        """A session for reading. What is left uncommitted at its end is rolled back."""
        await self.open()
        async with self._sessions() as session:
            yield session

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSession]:
        """A session for writing, committed at its end and rolled back on an error; on SQLite one at a time.

        Keep it short, and never open another inside it.
        """
        await self.open()
        async with self._writing if self._sqlite else nullcontext(), self._sessions.begin() as session:
            yield session

    async def close(self) -> None:
        """Close every connection; using the database again reopens it."""
        await self._engine.dispose()

    @property
    def _path(self) -> Path | None:
        name = self._url.database
        return None if not name or name == ":memory:" else Path(name)


def _create_tables(connection: Connection) -> None:
    Base.metadata.create_all(connection)


async def _log_ahead(connection: AsyncConnection) -> None:
    """Switch the file to a write-ahead log, which it then keeps: readers no longer wait for a writer.

    Two processes that switch at once would wait for each other for ever, so SQLite lets one of them fail at once,
    whatever its timeout is. That one tries again.
    """
    give_up = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            await connection.exec_driver_sql("PRAGMA journal_mode = WAL")
            return
        except OperationalError as error:
            if "locked" not in str(error.orig) or time.monotonic() > give_up:
                raise
        await asyncio.sleep(0.02)


def _set_pragmas(connection: Any, _: Any) -> None:
    cursor = connection.cursor()
    for pragma in ("synchronous = NORMAL", "foreign_keys = ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
