"""Stored conversations and their items."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from sqlalchemy import BigInteger, ForeignKey, LargeBinary, String, UniqueConstraint, delete, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.responses.items import Item, new_id
from jaxllm.serving.responses.objects import StoredConversation
from jaxllm.serving.store.database import Base, Database, Owned

_item_decoder = msgspec.json.Decoder(Item)
_metadata_decoder = msgspec.json.Decoder(dict[str, str])


class ConversationRow(Owned, Base):
    __tablename__ = "conversations"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    created_at: Mapped[int]
    used_at: Mapped[int] = mapped_column(BigInteger, index=True, server_default="0")
    """When it was made, changed, or given its last item."""
    attached: Mapped[bytes] = mapped_column(LargeBinary)
    """The metadata, as JSON."""


class ConversationItemRow(Base):
    """One item; `number` is their order."""

    __tablename__ = "conversation_items"
    __table_args__ = (UniqueConstraint("conversation_id", "item_id"),)

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    conversation_id: Mapped[str] = mapped_column(ForeignKey("conversations.id", ondelete="CASCADE"), index=True)
    item_id: Mapped[str] = mapped_column(String(128), index=True)
    body: Mapped[bytes] = mapped_column(LargeBinary)


class ConversationStore:
    """What the conversations routes keep; every method is one transaction and raises 404 for an unknown id.

    `owner` is whose conversations are meant: those of others are not there.
    """

    def __init__(self, database: Database):
        self._database = database

    async def create(self, metadata: dict[str, str], items: Sequence[Item], owner: str | None) -> StoredConversation:
        now, attached = int(time.time()), msgspec.json.encode(metadata)
        row = ConversationRow(id=new_id("conv"), owner=owner, created_at=now, used_at=now, attached=attached)
        async with self._database.transaction() as session:
            session.add(row)
            await session.flush()
            await append_items(session, row.id, items)
        return _conversation(row)

    async def get(self, conversation_id: str, owner: str | None) -> StoredConversation:
        async with self._database.session() as session:
            return _conversation(await _find(session, conversation_id, owner))

    async def update(self, conversation_id: str, metadata: dict[str, str], owner: str | None) -> StoredConversation:
        async with self._database.transaction() as session:
            row = await _find(session, conversation_id, owner, to_change=True)
            row.attached, row.used_at = msgspec.json.encode(metadata), int(time.time())
        return _conversation(row)

    async def delete(self, conversation_id: str, owner: str | None) -> None:
        async with self._database.transaction() as session:
            await _find(session, conversation_id, owner, to_change=True)
            await session.execute(
                delete(ConversationItemRow).where(ConversationItemRow.conversation_id == conversation_id)
            )
            await session.execute(delete(ConversationRow).where(ConversationRow.id == conversation_id))

    async def delete_before(self, time_of: int, most: int) -> int:
        """Forget up to `most` conversations that were last used before that time; how many there were."""
        async with self._database.transaction() as session:
            old = select(ConversationRow.id).where(ConversationRow.used_at < time_of).limit(most).with_for_update()
            ids = (await session.scalars(old)).all()
            await session.execute(delete(ConversationItemRow).where(ConversationItemRow.conversation_id.in_(ids)))
            await session.execute(delete(ConversationRow).where(ConversationRow.id.in_(ids)))
        return len(ids)

    async def add(self, conversation_id: str, items: Sequence[Item], owner: str | None) -> list[Item]:
        """Put items at the end; returns them as they are kept."""
        async with self._database.transaction() as session:
            await _find(session, conversation_id, owner)
            return await append_items(session, conversation_id, items)

    async def items(self, conversation_id: str, owner: str | None) -> list[Item]:
        """Oldest first."""
        async with self._database.session() as session:
            await _find(session, conversation_id, owner)
            bodies = await session.scalars(
                select(ConversationItemRow.body)
                .where(ConversationItemRow.conversation_id == conversation_id)
                .order_by(ConversationItemRow.number)
            )
            return [_item_decoder.decode(body) for body in bodies]

    async def item(self, item_id: str, owner: str | None) -> Item | None:
        """The item of that id in any of the owner's conversations."""
        own = select(ConversationItemRow.body).join(ConversationRow).where(ConversationRow.owner == owner)
        async with self._database.session() as session:
            body = await session.scalar(own.where(ConversationItemRow.item_id == item_id).limit(1))
        return None if body is None else _item_decoder.decode(body)

    async def item_of(self, conversation_id: str, item_id: str, owner: str | None) -> Item:
        async with self._database.session() as session:
            await _find(session, conversation_id, owner)
            body = await session.scalar(select(ConversationItemRow.body).where(*_named(conversation_id, item_id)))
        if body is None:
            raise _no_item(conversation_id, item_id)
        return _item_decoder.decode(body)

    async def remove(self, conversation_id: str, item_id: str, owner: str | None) -> StoredConversation:
        async with self._database.transaction() as session:
            row = await _find(session, conversation_id, owner)
            found = await session.scalar(select(ConversationItemRow).where(*_named(conversation_id, item_id)))
            if found is None:
                raise _no_item(conversation_id, item_id)
            await session.delete(found)
        return _conversation(row)


async def append_items(session: AsyncSession, conversation_id: str, items: Sequence[Item]) -> list[Item]:
    """Put items at a conversation's end; an id that the conversation has already is replaced by a new one.

    Does nothing for a conversation that has been deleted meanwhile.
    """
    conversation = await session.get(ConversationRow, conversation_id, with_for_update=True)
    if conversation is None:
        return []
    conversation.used_at = int(time.time())
    ids = [item["id"] for item in items]
    known = await session.scalars(
        select(ConversationItemRow.item_id).where(
            ConversationItemRow.conversation_id == conversation_id, ConversationItemRow.item_id.in_(ids)
        )
    )
    taken = set(known)
    kept = []
    for item in items:
        fresh = item if item["id"] not in taken else item | {"id": new_id(item["id"].partition("_")[0])}
        taken.add(fresh["id"])
        kept.append(fresh)
        session.add(
            ConversationItemRow(conversation_id=conversation_id, item_id=fresh["id"], body=msgspec.json.encode(fresh))
        )
        await session.flush()  # numbers are given in this order
    return kept


def _named(conversation_id: str, item_id: str) -> tuple:
    return ConversationItemRow.conversation_id == conversation_id, ConversationItemRow.item_id == item_id


async def _find(
    session: AsyncSession, conversation_id: str, owner: str | None, *, to_change: bool = False
) -> ConversationRow:
    """With `to_change` others who change it, or its items, wait until the transaction ends."""
    row = await session.get(ConversationRow, conversation_id, with_for_update=to_change)
    if row is None or row.owner != owner:
        message = f"no conversation has the id {conversation_id!r}"
        raise APIError(404, message, param="conversation_id", code="conversation_not_found")
    return row


def _no_item(conversation_id: str, item_id: str) -> APIError:
    message = f"conversation {conversation_id!r} has no item {item_id!r}"
    return APIError(404, message, param="item_id", code="item_not_found")


def _conversation(row: ConversationRow) -> StoredConversation:
    return StoredConversation(row.id, row.created_at, _metadata_decoder.decode(row.attached))
