"""Usage by key, day and model in the database."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from sqlalchemy import BigInteger, String, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Mapped, mapped_column

from jaxllm.errors import StorageFullError
from jaxllm.serving.access.usage import Account, Ledger, Used
from jaxllm.serving.store.database import Base, Database

logger = logging.getLogger(__name__)

WRITE_SECONDS = 10.0
"""How often usage is written. A server that dies loses what it has counted since."""


class UsageRow(Base):
    """A day is written as 2027-01-31, in UTC."""

    __tablename__ = "usage_by_day"

    owner: Mapped[str] = mapped_column(String(64), primary_key=True)
    """The name of a key; empty for whoever has none, or one of `--api-key`."""
    day: Mapped[str] = mapped_column(String(10), primary_key=True)
    model: Mapped[str] = mapped_column(String(512), primary_key=True)
    requests: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    completion_tokens: Mapped[int] = mapped_column(BigInteger)


class UsageStore:
    """Writes what a ledger counts into the database, where it outlives the server and servers add up.

    Without `keeps` nothing is written: what there is, is what the ledger has counted since the start.
    """

    def __init__(self, ledger: Ledger, database: Database, *, keeps: bool):
        self._ledger = ledger
        self._database = database
        self._keeps = keeps
        self._writing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Write from now on."""
        if self._keeps:
            self._writing = asyncio.create_task(self._write_again_and_again(), name="write usage")

    async def close(self) -> None:
        """Write what there is, and no more."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
            await self.write()

    async def write(self) -> None:
        """Add what the ledger has counted to the database; it counts on with what could not be written."""
        usage = self._ledger.take()
        if not usage:
            return
        try:
            async with self._database.transaction() as session:
                dialect = session.get_bind().dialect.name
                for account, used in sorted(usage.items()):  # servers in the same order, so that none locks another out
                    await session.execute(addition(dialect, account, used))
        except BaseException as error:
            self._ledger.put_back(usage)
            if not isinstance(error, SQLAlchemyError | OSError | StorageFullError):
                raise
            known = isinstance(error, StorageFullError)
            logger.error("the usage of API keys could not be written; it is tried again: %s", error, exc_info=not known)

    async def of(self, owner: str | None, since: str, until: str) -> list[tuple[Account, Used]]:
        """What an owner has used from one day to another, both included, by day and model."""
        name = owner or ""
        found: dict[Account, Used] = {}
        if self._keeps:
            days = UsageRow.day.between(since, until)
            async with self._database.session() as session:
                for row in await session.scalars(select(UsageRow).where(UsageRow.owner == name, days)):
                    used = Used(row.requests, row.prompt_tokens, row.cached_tokens, row.completion_tokens)
                    found[Account(row.owner, row.day, row.model)] = used
        _add_up(found, self._ledger.pending, name, since, until)
        return sorted(found.items())

    async def _write_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            await self.write()


def addition(dialect: str, account: Account, used: Used) -> Any:
    """A statement that adds to a row, or makes it: atomic, so that servers which write at once lose nothing."""
    table = UsageRow.__table__
    insert: Any = postgresql.insert if dialect == "postgresql" else sqlite.insert
    statement = insert(table).values(**account._asdict(), **used._asdict())
    sums = {name: table.c[name] + statement.excluded[name] for name in Used._fields}
    return statement.on_conflict_do_update(index_elements=list(Account._fields), set_=sums)


def _add_up(found: dict[Account, Used], pending: Mapping[Account, Used], owner: str, since: str, until: str) -> None:
    for account, used in pending.items():
        if account.owner == owner and since <= account.day <= until:
            found[account] = found.get(account, Used()).plus(used)
