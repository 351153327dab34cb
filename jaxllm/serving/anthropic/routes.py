"""/messages and /messages/count_tokens: Anthropic's API"""

from __future__ import annotations

from typing import get_args

import msgspec
from fastapi import APIRouter, Request, Response

from jaxllm.chat.conversation import naming
from jaxllm.chat.prompt import render
from jaxllm.serving.anthropic.message import (
    AnthropicErrorResponse,
    AnthropicMessage,
    MessageStreamEvent,
    MessageWriter,
    TokenCount,
    error_response,
    status_of,
)
from jaxllm.serving.anthropic.request import CountTokensRequest, MessagesRequest
from jaxllm.serving.anthropic.translate import FIELD_NAMES, conversation, generation_settings
from jaxllm.serving.call import open_call
from jaxllm.serving.chunks import chunk_stream
from jaxllm.serving.generation import Generation
from jaxllm.serving.http.answers import json_response, returns
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.route import JSONRoute, bearer_key
from jaxllm.serving.http.streaming import until_disconnect
from jaxllm.serving.reply import begin_reply
from jaxllm.serving.state import ServerState


class AnthropicRoute(JSONRoute):
    """A route that also takes its key as x-api-key, and whose errors have Anthropic's shape."""

    @staticmethod
    def sent_key(request: Request) -> str:
        return request.headers.get("x-api-key") or bearer_key(request)

    @staticmethod
    def error_event(body: bytes) -> bytes:
        return b"event: error\ndata: " + body + b"\n\n"

    @staticmethod
    def error_response(error: APIError) -> Response:
        body = msgspec.json.encode(error_response(error))
        return Response(body, status_of(error), error.headers, media_type="application/json")


router = APIRouter(route_class=AnthropicRoute, tags=["anthropic"])


@router.post(
    "/messages", responses=returns(AnthropicMessage, events=get_args(MessageStreamEvent), error=AnthropicErrorResponse)
)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Continue a conversation, as Anthropic's Messages API does."""
    call = await open_call(request, body.model, keep_alive=body.keep_alive, stream=body.stream)
    with naming(FIELD_NAMES):
        reply = await begin_reply(call, conversation(body), generation_settings(body), prefix="msg_")
    writer = MessageWriter(reply, body)
    headers = {"request-id": reply.generation.id}
    if body.stream:
        return await chunk_stream(call, reply.generation, writer, headers)
    async with reply.generation:
        await until_disconnect(request.receive, write_all(reply.generation, writer))
    return json_response(writer.message(), request_id=reply.generation.id, headers=headers)


@router.post("/messages/count_tokens", responses=returns(TokenCount, error=AnthropicErrorResponse))
async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
    """How many tokens the prompt of a message has, exactly."""
    state: ServerState = request.app.state.server
    model = (await open_call(request, body.model)).model
    with naming(FIELD_NAMES):
        rendered = await state.prepare(render, model, conversation(body), may_be_cut=True)
    return json_response(TokenCount(len(rendered.token_ids)))


async def write_all(generation: Generation, writer: MessageWriter) -> None:
    """Run an answer that nobody streams to its end."""
    async for events in generation.arrivals():
        for index, delta in events:
            for _ in writer.chunks(index, delta):
                pass
