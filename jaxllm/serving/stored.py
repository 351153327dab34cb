"""All kinds of objects that a server stores, for those who look at them together, and the end of old ones."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.exc import SQLAlchemyError

from jaxllm.errors import StorageFullError
from jaxllm.serving.batches.stores import BatchRow, BatchStore, FileRow, FileStore, files_of
from jaxllm.serving.responses.stores import ConversationRow, ConversationStore, ResponseRow, ResponseStore
from jaxllm.serving.store.database import Database

logger = logging.getLogger(__name__)
LOOK_SECONDS = 600.0  # between two looks for old objects
AT_ONCE, PAUSE_SECONDS = 100, 0.05
"""Objects that one transaction deletes while other writers wait, and the pause for these between two transactions."""
DeleteBefore = Callable[[int, int], Awaitable[int]]
"""Deletes objects of one kind that are older than a time, at most a number of them; returns their number."""


class StoredKind(NamedTuple):
    """The columns of one kind's table; from `time_of`, in seconds since 1970, its objects' age counts."""

    id: Any
    owner: Any
    time_of: Any
    detail: ColumnElement[str] | Any


KINDS = {
    "responses": StoredKind(ResponseRow.id, ResponseRow.owner, ResponseRow.created_at, ResponseRow.status),
    "conversations": StoredKind(
        ConversationRow.id, ConversationRow.owner, ConversationRow.used_at, ConversationRow.attached
    ),
    "batches": StoredKind(BatchRow.id, BatchRow.owner, BatchRow.created_at, BatchRow.status),
    "files": StoredKind(FileRow.id, FileRow.owner, FileRow.created_at, FileRow.filename),
}


class StoredCount(NamedTuple):
    number: int
    oldest: int | None
    newest: int | None


class StoredEntry(NamedTuple):
    id: str
    kind: str
    owner: str | None
    time_of: int
    detail: str


def deleters(database: Database, data_dir: Path) -> dict[str, DeleteBefore]:
    return {
        "responses": ResponseStore(database).delete_before,
        "conversations": ConversationStore(database).delete_before,
        "batches": BatchStore(database).delete_before,
        "files": FileStore(database, files_of(data_dir)).delete_before,
    }


async def counted(database: Database) -> dict[str, StoredCount]:
    async with database.session() as session:
        rows = {
            name: (await session.execute(select(func.count(), func.min(kind.time_of), func.max(kind.time_of)))).one()
            for name, kind in KINDS.items()
        }
    return {name: StoredCount(*row) for name, row in rows.items()}


async def listed(database: Database, name: str, limit: int) -> list[StoredEntry]:
    """The newest objects of a kind, the newest first."""
    kind = KINDS[name]
    async with database.session() as session:
        rows = await session.execute(
            select(kind.id, kind.owner, kind.time_of, kind.detail).order_by(kind.time_of.desc(), kind.id).limit(limit)
        )
        return [
            StoredEntry(
                id, name, owner, time_of, detail.decode(errors="replace") if isinstance(detail, bytes) else detail
            )
            for id, owner, time_of, detail in rows
        ]


async def delete_old(deleters: Mapping[str, DeleteBefore], time_of: int) -> dict[str, int]:
    """Delete all that is older than a time in seconds since 1970; returns the counts by kind."""
    deleted = dict.fromkeys(deleters, 0)
    for kind, delete_before in deleters.items():
        while count := await delete_before(time_of, AT_ONCE):
            deleted[kind] += count
            await asyncio.sleep(PAUSE_SECONDS)
    return deleted


class Retention:
    """Deletes what is older than `seconds`, from `start` to `close`; nothing where that is None."""

    def __init__(self, database: Database, deleters: Mapping[str, DeleteBefore], seconds: float | None):
        self._database = database
        self._deleters = deleters
        self._seconds = seconds
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._seconds is not None:
            self._task = asyncio.create_task(self._run(self._seconds), name="delete old objects")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self, seconds: float) -> None:
        while True:
            try:
                deleted = await delete_old(self._deleters, int(time.time() - seconds)) if self._database.exists else {}
                if any(deleted.values()):
                    told = ", ".join(f"{count} {kind}" for kind, count in deleted.items())
                    logger.info("deleted as too old: %s", told)
            except (SQLAlchemyError, OSError, StorageFullError):
                logger.exception("old objects could not be deleted; the next attempt is in %g seconds", LOOK_SECONDS)
            await asyncio.sleep(LOOK_SECONDS)
