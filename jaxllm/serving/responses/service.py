"""The responses and conversations of a server: context settled, runs begun and kept going, and what is stored."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, suppress

from msgspec import UNSET
from sqlalchemy.exc import SQLAlchemyError

from jaxllm.chat.conversation import naming
from jaxllm.chat.prompt import render
from jaxllm.errors import InvalidRequestError, StorageFullError
from jaxllm.serving.call import ClientCall
from jaxllm.serving.http.answers import ignored_fields
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.mcp import injected_tools
from jaxllm.serving.responses import objects
from jaxllm.serving.responses.items import CLEAR, Item, ItemReference, MessageItem, new_id
from jaxllm.serving.responses.request import CompactRequest, PromptFields, ReasoningConfig, ResponseRequest
from jaxllm.serving.responses.run import Replies, ResponseRun
from jaxllm.serving.responses.stores import LEASE_SECONDS, ConversationStore, ResponseStore
from jaxllm.serving.responses.toolbox import Toolbox, approved_calls, check_choice, make_offer
from jaxllm.serving.responses.tools import FunctionTool, McpTool
from jaxllm.serving.responses.translate import Translation
from jaxllm.serving.responses.writer import EventWriter
from jaxllm.serving.served_model import ServedModel, stopped
from jaxllm.serving.state import ServerState
from jaxllm.serving.store.database import Database

logger = logging.getLogger(__name__)

COMPACT = (
    "Write a summary of this conversation for whoever goes on with it: what was asked for, done and found, the files "
    "and names that matter, what is left to do. Write nothing else."
)
COMPACT_TOKENS = 2048
"""The most that a summary has."""

STOPPING_SECONDS = 3.0
"""The time that aborted runs get to be stored when the server stops."""


class BackgroundRun:
    """One response running as a task of its own; any number of streams may follow it."""

    def __init__(self, run: ResponseRun, stack: AsyncExitStack):
        self.run = run
        self._changed = asyncio.Event()
        self.task = asyncio.create_task(self._drive(stack))

    async def follow(self, starting_after: int, keep_alive: float) -> AsyncIterator[list[bytes]]:
        """The events after number `starting_after`; an empty list after `keep_alive` seconds of silence."""
        position = starting_after + 1
        while True:
            changed = self._changed
            events = self.run.sent[position:]
            if events:
                position += len(events)
                yield events
            elif self.task.done():
                return
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(keep_alive):
                        await changed.wait()
                        continue
                yield []

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})

    async def _drive(self, stack: AsyncExitStack) -> None:
        try:
            async with stack:
                async for _ in self.run.events():
                    self._tell()
        except Exception:
            logger.exception("%s could not be stored", self.run.response.id)
        finally:
            asyncio.get_running_loop().call_soon(self._tell)  # when this task is done

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class BackgroundRuns:
    """The responses that run in the background of this server, by their ids."""

    def __init__(self, store: ResponseStore):
        self._store = store
        self._active: dict[str, BackgroundRun] = {}
        self._renewing: asyncio.Task[None] | None = None

    async def start(self, run: ResponseRun) -> BackgroundRun:
        """Store the response and let it run. Raises what the engine says at once, such as QueueFullError."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(run.replies.call.again())
            await stack.enter_async_context(run)
            await self._store.begin(run.response, run.replies.own, run.replies.call.tenant.name)
            active = BackgroundRun(run, stack.pop_all())
        response_id = run.response.id
        self._active[response_id] = active
        active.task.add_done_callback(lambda _: self._active.pop(response_id, None))
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew())
        return active

    def get(self, response_id: str, owner: str | None) -> BackgroundRun | None:
        """One that runs here and is the owner's."""
        active = self._active.get(response_id)
        return None if active is None or active.run.replies.call.tenant.name != owner else active

    async def cancel(self, response_id: str) -> objects.Response:
        """Stop the response wherever it runs, whoever owns it. Raises 404 for an unknown id."""
        response = await self._store.end(response_id, "cancelled")
        await self._stop(response_id)
        return response

    async def delete(self, response_id: str, owner: str | None) -> None:
        """Stop and forget the response. Raises 404 for one that is not there, or not the owner's."""
        await self._store.delete(response_id, owner)
        await self._stop(response_id)

    async def close(self) -> None:
        """End every run as failed and wait until that is stored."""
        for active in self._active.values():
            active.run.abort(stopped())
        tasks = {active.task for active in self._active.values()}
        if tasks:
            await asyncio.wait(tasks, timeout=STOPPING_SECONDS)
        for response_id, active in list(self._active.items()):
            await active.stop()
            await self._store.end(response_id, "failed", objects.STOPPED)
        if self._renewing is not None:
            self._renewing.cancel()

    async def _stop(self, response_id: str) -> None:
        active = self._active.get(response_id)
        if active is not None:
            await active.stop()

    async def _renew(self) -> None:
        """Say that the runs are alive, and stop those that another server was asked to cancel or delete."""
        while self._active:
            await asyncio.sleep(LEASE_SECONDS / 3)
            try:
                ended = await self._store.renew(list(self._active))
            except (SQLAlchemyError, StorageFullError):
                logger.exception("the leases of background responses could not be renewed")
                continue
            for response_id in ended:
                await self._stop(response_id)


class Responses:
    def __init__(self, state: ServerState, database: Database):
        self._state = state
        self.store = ResponseStore(database)
        self.conversations = ConversationStore(database)
        self.background = BackgroundRuns(self.store)

    async def prepare(self, body: ResponseRequest, call: ClientCall) -> ResponseRun:
        """A run that has yet to be entered. Raises APIError or InvalidRequestError naming the field."""
        toolbox = await self._toolbox(body, call.model)
        context, own = await self._context(body, call.tenant.name)
        approved = approved_calls(context, own, body.server_labels.values())
        replies = Replies(call, body, context, own)
        writer = EventWriter(_response(body, replies), body, call.model.token_bytes, toolbox.by_name)
        most_calls = self._state.config.mcp_max_calls
        return ResponseRun(replies, toolbox, writer, self.store, approved=approved, most_calls=most_calls)

    async def count_tokens(self, body: PromptFields, call: ClientCall) -> int:
        """Tokens of the prompt that a response would have. Raises APIError or InvalidRequestError naming the field."""
        model = call.model
        toolbox = await self._toolbox(body, model)
        context, own = await self._context(body, call.tenant.name)
        async with aclosing(toolbox):
            await toolbox.open()
            offer = make_offer(body, toolbox, forces=True, runs=True)
        translation = Translation(body, context, own, offer, list(model.special_tokens))
        with naming(translation.name):
            rendered = await call.prepare(render, translation.conversation())
        return len(rendered.token_ids)

    async def compact(self, body: CompactRequest, call: ClientCall) -> ResponseRun:
        """A run that has yet to be entered, whose text is a summary of the context. Raises as `prepare`."""
        context, _ = await self._context(body, call.tenant.name)
        asked = ResponseRequest(
            input=COMPACT,
            instructions=body.instructions,
            max_output_tokens=COMPACT_TOKENS,
            reasoning=ReasoningConfig(effort="none"),
            store=False,
            truncation="auto",
        )
        replies = Replies(call, asked, [*context, MessageItem(role="user", content=COMPACT).item()], context)
        writer = EventWriter(_response(asked, replies), asked, call.model.token_bytes, {})
        toolbox = Toolbox(self._state, call.model, asked)
        return ResponseRun(replies, toolbox, writer, self.store, approved=[], most_calls=0)

    async def _toolbox(self, body: PromptFields, model: ServedModel) -> Toolbox:
        if "tools" not in body.model_fields_set:
            body.tools = [
                FunctionTool(type="function", name=tool.name, description=tool.description, parameters=tool.parameters)
                for tool in await injected_tools(self._state, model)
            ]
        check_choice(body)
        return Toolbox(self._state, model, body)

    async def _context(self, body: PromptFields, owner: str | None) -> tuple[list[Item], list[Item]]:
        """The whole context of the response, and the part of it that the request itself brings."""
        history = await self._history(body, owner)
        own = await self._own_items(body, history, owner)
        if not history and not own:
            raise InvalidRequestError("input is empty, and so is what it continues", "input")
        return [*history, *own], own

    async def _history(self, body: PromptFields, owner: str | None) -> list[Item]:
        if body.previous_response_id is not None:
            try:
                return await self.store.history(body.previous_response_id, owner)
            except APIError as error:
                if error.status != 404:
                    raise
                message = f"previous_response_id is {body.previous_response_id!r}; no stored response has that id"
                raise APIError(400, message, param="previous_response_id", code="previous_response_not_found") from None
        if body.conversation_id is not None:
            return await self.conversations.items(body.conversation_id, owner)
        return []

    async def _own_items(self, body: PromptFields, history: Sequence[Item], owner: str | None) -> list[Item]:
        if isinstance(body.input, str):
            return [MessageItem(role="user", content=body.input).item()]
        known = {item["id"]: item for item in history}
        items = []
        for at, sent in enumerate(body.input or ()):
            item = await self._referred(sent, known, at, owner) if isinstance(sent, ItemReference) else sent.item()
            known[item["id"]] = item
            items.append(item)
        return items

    async def _referred(self, reference: ItemReference, known: dict[str, Item], at: int, owner: str | None) -> Item:
        found = known.get(reference.id) or await self.store.item(reference.id, owner)
        found = found or await self.conversations.item(reference.id, owner)
        if found is None:
            message = f"input[{at}].id is {reference.id!r}; no stored item has that id"
            raise APIError(404, message, param=f"input[{at}].id", code="item_not_found")
        return found


def compacted(run: ResponseRun) -> objects.CompactedResponse:
    """What users said in the context of a run of `Responses.compact`, and its summary of all of it."""
    response, context = run.response, run.replies.own
    texts = [part.text for item in response.output if isinstance(item, objects.OutputMessage) for part in item.content]
    summary = {"type": "compaction", "id": new_id("cmp"), "encrypted_content": CLEAR + "".join(texts)}
    kept = [item for item in context if item["type"] == "message" and item["role"] == "user"]
    assert response.usage is not None
    return objects.CompactedResponse(
        id=response.id,
        created_at=response.created_at,
        output=[objects.listed(item) for item in (*kept, summary)],
        usage=response.usage,
    )


_REPEATED = (
    "background", "instructions", "max_output_tokens", "max_tool_calls", "parallel_tool_calls", "previous_response_id",
    "prompt_cache_key", "safety_identifier", "store", "top_logprobs", "truncation", "user",
)  # fmt: skip
"""Fields of a request that the response repeats as they are."""


def _response(body: ResponseRequest, replies: Replies) -> objects.Response:
    conversation, reasoning = body.conversation_id, body.reasoning or ReasoningConfig()
    chosen = body.text.format if body.text is not None else None
    shown_format = {"type": "text"} if chosen is None else chosen.model_dump(by_alias=True)
    return objects.Response(
        **{name: getattr(body, name) for name in _REPEATED},
        id=new_id("resp"),
        created_at=int(time.time()),
        status="queued" if body.background else "in_progress",
        metadata=body.metadata or {},
        model=replies.call.name,
        output=[],
        conversation=None if conversation is None else objects.ConversationReference(conversation),
        reasoning={"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
        temperature=replies.params.temperature,
        text={"format": shown_format, "verbosity": (body.text and body.text.verbosity) or "medium"},
        tool_choice=body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump(),
        tools=[tool.shown() if isinstance(tool, McpTool) else tool.model_dump() for tool in body.tools],
        top_p=replies.params.top_p,
        warnings=ignored_fields.get() or UNSET,
    )
