"""How old responses and conversations are, for those who keep them for a time only."""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic.operations import Operations

revision = "3"
down_revision = "2"

ROWS = 500
"""Bodies that are in memory at once."""


def upgrade(op: Operations) -> None:
    op.add_column("responses", sa.Column("created_at", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("conversations", sa.Column("used_at", sa.BigInteger, nullable=False, server_default="0"))
    op.execute("UPDATE conversations SET used_at = created_at")
    _fill_created_at(op.get_bind())
    op.create_index("ix_responses_created_at", "responses", ["created_at"])
    op.create_index("ix_responses_previous_response_id", "responses", ["previous_response_id"])
    op.create_index("ix_conversations_used_at", "conversations", ["used_at"])


def _fill_created_at(connection: sa.Connection) -> None:
    """Until now it was in the body alone, which is JSON."""
    responses = sa.table("responses", sa.column("id"), sa.column("body"), sa.column("created_at"))
    last = ""
    while True:
        query = sa.select(responses.c.id, responses.c.body).where(responses.c.id > last)
        rows = connection.execute(query.order_by(responses.c.id).limit(ROWS)).all()
        if not rows:
            return
        for row in rows:
            created = int(json.loads(row.body)["created_at"])
            connection.execute(sa.update(responses).where(responses.c.id == row.id).values(created_at=created))
        last = rows[-1].id
