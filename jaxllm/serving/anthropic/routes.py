"""/messages and /messages/count_tokens: Anthropic's API, and its requests as conversations"""

from __future__ import annotations

import json
from typing import get_args

import msgspec
from fastapi import APIRouter, Request, Response

from jaxllm.chat import conversation as chat
from jaxllm.chat.conversation import Call, Conversation, Message, NamedTool, Rendering, Tool, ToolChoice, naming
from jaxllm.chat.prompt import render
from jaxllm.errors import Field
from jaxllm.requests.structured_outputs import StructuredOutputs
from jaxllm.serving.anthropic import message as answers
from jaxllm.serving.anthropic import request as bodies
from jaxllm.serving.call import chunk_stream, open_call
from jaxllm.serving.generation import Generation, GenerationSettings, begin_reply
from jaxllm.serving.http.answers import json_response, returns
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.route import JSONRoute, bearer_key, until_disconnect


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
        body = msgspec.json.encode(answers.error_response(error))
        return Response(body, answers.status_of(error), error.headers, media_type="application/json")


router = APIRouter(route_class=AnthropicRoute, tags=["anthropic"])


@router.post(
    "/messages",
    responses=returns(
        answers.AnthropicMessage, events=get_args(answers.MessageStreamEvent), error=answers.AnthropicErrorResponse
    ),
)
async def create_message(body: bodies.MessagesRequest, request: Request) -> Response:
    """Continue a conversation, as Anthropic's Messages API does."""
    call = await open_call(request, body.model, keep_alive=body.keep_alive, stream=body.stream)
    with naming(FIELD_NAMES):
        reply = await begin_reply(call, conversation(body), generation_settings(body), prefix="msg_")
    writer = answers.MessageWriter(reply, body)
    headers = {"request-id": reply.generation.id}
    if body.stream:
        return await chunk_stream(call, reply.generation, writer, headers)
    async with reply.generation:
        await until_disconnect(request.receive, write_all(reply.generation, writer))
    return json_response(writer.message(), request_id=reply.generation.id, headers=headers)


@router.post("/messages/count_tokens", responses=returns(answers.TokenCount, error=answers.AnthropicErrorResponse))
async def count_tokens(body: bodies.CountTokensRequest, request: Request) -> Response:
    """The exact number of tokens in the prompt of a message."""
    call = await open_call(request, body.model)
    with naming(FIELD_NAMES):
        rendered = await call.state.prepare(render, call.model, conversation(body), may_be_cut=True)
    return json_response(answers.TokenCount(len(rendered.token_ids)))


async def write_all(generation: Generation, writer: answers.MessageWriter) -> None:
    """Run an answer that is not streamed to its end."""
    async for events in generation.arrivals():
        for index, delta in events:
            for _ in writer.chunks(index, delta):
                pass


ERROR_PREFIX = "Error: "

FIELD_NAMES = chat.renaming({"structured_outputs": "output_config.format", "stop": "stop_sequences"})
"""The names that the fields of a Conversation and its GenerationSettings have here."""


def conversation(body: bodies.CountTokensRequest) -> Conversation:
    """Raises InvalidRequestError: see FIELD_NAMES."""
    choice, config, thinking = body.tool_choice, body.output_config or bodies.OutputConfig(), body.thinking
    tools = [
        Tool(tool.name, tool.description, tool.input_schema, bool(tool.strict), Field("tools", at, "input_schema"))
        for at, tool in enumerate(body.tools or ())
    ]
    thinks = None if thinking is None else not isinstance(thinking, bodies.ThinkingDisabled)
    budget = thinking.budget_tokens if isinstance(thinking, bodies.ThinkingEnabled) else None
    schema = None if config.format is None else json.dumps(config.format.schema_)
    return Conversation(
        messages=messages(body),
        tools=[] if isinstance(choice, bodies.ToolChoiceNone) else tools,
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=isinstance(choice, bodies.ToolChoiceNone | None) or not choice.disable_parallel_tool_use,
        rendering=Rendering(
            variables=chat.thinking_variables(thinks, config.effort, budget),
            opens_answer=not body.continues_answer,
            continues_last=body.continues_answer,
        ),
        structured_outputs=None if schema is None else StructuredOutputs(json=schema),
    )


def generation_settings(body: bodies.MessagesRequest) -> GenerationSettings:
    asked = {
        "temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k, "stop": body.stop_sequences,
    }  # fmt: skip
    return GenerationSettings(
        sampling={name: value for name, value in asked.items() if value is not None},
        max_tokens=body.max_tokens,
        cut_to_context=True,
    )


def messages(body: bodies.CountTokensRequest) -> list[Message]:
    """The system prompt first; each tool_result is a message of its own."""
    found = []
    if body.system:
        texts = [body.system] if isinstance(body.system, str) else [block.text for block in body.system]
        found.append(Message("system", "\n".join(texts)))
    for turn in body.turns:
        texts = [block.text for block in turn.of(bodies.TextBlockParam)]
        text = "\n".join(texts)
        if turn.role == "assistant":
            thoughts = [block.thinking for block in turn.of(bodies.ThinkingBlockParam)]
            reasoning = "\n".join(thoughts) if any(thoughts) else None
            calls = [
                Call(answers.template_call_id(use.id), use.name, use.input) for use in turn.of(bodies.ToolUseBlockParam)
            ]
            found.append(Message("assistant", text, reasoning=reasoning, calls=calls))
            continue
        found += [_result(block) for block in turn.of(bodies.ToolResultBlockParam)]
        if texts:
            found.append(Message("user" if turn.role == "user" else "system", text))
    return found


def _result(block: bodies.ToolResultBlockParam) -> Message:
    texts = [part.text for part in block.content] if isinstance(block.content, list) else [block.content or ""]
    prefix = ERROR_PREFIX if block.is_error else ""
    return Message("tool", prefix + "\n".join(texts), call_id=answers.template_call_id(block.tool_use_id))


def _tool_choice(choice: bodies.ToolChoiceParam | None) -> ToolChoice:
    match choice:
        case bodies.ToolChoiceTool(name=name):
            return NamedTool(name)
        case bodies.ToolChoiceAuto(type="any"):
            return "required"
        case _:
            return "auto"
