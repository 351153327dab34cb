"""Pages of a list of stored objects, each continuing behind the last id of the one before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, String, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from jaxllm.serving.http.api_error import APIError
from jaxllm.wording import shown


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
