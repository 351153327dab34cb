"""The tables of the first version. A database without a version has them already."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

revision = "1"
down_revision = None


def upgrade(op: Operations) -> None:
    times = (
        "in_progress_at",
        "finalizing_at",
        "completed_at",
        "failed_at",
        "expired_at",
        "cancelling_at",
        "cancelled_at",
    )
    tokens = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
    op.create_table(
        "batches",
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("input_file_id", sa.String(64), nullable=False),
        sa.Column("completion_window", sa.String(8), nullable=False),
        sa.Column("output_expires_after", sa.Integer),
        sa.Column("served_model", sa.Text, nullable=False),
        sa.Column("model", sa.Text),
        sa.Column("status", sa.String(16), nullable=False, index=True),
        sa.Column("errors", sa.JSON),
        sa.Column("labels", sa.JSON),
        sa.Column("output_file_id", sa.String(64)),
        sa.Column("error_file_id", sa.String(64)),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False),
        *(sa.Column(name, sa.BigInteger) for name in times),
        *(sa.Column(name, sa.Integer, nullable=False) for name in ("total", "completed", "failed")),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in tokens),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(64), nullable=False, unique=True),
    )
    op.create_table(
        "files",
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger),
        sa.Column("filename", sa.Text, nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(64), nullable=False, unique=True),
    )
    op.create_table(
        "conversations",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("created_at", sa.Integer, nullable=False),
        sa.Column("attached", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "responses",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("previous_response_id", sa.String(64)),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("events", sa.LargeBinary),
        sa.Column("alive_until", sa.Float),
    )
    of_conversation = sa.ForeignKey("conversations.id", ondelete="CASCADE")
    op.create_table(
        "conversation_items",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("conversation_id", sa.String(64), of_conversation, nullable=False, index=True),
        sa.Column("item_id", sa.String(128), nullable=False, index=True),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.UniqueConstraint("conversation_id", "item_id"),
    )
    of_response = sa.ForeignKey("responses.id", ondelete="CASCADE")
    op.create_table(
        "response_items",
        sa.Column("response_id", sa.String(64), of_response, primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("item_id", sa.String(128), nullable=False, index=True),
        sa.Column("is_output", sa.Boolean, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
