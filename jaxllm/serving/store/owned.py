"""Whose a stored object is: a column that all tables of objects have."""

from __future__ import annotations

from sqlalchemy import String
from sqlalchemy.orm import Mapped, mapped_column


class Owned:
    """A row that belongs to a key of the file of keys."""

    owner: Mapped[str | None] = mapped_column(String(64), index=True)
    """The name of that key; null where whoever made it had none, or one of `--api-key`."""
