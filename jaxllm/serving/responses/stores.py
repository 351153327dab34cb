"""Stored responses, stored conversations, and the items of both."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, aliased, mapped_column

from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.responses.items import Item, new_id
from jaxllm.serving.responses.objects import RUNNING, STOPPED, Response, ResponseError, StoredConversation
from jaxllm.serving.store.database import Base, Database, Owned

LEASE_SECONDS = 60.0
"""A background response whose server has not said for so long that it still runs is failed."""

_item_decoder = msgspec.json.Decoder(Item)


class ResponseRow(Owned, Base):
    """A response as its JSON; `alive_until` (seconds since 1970) is the lease of one that is still running."""

    __tablename__ = "responses"

    id: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    status: Mapped[str] = mapped_column(sa.String(16))
    created_at: Mapped[int] = mapped_column(sa.BigInteger, index=True, server_default="0")
    previous_response_id: Mapped[str | None] = mapped_column(sa.String(64), index=True)
    body: Mapped[bytes] = mapped_column(sa.LargeBinary)
    events: Mapped[bytes | None] = mapped_column(sa.LargeBinary)
    """Its stream, of responses created with background and stream."""
    alive_until: Mapped[float | None] = mapped_column(sa.Float)


class ResponseItemRow(Base):
    """One item, which goes with its response: at the first positions those of the input, then those of the output."""

    __tablename__ = "response_items"

    response_id: Mapped[str] = mapped_column(sa.ForeignKey("responses.id", ondelete="CASCADE"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    item_id: Mapped[str] = mapped_column(sa.String(128), index=True)
    is_output: Mapped[bool]
    body: Mapped[bytes] = mapped_column(sa.LargeBinary)


class ResponseStore:
    """The stored responses; every method is one transaction. Responses of others than an `owner` are not there."""

    def __init__(self, database: Database):
        self._database = database

    async def begin(self, response: Response, input_items: Sequence[Item], owner: str | None) -> None:
        """Keep a background response that has yet to run."""
        async with self._database.transaction() as session:
            row = _row(response, owner)
            row.alive_until = time.time() + LEASE_SECONDS
            session.add(row)
            await session.flush()
            session.add_all(_item_rows(response.id, input_items, 0, is_output=False))

    async def finish(
        self, response: Response, input_items: Sequence[Item], owner: str | None, events: bytes | None = None
    ) -> None:
        """Keep a response that has ended, and its items, unless it was cancelled or deleted since it was begun."""
        output = msgspec.to_builtins(response.output)
        async with self._database.transaction() as session:
            if response.background:
                ended = (
                    sa.update(ResponseRow)
                    .where(ResponseRow.id == response.id, ResponseRow.status.in_(RUNNING))
                    .values(status=response.status, body=msgspec.json.encode(response), events=events, alive_until=None)
                )
                if await session.scalar(ended.returning(ResponseRow.id)) is None:
                    return
            elif response.store:
                session.add(_row(response, owner))
                await session.flush()
                session.add_all(_item_rows(response.id, input_items, 0, is_output=False))
            if response.store:
                session.add_all(_item_rows(response.id, output, len(input_items), is_output=True))
            if response.conversation is not None:
                await append_items(session, response.conversation.id, [*input_items, *output])

    async def get(self, response_id: str, owner: str | None) -> Response:
        """Raises 404 for an unknown id."""
        return msgspec.json.decode((await self._row(response_id, owner)).body, type=Response)

    async def events(self, response_id: str, owner: str | None) -> bytes | None:
        """The whole stream of a response that has ended. Raises 404 for an unknown id."""
        return (await self._row(response_id, owner)).events

    async def end(self, response_id: str, status: str, error: ResponseError | None = None) -> Response:
        """Give a response that still runs its last status; one that has ended stays as it is. Raises 404."""
        async with self._database.transaction() as session:
            row = await session.get(ResponseRow, response_id, with_for_update=True)
            if row is None:
                raise _not_found(response_id)
            response = msgspec.json.decode(row.body, type=Response)
            if row.status in RUNNING:
                response = msgspec.structs.replace(response, status=status, error=error)
                row.status, row.body, row.alive_until = status, msgspec.json.encode(response), None
        return response

    async def delete(self, response_id: str, owner: str | None) -> None:
        """Raises 404 for an unknown id."""
        async with self._database.transaction() as session:
            await session.delete(await _find_response(session, response_id, owner))

    async def delete_before(self, time_of: int, most: int) -> int:
        """Forget up to `most` responses made before that time that neither run nor are continued; returns how many."""
        later = aliased(ResponseRow)
        old = sa.select(ResponseRow.id).where(
            ResponseRow.created_at < time_of,
            sa.or_(ResponseRow.status.not_in(RUNNING), ResponseRow.alive_until < time.time()),
            ~sa.exists().where(later.previous_response_id == ResponseRow.id),
        )
        async with self._database.transaction() as session:
            ids = (await session.scalars(old.limit(most))).all()
            await session.execute(sa.delete(ResponseRow).where(ResponseRow.id.in_(ids)))
        return len(ids)

    async def renew(self, response_ids: Iterable[str]) -> set[str]:
        """Extend the leases of responses that run here; returns those that have been ended or deleted elsewhere."""
        wanted = set(response_ids)
        running = ResponseRow.id.in_(wanted) & ResponseRow.status.in_(RUNNING)
        async with self._database.transaction() as session:
            await session.execute(sa.update(ResponseRow).where(running).values(alive_until=time.time() + LEASE_SECONDS))
            return wanted - set(await session.scalars(sa.select(ResponseRow.id).where(running)))

    async def input_items(self, response_id: str, owner: str | None) -> list[Item]:
        """The items of the responses that it continues, back to one that was deleted, and its own. Raises 404."""
        items, _ = await self._items(response_id, owner)
        return [item for item, own_output in items if not own_output]

    async def history(self, response_id: str, owner: str | None) -> list[Item]:
        """A response and all before it, for one that continues it. Raises 404, or 400 where it cannot be continued."""
        response = await self.get(response_id, owner)
        if response.status in RUNNING:
            message = f"previous_response_id is {response_id!r}, which is still {response.status}"
            raise APIError(400, message, param="previous_response_id", code="response_not_complete")
        items, missing = await self._items(response_id, owner)
        if missing is not None:
            message = f"previous_response_id is {response_id!r}, which goes back to {missing!r}, which has been deleted"
            raise APIError(400, message, param="previous_response_id", code="previous_response_not_found")
        return [item for item, _ in items]

    async def item(self, item_id: str, owner: str | None) -> Item | None:
        """The latest stored item of that id."""
        own = sa.select(ResponseItemRow.body).join(ResponseRow).where(ResponseRow.owner == owner)
        async with self._database.session() as session:
            found = await session.scalar(own.where(ResponseItemRow.item_id == item_id).limit(1))
        return None if found is None else _item_decoder.decode(found)

    async def _items(self, response_id: str, owner: str | None) -> tuple[list[tuple[Item, bool]], str | None]:
        """All items, oldest first, true for the response's own output; and the deleted id where the chain breaks."""
        own = ResponseRow.id == response_id, ResponseRow.owner == owner
        chain = sa.select(ResponseRow.id, ResponseRow.previous_response_id).where(*own).cte("chain", recursive=True)
        earlier = aliased(ResponseRow)
        links = sa.select(earlier.id, earlier.previous_response_id)
        chain = chain.union(links.where(earlier.id == chain.c.previous_response_id))
        async with self._database.session() as session:
            previous = {row.id: row.previous_response_id for row in await session.execute(sa.select(chain))}
            rows = await session.scalars(
                sa.select(ResponseItemRow)
                .where(ResponseItemRow.response_id.in_(sa.select(chain.c.id)))
                .order_by(ResponseItemRow.position)
            )
            by_response: dict[str, list[ResponseItemRow]] = {}
            for row in rows:
                by_response.setdefault(row.response_id, []).append(row)
        if response_id not in previous:
            raise _not_found(response_id)
        newest_first: list[str] = []
        link: str | None = response_id
        while link is not None and link in previous:
            newest_first.append(link)
            link = previous[link]
        items = [
            (_item_decoder.decode(row.body), row.is_output and link_id == response_id)
            for link_id in reversed(newest_first)
            for row in by_response.get(link_id, ())
        ]
        return items, link

    async def _row(self, response_id: str, owner: str | None) -> ResponseRow:
        async with self._database.session() as session:
            row = await _find_response(session, response_id, owner)
        if row.status in RUNNING and (row.alive_until or 0) < time.time():
            await self.end(response_id, "failed", STOPPED)
            return await self._row(response_id, owner)
        return row


async def _find_response(session: AsyncSession, response_id: str, owner: str | None) -> ResponseRow:
    row = await session.get(ResponseRow, response_id)
    if row is None or row.owner != owner:
        raise _not_found(response_id)
    return row


def _not_found(response_id: str) -> APIError:
    return APIError(404, f"no response has the id {response_id!r}", param="response_id", code="response_not_found")


def _row(response: Response, owner: str | None) -> ResponseRow:
    return ResponseRow(
        id=response.id,
        owner=owner,
        status=response.status,
        created_at=response.created_at,
        previous_response_id=response.previous_response_id,
        body=msgspec.json.encode(response),
    )


def _item_rows(response_id: str, items: Sequence[Item], position: int, *, is_output: bool) -> Iterable[ResponseItemRow]:
    for at, item in enumerate(items, position):
        yield ResponseItemRow(
            response_id=response_id,
            position=at,
            item_id=item["id"],
            is_output=is_output,
            body=msgspec.json.encode(item),
        )


class ConversationRow(Owned, Base):
    __tablename__ = "conversations"

    id: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    created_at: Mapped[int]
    used_at: Mapped[int] = mapped_column(sa.BigInteger, index=True, server_default="0")
    """When it was made, changed, or given its last item."""
    attached: Mapped[bytes] = mapped_column(sa.LargeBinary)
    """The metadata, as JSON."""


class ConversationItemRow(Base):
    """One item, which goes with its conversation; `number` is their order."""

    __tablename__ = "conversation_items"
    __table_args__ = (sa.UniqueConstraint("conversation_id", "item_id"),)

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    conversation_id: Mapped[str] = mapped_column(sa.ForeignKey("conversations.id", ondelete="CASCADE"), index=True)
    item_id: Mapped[str] = mapped_column(sa.String(128), index=True)
    body: Mapped[bytes] = mapped_column(sa.LargeBinary)


class ConversationStore:
    """The stored conversations of an `owner`; every method is one transaction and raises 404 for an unknown id."""

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
            await session.delete(await _find(session, conversation_id, owner, to_change=True))

    async def delete_before(self, time_of: int, most: int) -> int:
        """Forget up to `most` conversations that were last used before that time; how many there were."""
        async with self._database.transaction() as session:
            old = sa.select(ConversationRow.id).where(ConversationRow.used_at < time_of).limit(most).with_for_update()
            ids = (await session.scalars(old)).all()
            await session.execute(sa.delete(ConversationRow).where(ConversationRow.id.in_(ids)))
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
                sa.select(ConversationItemRow.body)
                .where(ConversationItemRow.conversation_id == conversation_id)
                .order_by(ConversationItemRow.number)
            )
            return [_item_decoder.decode(body) for body in bodies]

    async def item(self, item_id: str, owner: str | None) -> Item | None:
        """The item of that id in any of the owner's conversations."""
        own = sa.select(ConversationItemRow.body).join(ConversationRow).where(ConversationRow.owner == owner)
        async with self._database.session() as session:
            body = await session.scalar(own.where(ConversationItemRow.item_id == item_id).limit(1))
        return None if body is None else _item_decoder.decode(body)

    async def item_of(self, conversation_id: str, item_id: str, owner: str | None) -> Item:
        async with self._database.session() as session:
            await _find(session, conversation_id, owner)
            return _item_decoder.decode((await _find_item(session, conversation_id, item_id)).body)

    async def remove(self, conversation_id: str, item_id: str, owner: str | None) -> StoredConversation:
        async with self._database.transaction() as session:
            row = await _find(session, conversation_id, owner)
            await session.delete(await _find_item(session, conversation_id, item_id))
        return _conversation(row)


async def append_items(session: AsyncSession, conversation_id: str, items: Sequence[Item]) -> list[Item]:
    """Put items at a conversation's end, unless it is deleted; an id that it has already is replaced by a new one."""
    conversation = await session.get(ConversationRow, conversation_id, with_for_update=True)
    if conversation is None:
        return []
    conversation.used_at = int(time.time())
    ids = [item["id"] for item in items]
    of, named = ConversationItemRow.conversation_id == conversation_id, ConversationItemRow.item_id.in_(ids)
    taken = set(await session.scalars(sa.select(ConversationItemRow.item_id).where(of, named)))
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


async def _find(
    session: AsyncSession, conversation_id: str, owner: str | None, *, to_change: bool = False
) -> ConversationRow:
    """With `to_change` others who change it, or its items, wait until the transaction ends."""
    row = await session.get(ConversationRow, conversation_id, with_for_update=to_change)
    if row is None or row.owner != owner:
        message = f"no conversation has the id {conversation_id!r}"
        raise APIError(404, message, param="conversation_id", code="conversation_not_found")
    return row


async def _find_item(session: AsyncSession, conversation_id: str, item_id: str) -> ConversationItemRow:
    of, named = ConversationItemRow.conversation_id == conversation_id, ConversationItemRow.item_id == item_id
    row = await session.scalar(sa.select(ConversationItemRow).where(of, named))
    if row is None:
        message = f"conversation {conversation_id!r} has no item {item_id!r}"
        raise APIError(404, message, param="item_id", code="item_not_found")
    return row


def _conversation(row: ConversationRow) -> StoredConversation:
    return StoredConversation(row.id, row.created_at, msgspec.json.decode(row.attached, type=dict[str, str]))
