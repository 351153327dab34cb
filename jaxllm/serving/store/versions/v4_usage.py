"""What each API key has used, by day and model."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

revision = "4"
down_revision = "3"


def upgrade(op: Operations) -> None:
    counts = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
    op.create_table(
        "usage_by_day",
        sa.Column("owner", sa.String(64), primary_key=True),
        sa.Column("day", sa.String(10), primary_key=True),
        sa.Column("model", sa.String(512), primary_key=True),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in counts),
    )
