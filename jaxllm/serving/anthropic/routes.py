"""/messages and /messages/count_tokens: Anthropic's API"""

from __future__ import annotations

import dataclasses
from typing import get_args

from fastapi import APIRouter, Request, Response

from jaxllm.serving.anthropic.errors import AnthropicRoute
from jaxllm.serving.anthropic.message import MessageWriter
from jaxllm.serving.anthropic.request import CountTokensRequest, MessagesRequest
from jaxllm.serving.anthropic.response import AnthropicErrorResponse, AnthropicMessage, StreamEvent, TokenCount
from jaxllm.serving.anthropic.translate import chat_request
from jaxllm.serving.chat import ChatTurn, begin_chat
from jaxllm.serving.http.json_response import json_response
from jaxllm.serving.http.openapi import returns
from jaxllm.serving.http.streaming import EventStream, until_disconnect
from jaxllm.serving.prompts import render_chat
from jaxllm.serving.state import ServerState

router = APIRouter(route_class=AnthropicRoute, tags=["anthropic"])


@router.post(
    "/messages", responses=returns(AnthropicMessage, events=get_args(StreamEvent), error=AnthropicErrorResponse)
)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Continue a conversation, as Anthropic's Messages API does."""
    state: ServerState = request.app.state.server
    turn = await begin_chat(state, chat_request(body), kind="msg")
    writer = MessageWriter(turn, body, cut_by_context=bound_tokens(turn, body.max_tokens))
    headers = {"request-id": turn.generation.id}
    if body.stream:
        return EventStream(turn.generation, writer, state.config.sse_keep_alive, headers)
    async with turn.generation:
        await until_disconnect(request.receive, write_all(turn, writer))
    return json_response(writer.message(), request_id=turn.generation.id, headers=headers)


@router.post("/messages/count_tokens", responses=returns(TokenCount, error=AnthropicErrorResponse))
async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
    """How many tokens the prompt of a message has, exactly."""
    state: ServerState = request.app.state.server
    state.resolve_model(body.model)
    rendered = await state.offload(render_chat, state, chat_request(body))
    return json_response(TokenCount(len(rendered.token_ids)))


def bound_tokens(turn: ChatTurn, max_tokens: int) -> bool:
    """Limit the answer to `max_tokens`; True when the context has room for fewer."""
    prompt = turn.generation.prompts[0]
    room = prompt.params.max_tokens
    assert room is not None
    prompt.params = dataclasses.replace(prompt.params, max_tokens=min(max_tokens, room))
    return max_tokens > room


async def write_all(turn: ChatTurn, writer: MessageWriter) -> None:
    """Run an answer that nobody streams to its end."""
    async for events in turn.generation.batches():
        for index, delta in events:
            for _ in writer.chunks(index, delta):
                pass
