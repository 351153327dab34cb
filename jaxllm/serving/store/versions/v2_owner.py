"""Whose an object is."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

revision = "2"
down_revision = "1"


def upgrade(op: Operations) -> None:
    for table in ("batches", "conversations", "files", "responses"):
        op.add_column(table, sa.Column("owner", sa.String(64)))
        op.create_index(f"ix_{table}_owner", table, ["owner"])
