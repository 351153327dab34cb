"""All kinds of objects that a server stores, for those who look at them together."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, func, select

from jaxllm.serving.batches.batch_store import BatchRow, BatchStore
from jaxllm.serving.batches.file_store import FileRow, FileStore, files_of
from jaxllm.serving.responses.conversation_store import ConversationRow, ConversationStore
from jaxllm.serving.responses.response_store import ResponseRow, ResponseStore
from jaxllm.serving.store.database import Database
from jaxllm.serving.store.retention import DeleteBefore


class StoredKind(NamedTuple):
    """Objects of one kind, by the columns of their table."""

    id: Any
    owner: Any
    time_of: Any
    """Seconds since 1970 from which its age counts."""
    detail: ColumnElement[str] | Any
    """What is worth seeing of one."""


KINDS = {
    "responses": StoredKind(ResponseRow.id, ResponseRow.owner, ResponseRow.created_at, ResponseRow.status),
    "conversations": StoredKind(
        ConversationRow.id, ConversationRow.owner, ConversationRow.used_at, ConversationRow.attached
    ),
    "batches": StoredKind(BatchRow.id, BatchRow.owner, BatchRow.created_at, BatchRow.status),
    "files": StoredKind(FileRow.id, FileRow.owner, FileRow.created_at, FileRow.filename),
}


class StoredCount(NamedTuple):
    """How many objects of a kind there are, and the times of the oldest and the newest."""

    number: int
    oldest: int | None
    newest: int | None


class StoredEntry(NamedTuple):
    """One stored object."""

    id: str
    kind: str
    owner: str | None
    """The name of the key that made it, where that has one."""
    time_of: int
    detail: str


def deleters(database: Database, data_dir: Path) -> dict[str, DeleteBefore]:
    """What deletes old objects of each kind."""
    return {
        "responses": ResponseStore(database).delete_before,
        "conversations": ConversationStore(database).delete_before,
        "batches": BatchStore(database).delete_before,
        "files": FileStore(database, files_of(data_dir)).delete_before,
    }


async def counted(database: Database) -> dict[str, StoredCount]:
    """How many objects of each kind there are."""
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
        return [StoredEntry(id, name, owner, time_of, _text(detail)) for id, owner, time_of, detail in rows]


def _text(detail: str | bytes) -> str:
    return detail.decode(errors="replace") if isinstance(detail, bytes) else detail
