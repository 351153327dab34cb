"""Files and batches as they are stored: rows of the database, and the files' contents in a folder."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
from sqlalchemy import JSON, BigInteger, ColumnElement, String, Text, delete, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from jaxllm.folders import in_home
from jaxllm.serving.batches import types
from jaxllm.serving.http.api_error import APIError, telling_full
from jaxllm.serving.openai.sampling import PromptTokensDetails
from jaxllm.serving.responses.objects import OutputTokensDetails
from jaxllm.serving.store.database import Base, Database, Numbered, Owned, page_of
from jaxllm.wording import shown

Page = TypeVar("Page", types.FileList, types.BatchList)

EXPIRED_AT_ONCE = 1000

UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
CANCELLABLE = ("validating", "in_progress")


class FileRow(Numbered, Owned, Base):
    """Times are in seconds since 1970."""

    __tablename__ = "files"

    bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[int | None] = mapped_column(BigInteger)
    filename: Mapped[str] = mapped_column(Text)
    purpose: Mapped[str] = mapped_column(String(32))


class FileStore:
    """The stored files of an `owner`; for every method one past its expires_at is gone."""

    def __init__(self, database: Database, directory: Path):
        self._database = database
        self._directory = directory

    async def save(
        self, content: BinaryIO, owner: str | None, *, filename: str, purpose: str, expires_after: int | None = None
    ) -> types.FileObject:
        """Keep a copy of `content`; `expires_after` is in seconds. Raises StorageFullError."""
        file_id = f"file-{uuid.uuid4().hex}"
        path = self._directory / file_id
        await asyncio.to_thread(_copy, content, path)
        row = _row(file_id, path, owner, filename, purpose, expires_after)
        try:
            async with self._database.transaction() as session:
                session.add(row)
        except BaseException:
            path.unlink()  # nobody could ask for it, nor delete it
            raise
        return _object(row)

    async def adopt(self, batch: BatchRow, source: Path) -> FileRow:
        """Place a finished output of a batch here; it is stored once the caller has added the row. May be repeated."""
        file_id = f"file-{batch.id.removeprefix('batch_')}-{source.stem}"
        path = self._directory / file_id
        await asyncio.to_thread(link_or_copy, source, path)
        name = f"{batch.id}_{source.name}"
        return _row(file_id, path, batch.owner, name, "batch_output", batch.output_expires_after)

    async def get(self, file_id: str, owner: str | None) -> types.FileObject:
        """Raises 404."""
        async with self._database.session() as session:
            row = await session.scalar(select(FileRow).where(FileRow.id == file_id, FileRow.owner == owner, _alive()))
        if row is None:
            raise APIError(404, f"no file has the id {shown(file_id)}", param="file_id", code="not_found")
        return _object(row)

    async def located(self, file_id: str, owner: str | None) -> tuple[types.FileObject, Path]:
        """A file and the path of its bytes. Raises 404."""
        file, path = await self.get(file_id, owner), self._directory / file_id
        if not await asyncio.to_thread(path.is_file):
            raise APIError(404, f"the content of file {file_id!r} is no longer on disk", code="not_found")
        return file, path

    async def page(self, query: types.FileListQuery, owner: str | None) -> types.FileList:
        conditions = [FileRow.owner == owner, _alive()]
        if query.purpose is not None:
            conditions.append(FileRow.purpose == query.purpose)
        async with self._database.session() as session:
            descending = query.order == "desc"
            rows, has_more = await page_of(
                session, FileRow, *conditions, after=query.after, limit=query.limit, descending=descending
            )
        return _page(types.FileList, [_object(row) for row in rows], has_more)

    async def delete(self, file_id: str, owner: str | None) -> None:
        """Raises 404."""
        await self.get(file_id, owner)
        await self._delete([file_id])

    async def delete_expired(self) -> None:
        """Delete those that have expired, or a thousand of them."""
        async with self._database.session() as session:
            gone = (await session.scalars(select(FileRow.id).where(~_alive()).limit(EXPIRED_AT_ONCE))).all()
        await self._delete(gone)

    async def delete_before(self, time_of: int, most: int) -> int:
        """Delete up to `most` files that were made before that time; how many there were."""
        async with self._database.session() as session:
            gone = (await session.scalars(select(FileRow.id).where(FileRow.created_at < time_of).limit(most))).all()
        await self._delete(gone)
        return len(gone)

    async def _delete(self, file_ids: Sequence[str]) -> None:
        """The bytes before the rows: on a full disk SQLite needs their room to forget the rows."""
        for file_id in file_ids:
            await asyncio.to_thread((self._directory / file_id).unlink, missing_ok=True)
        if file_ids:
            async with self._database.transaction() as session:
                await session.execute(delete(FileRow).where(FileRow.id.in_(file_ids)))


def files_of(data_dir: Path) -> Path:
    return in_home(data_dir) / "files"


def link_or_copy(source: Path, target: Path) -> None:
    """A second name for `source` that outlives it, or a copy without hard links. Raises StorageFullError."""
    with telling_full():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)


class BatchRow(Numbered, Owned, Base):
    """Times are in seconds since 1970; counts and tokens are those of the lines recorded on disk so far."""

    __tablename__ = "batches"

    endpoint: Mapped[str] = mapped_column(String(64))
    input_file_id: Mapped[str] = mapped_column(String(64))
    completion_window: Mapped[str] = mapped_column(String(8))
    output_expires_after: Mapped[int | None]
    served_model: Mapped[str] = mapped_column(Text)
    """First name of the server that took the batch; only servers that have this name resume it."""
    model: Mapped[str | None] = mapped_column(Text)
    """What the lines ask for, if it is one model."""
    status: Mapped[str] = mapped_column(String(16), index=True)
    errors: Mapped[list[dict[str, Any]] | None] = mapped_column(JSON(none_as_null=True))
    labels: Mapped[dict[str, str] | None] = mapped_column(JSON(none_as_null=True))
    output_file_id: Mapped[str | None] = mapped_column(String(64))
    error_file_id: Mapped[str | None] = mapped_column(String(64))
    created_at: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[int] = mapped_column(BigInteger)
    in_progress_at: Mapped[int | None] = mapped_column(BigInteger)
    finalizing_at: Mapped[int | None] = mapped_column(BigInteger)
    completed_at: Mapped[int | None] = mapped_column(BigInteger)
    failed_at: Mapped[int | None] = mapped_column(BigInteger)
    expired_at: Mapped[int | None] = mapped_column(BigInteger)
    cancelling_at: Mapped[int | None] = mapped_column(BigInteger)
    cancelled_at: Mapped[int | None] = mapped_column(BigInteger)
    total: Mapped[int] = mapped_column(default=0)
    completed: Mapped[int] = mapped_column(default=0)
    failed: Mapped[int] = mapped_column(default=0)
    input_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    cached_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    output_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    reasoning_tokens: Mapped[int] = mapped_column(BigInteger, default=0)


class BatchStore:
    """Every method is one transaction, or part of the one it is given; an `owner` does not see batches of others."""

    def __init__(self, database: Database):
        self._database = database

    async def add(self, batch_id: str, request: types.BatchRequest, served_model: str, owner: str | None) -> BatchRow:
        now = int(time.time())
        expiry = request.output_expires_after
        row = BatchRow(
            id=batch_id,
            owner=owner,
            endpoint=request.endpoint,
            input_file_id=request.input_file_id,
            completion_window=request.completion_window,
            output_expires_after=expiry and expiry.seconds,
            served_model=served_model,
            status="validating",
            labels=request.metadata,
            created_at=now,
            expires_at=now + types.COMPLETION_WINDOWS[request.completion_window],
        )
        async with self._database.transaction() as session:
            session.add(row)
        return row

    async def row(self, batch_id: str) -> BatchRow:
        """Whoever owns it; it is there."""
        async with self._database.session() as session:
            return (await session.scalars(select(BatchRow).where(BatchRow.id == batch_id))).one()

    async def get(self, batch_id: str, owner: str | None) -> BatchRow:
        """Raises 404."""
        async with self._database.session() as session:
            row = await session.scalar(select(BatchRow).where(BatchRow.id == batch_id, BatchRow.owner == owner))
        if row is None:
            raise APIError(404, f"no batch has the id {shown(batch_id)}", param="batch_id", code="not_found")
        return row

    async def page(self, query: types.BatchListQuery, owner: str | None) -> types.BatchList:
        """Newest first."""
        async with self._database.session() as session:
            own = BatchRow.owner == owner
            rows, has_more = await page_of(session, BatchRow, own, after=query.after, limit=query.limit)
        return _page(types.BatchList, [batch_object(row) for row in rows], has_more)

    async def unfinished(self) -> Sequence[BatchRow]:
        """Oldest first."""
        query = select(BatchRow).where(BatchRow.status.in_(UNFINISHED)).order_by(BatchRow.number)
        async with self._database.session() as session:
            return (await session.scalars(query)).all()

    async def delete_before(self, time_of: int, most: int) -> int:
        """Forget up to `most` batches that were made before that time and have ended; how many there were."""
        async with self._database.transaction() as session:
            old = select(BatchRow.number).where(BatchRow.created_at < time_of, BatchRow.status.not_in(UNFINISHED))
            numbers = (await session.scalars(old.limit(most))).all()
            await session.execute(delete(BatchRow).where(BatchRow.number.in_(numbers)))
        return len(numbers)

    async def change(self, batch_id: str, statuses: Sequence[str] = UNFINISHED, **values: Any) -> BatchRow:
        """Set columns if the status is one of `statuses`; returns the row as it then is."""
        async with self._database.transaction() as session:
            return await self.change_in(session, batch_id, statuses, **values)

    async def change_in(
        self, session: AsyncSession, batch_id: str, statuses: Sequence[str] = UNFINISHED, **values: Any
    ) -> BatchRow:
        condition = (BatchRow.id == batch_id, BatchRow.status.in_(statuses))
        await session.execute(update(BatchRow).where(*condition).values(**values))
        return (await session.scalars(select(BatchRow).where(BatchRow.id == batch_id))).one()


def batch_object(row: BatchRow) -> types.Batch:
    names = set(types.Batch.__struct_fields__) - {"object", "errors", "request_counts", "usage", "metadata"}
    return types.Batch(
        **{name: getattr(row, name) for name in names},
        errors=None if row.errors is None else msgspec.convert({"data": row.errors}, types.BatchErrors),
        request_counts=types.RequestCounts(total=row.total, completed=row.completed, failed=row.failed),
        usage=types.BatchUsage(
            input_tokens=row.input_tokens,
            input_tokens_details=PromptTokensDetails(row.cached_tokens),
            output_tokens=row.output_tokens,
            output_tokens_details=OutputTokensDetails(row.reasoning_tokens),
            total_tokens=row.input_tokens + row.output_tokens,
        ),
        metadata=row.labels,
    )


def _copy(content: BinaryIO, path: Path) -> None:
    """Complete on disk when it has its name."""
    partial = path.with_name(f".{path.name}")
    try:
        with telling_full():
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                shutil.copyfileobj(content, file, 1 << 20)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _alive() -> ColumnElement[bool]:
    return or_(FileRow.expires_at.is_(None), FileRow.expires_at > int(time.time()))


def _row(
    file_id: str, path: Path, owner: str | None, filename: str, purpose: str, expires_after: int | None
) -> FileRow:
    now = int(time.time())
    return FileRow(
        id=file_id,
        owner=owner,
        bytes=path.stat().st_size,
        created_at=now,
        expires_at=None if expires_after is None else now + expires_after,
        filename=filename,
        purpose=purpose,
    )


def _object(row: FileRow) -> types.FileObject:
    return msgspec.convert(row, types.FileObject, from_attributes=True)


def _page(kind: Callable[..., Page], data: Sequence[types.FileObject] | Sequence[types.Batch], has_more: bool) -> Page:
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return kind(data=data, first_id=first, last_id=last, has_more=has_more)
