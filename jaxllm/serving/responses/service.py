"""What the responses routes do: settle the context, begin a run, hand out what is stored."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from typing import Any

from msgspec import UNSET

from jaxllm.chat.conversation import naming
from jaxllm.chat.prompt import render
from jaxllm.errors import InvalidRequestError
from jaxllm.serving.call import ClientCall
from jaxllm.serving.http.answers import ignored_fields
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.mcp import injected_tools
from jaxllm.serving.responses.any_item import ItemReference
from jaxllm.serving.responses.approvals import approved_calls
from jaxllm.serving.responses.background import BackgroundRuns
from jaxllm.serving.responses.conversation_store import ConversationStore
from jaxllm.serving.responses.items import Item, MessageItem, new_id
from jaxllm.serving.responses.mcp_request import McpTool
from jaxllm.serving.responses.objects import ConversationReference, Response
from jaxllm.serving.responses.offers import as_functions, check_choice, make_offer
from jaxllm.serving.responses.replies import Replies
from jaxllm.serving.responses.request import PromptFields, ResponseRequest
from jaxllm.serving.responses.response_store import ResponseStore
from jaxllm.serving.responses.run import ResponseRun
from jaxllm.serving.responses.tool_loop import ResponseLoop
from jaxllm.serving.responses.toolbox import Toolbox
from jaxllm.serving.responses.translate import Translation
from jaxllm.serving.responses.writer import EventWriter
from jaxllm.serving.served_model import ServedModel
from jaxllm.serving.state import ServerState
from jaxllm.serving.store.database import Database


class Responses:
    """One server's responses and conversations."""

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
        writer = EventWriter(
            _response(body, replies),
            summarizes=body.summarizes,
            logprobs_count=body.logprobs_count,
            shows_timings=body.timings_per_token,
            token_bytes=replies.model.token_bytes,
            find_tool=toolbox.find,
        )
        loop = ResponseLoop(
            body,
            replies,
            toolbox,
            writer,
            approved=approved,
            listed=_listed(context),
            most_calls=self._state.config.mcp_max_calls,
        )
        return ResponseRun(loop, call, writer, own, self.store, keeps_events=body.background and body.stream)

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
            rendered = await self._state.prepare(render, model, translation.conversation())
        return len(rendered.token_ids)

    async def _toolbox(self, body: PromptFields, model: ServedModel) -> Toolbox:
        """The request's tools, settled: without any, those of the configured servers, as functions."""
        if "tools" not in body.model_fields_set:
            body.tools = list(as_functions(await injected_tools(self._state, model)))
        check_choice(body)
        wanted = {at: tool for at, tool in enumerate(body.tools) if isinstance(tool, McpTool)}
        return Toolbox(self._state, model, wanted, body.function_names)

    async def _context(self, body: PromptFields, owner: str | None) -> tuple[list[Item], list[Item]]:
        """All that the response is given, and the part of it that the request itself brings."""
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


def _listed(context: Sequence[Item]) -> Iterator[str]:
    """The servers whose tools are listed in the context."""
    for item in context:
        if item["type"] == "mcp_list_tools" and item["error"] is None:
            yield item["server_label"]


def _response(body: ResponseRequest, replies: Replies) -> Response:
    conversation = body.conversation_id
    return Response(
        id=new_id("resp"),
        created_at=int(time.time()),
        status="queued" if body.background else "in_progress",
        background=body.background,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=replies.model_name,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls,
        previous_response_id=body.previous_response_id,
        conversation=None if conversation is None else ConversationReference(conversation),
        prompt_cache_key=body.prompt_cache_key,
        reasoning=_reasoning(body),
        safety_identifier=body.safety_identifier,
        store=body.store,
        temperature=replies.params.temperature,
        text=_text(body),
        tool_choice=body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump(),
        tools=[tool.shown() if isinstance(tool, McpTool) else tool.model_dump() for tool in body.tools],
        top_logprobs=body.top_logprobs,
        top_p=replies.params.top_p,
        truncation=body.truncation,
        user=body.user,
        warnings=ignored_fields.get() or UNSET,
    )


def _reasoning(body: PromptFields) -> dict[str, Any]:
    config = body.reasoning
    if config is None:
        return {"effort": None, "summary": None}
    return {"effort": config.effort, "summary": config.summary or config.generate_summary}


def _text(body: PromptFields) -> dict[str, Any]:
    chosen = body.text.format if body.text is not None else None
    shown_format = {"type": "text"} if chosen is None else chosen.model_dump(by_alias=True)
    return {"format": shown_format, "verbosity": "medium"}
