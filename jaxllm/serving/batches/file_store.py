"""Stored files: a row each in the database, the bytes in a directory under the file's id."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from sqlalchemy import BigInteger, ColumnElement, String, Text, delete, or_, select
from sqlalchemy.orm import Mapped, mapped_column

from jaxllm.folders import in_home
from jaxllm.serving.batches.file_types import FileList, FileListQuery, FileObject
from jaxllm.serving.http.api_error import APIError, telling_full
from jaxllm.serving.store.database import Base, Database
from jaxllm.serving.store.owned import Owned
from jaxllm.serving.store.pages import Numbered, page_of
from jaxllm.wording import shown

EXPIRED_AT_ONCE = 1000


class FileRow(Numbered, Owned, Base):
    """Times are in seconds since 1970."""

    __tablename__ = "files"

    bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[int | None] = mapped_column(BigInteger)
    filename: Mapped[str] = mapped_column(Text)
    purpose: Mapped[str] = mapped_column(String(32))


class FileStore:
    """A file past its expires_at is gone for every method; `delete_expired` takes its bytes away.

    `owner` is whose files are meant: those of others are not there.
    """

    def __init__(self, database: Database, directory: Path):
        self._database = database
        self._directory = directory

    async def save(
        self, content: BinaryIO, owner: str | None, *, filename: str, purpose: str, expires_after: int | None = None
    ) -> FileObject:
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

    async def adopt(
        self,
        file_id: str,
        source: Path,
        owner: str | None,
        *,
        filename: str,
        purpose: str,
        expires_after: int | None,
    ) -> FileRow:
        """Place a finished file here; it is stored once the caller has added the row. May be repeated."""
        path = self._directory / file_id
        await asyncio.to_thread(link_or_copy, source, path)
        return _row(file_id, path, owner, filename, purpose, expires_after)

    async def get(self, file_id: str, owner: str | None) -> FileObject:
        """Raises 404."""
        async with self._database.session() as session:
            row = await session.scalar(select(FileRow).where(FileRow.id == file_id, FileRow.owner == owner, _alive()))
        if row is None:
            raise APIError(404, f"no file has the id {shown(file_id)}", param="file_id", code="not_found")
        return _object(row)

    async def path(self, file_id: str, owner: str | None) -> Path:
        """Where the bytes of a file are. Raises 404."""
        await self.get(file_id, owner)
        path = self._directory / file_id
        if not await asyncio.to_thread(path.is_file):
            raise APIError(404, f"the content of file {file_id!r} is no longer on disk", code="not_found")
        return path

    async def page(self, query: FileListQuery, owner: str | None) -> FileList:
        conditions = [FileRow.owner == owner, _alive()]
        if query.purpose is not None:
            conditions.append(FileRow.purpose == query.purpose)
        async with self._database.session() as session:
            rows, has_more = await page_of(
                session,
                FileRow,
                *conditions,
                after=query.after,
                limit=query.limit,
                descending=query.order == "desc",
            )
        data = [_object(row) for row in rows]
        return FileList(
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
            has_more=has_more,
        )

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
    """Where the bytes of files are."""
    return in_home(data_dir) / "files"


def link_or_copy(source: Path, target: Path) -> None:
    """A second name for `source` that outlives it; a copy where the file system has no hard links.

    Raises StorageFullError.
    """
    with telling_full():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)


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


def _object(row: FileRow) -> FileObject:
    return FileObject(
        id=row.id,
        bytes=row.bytes,
        created_at=row.created_at,
        expires_at=row.expires_at,
        filename=row.filename,
        purpose=row.purpose,
    )
