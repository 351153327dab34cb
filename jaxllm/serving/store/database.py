"""The database of stored objects: SQLite in the data directory, or whatever `database_url` names."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import URL, ColumnElement, Connection, String, event, func, inspect, make_url, select
from sqlalchemy.exc import ArgumentError, DBAPIError, InvalidRequestError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from jaxllm.errors import ConfigError, one_line
from jaxllm.folders import in_home
from jaxllm.serving.http.api_error import APIError, telling_full
from jaxllm.wording import shown

if TYPE_CHECKING:
    from alembic.script import ScriptDirectory  # Alembic is imported where it is used: many a server never needs it

logger = logging.getLogger(__name__)

BUSY_SECONDS = 30.0  # the longest that a write to SQLite waits for another process
_NO_CHARACTER = "22021"  # PostgreSQL's code for a text with NUL
MIGRATION_LOCK = 0x6A61786C6C6D
"""The number under which PostgreSQL lets one server at a time look after the tables."""


class Base(DeclarativeBase):
    """The base of every table. A change of a table needs a file in `versions/`, for databases that exist already."""


def sqlite_url(data_dir: Path) -> URL:
    return URL.create("sqlite+aiosqlite", database=str(in_home(data_dir) / "jaxllm.db"))


class Database:
    """Opens itself on first use: until then no file and no connection exists. Raises ConfigError for a wrong `url`."""

    def __init__(self, url: str | URL):
        try:
            self._url = make_url(url)
            if self._url.drivername in ("postgres", "postgresql"):  # as most who hand one out write it
                self._url = self._url.set(drivername="postgresql+asyncpg")
            self._sqlite = self._url.get_backend_name() == "sqlite"
            # Immediate: a transaction that writes queues for SQLite's one write lock instead of failing half-way.
            arguments = {"timeout": BUSY_SECONDS, "isolation_level": "IMMEDIATE"} if self._sqlite else {}
            # A connection that a restart of PostgreSQL has cut is found out before it is used.
            self._engine = create_async_engine(self._url, connect_args=arguments, pool_pre_ping=not self._sqlite)
        except (ArgumentError, InvalidRequestError, ImportError) as error:
            accepted = "sqlite+aiosqlite:///PATH, or postgresql://… with `pip install jaxllm[postgres]`"
            raise ConfigError(
                f"database_url cannot be used ({str(error).splitlines()[0]}); it must be {accepted}"
            ) from None
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

    @property
    def place(self) -> str:
        """Without the password."""
        return str(self._path) if self._sqlite and self._path is not None else self._url.render_as_string()

    async def open(self) -> TableLayout | None:
        """Make the directory, and bring the tables to the newest version; returns what was there at the first call.

        Raises ConfigError if it cannot be reached, or a newer jaxllm has made its tables; StorageFullError.
        """
        async with self._opening:
            if self._opened:
                return None
            if self._sqlite and self._path is not None:
                with telling_full():
                    self._path.parent.mkdir(parents=True, exist_ok=True)
            async with self._first_connection() as connection:
                if self._sqlite:  # two servers may start at once
                    await _log_ahead(connection)
                    await connection.exec_driver_sql("BEGIN IMMEDIATE")
                elif self._url.get_backend_name() == "postgresql":
                    await connection.execute(select(func.pg_advisory_xact_lock(MIGRATION_LOCK)))
                before = await connection.run_sync(upgrade)
                await connection.commit()
            self._opened = True
        return before

    async def layout(self) -> TableLayout:
        """Raises as `open`."""
        async with self._first_connection() as connection:
            return await connection.run_sync(layout_of)

    @asynccontextmanager
    async def _first_connection(self) -> AsyncIterator[AsyncConnection]:
        failures: tuple[type[Exception], ...] = (OSError, DBAPIError, *_errors_of(self._engine.dialect))
        try:
            connection = await self._engine.connect()
        except failures as error:
            reason = one_line(error.orig if isinstance(error, DBAPIError) else error)
            raise ConfigError(f"the database of stored objects ({self.place}) cannot be reached: {reason}") from None
        try:
            with telling_full():
                yield connection
        finally:
            await connection.close()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncSession]:
        """A session for reading. What is left uncommitted at its end is rolled back. Raises as `open`."""
        await self.open()
        async with _telling(), self._sessions() as session:
            yield session

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSession]:
        """A session for writing, committed at its end and rolled back on an error; on SQLite one at a time.

        Keep it short, and never open another inside it. Raises StorageFullError where the database cannot grow.
        """
        await self.open()
        async with _telling(), self._writing if self._sqlite else nullcontext(), self._sessions.begin() as session:
            yield session

    async def close(self) -> None:
        await self._engine.dispose()

    @property
    def _path(self) -> Path | None:
        name = self._url.database
        return None if not name or name == ":memory:" else Path(name)


class Owned:
    """A row that belongs to a key of the file of keys."""

    owner: Mapped[str | None] = mapped_column(String(64), index=True)
    """The name of that key; null without one, or with one of `--api-key`."""


class Numbered:
    """Columns of a table whose rows are listed in the order they came."""

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)


async def page_of(
    session: AsyncSession,
    table: type[Any],
    *conditions: ColumnElement[bool],
    after: str | None,
    limit: int,
    descending: bool = True,
) -> tuple[Sequence[Any], bool]:
    """Up to `limit` rows of a Numbered table, and whether more follow. Raises APIError when `after` is no row's id."""
    number = table.number
    query = select(table).where(*conditions)
    if after is not None:
        cursor = await session.scalar(select(number).where(table.id == after, *conditions))
        if cursor is None:
            raise APIError(400, f"after is {shown(after)}, which is the id of nothing in this list", param="after")
        query = query.where(number < cursor if descending else number > cursor)
    query = query.order_by(number.desc() if descending else number).limit(limit + 1)
    rows = (await session.scalars(query)).all()
    return rows[:limit], len(rows) > limit


@asynccontextmanager
async def _telling() -> AsyncIterator[None]:
    """A character that PostgreSQL cannot hold is a mistake of the request, whichever field it is in."""
    try:
        with telling_full():
            yield
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) != _NO_CHARACTER:
            raise
        message = "the request has a NUL character in an id, a name or metadata, which the database cannot store"
        raise APIError(400, message) from None


def _errors_of(dialect: Any) -> tuple[type[Exception], ...]:
    """asyncpg's errors before there is a connection, which SQLAlchemy leaves as they are."""
    if dialect.driver != "asyncpg":
        return ()
    from asyncpg import InterfaceError, PostgresError

    return PostgresError, InterfaceError


async def _log_ahead(connection: AsyncConnection) -> None:
    """Switch the file to a write-ahead log, which it keeps: readers no longer wait for a writer.

    Of two processes that switch at once SQLite lets one fail, whatever its timeout is. That one tries again.
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


class TableLayout(NamedTuple):
    """The version of a database's tables, None where there are none yet; `newest` is the last that we know."""

    version: str | None
    newest: str


def layout_of(connection: Connection) -> TableLayout:
    """The version that is there. Raises ConfigError where it is unknown, of a newer jaxllm."""
    from alembic.runtime.migration import MigrationContext

    newest = _versions().get_current_head()
    assert newest is not None, "there is one line of versions"
    context = MigrationContext.configure(connection)
    found = context.get_current_revision()
    if found is None:
        return TableLayout(_unversioned(connection), newest)
    if found not in {one.revision for one in _versions().walk_revisions()}:
        raise ConfigError(
            f"the database of stored objects has tables of version {found}, which a newer jaxllm has made; this one "
            f"knows versions up to {newest}: use the newer one, or another data_dir or database_url"
        )
    return TableLayout(found, newest)


def upgrade(connection: Connection) -> TableLayout:
    """Bring the tables to the newest version, under the caller's lock; returns the old one. Raises as `layout_of`."""
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext

    before, versions = layout_of(connection), _versions()
    if before.version == before.newest:
        return before
    context = MigrationContext.configure(
        connection, opts={"fn": lambda revision, _: versions._upgrade_revs("head", revision)}
    )
    if before.version is not None and context.get_current_revision() is None:
        context.stamp(versions, before.version)
    context.run_migrations(op=Operations(context))
    if before.version is not None:
        logger.info("the tables of stored objects went from version %s to %s", before.version, before.newest)
    return before


def _unversioned(connection: Connection) -> str | None:
    inspector = inspect(connection)
    if not inspector.has_table("responses"):  # every version has it
        return None
    return "2" if "owner" in {column["name"] for column in inspector.get_columns("responses")} else "1"


@cache
def _versions() -> ScriptDirectory:
    from alembic.script import ScriptDirectory

    return ScriptDirectory(str(Path(__file__).parent))
