"""/messages and /messages/count_tokens: Anthropic's API, and its requests as conversations"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import get_args

import msgspec
from fastapi import APIRouter, Request, Response

from jaxllm.chat import conversation as chat
from jaxllm.chat.conversation import Call, Conversation, Message, NamedTool, Rendering, Tool, ToolChoice, naming
from jaxllm.chat.pictures import Part
from jaxllm.chat.prompt import render
from jaxllm.requests.structured_outputs import StructuredOutputs
from jaxllm.serving.anthropic import message as answers
from jaxllm.serving.anthropic import request as bodies
from jaxllm.serving.anthropic.blocks import (
    ImageBlockParam,
    TextBlockParam,
    ThinkingBlockParam,
    ToolReferenceParam,
    ToolResultBlockParam,
    ToolUseBlockParam,
    Turn,
    template_call_id,
)
from jaxllm.serving.anthropic.context import ClearToolUses
from jaxllm.serving.call import ClientCall, chunk_stream, open_call
from jaxllm.serving.generation import Generation, GenerationSettings, begin_reply
from jaxllm.serving.http.answers import json_response, left_out, returns
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.middleware import ID_HEADER
from jaxllm.serving.http.route import JSONRoute, bearer_key, until_disconnect

logger = logging.getLogger(__name__)


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
        request_id = new_request_id()
        body = msgspec.json.encode(answers.error_response(error, request_id))
        headers = {**(error.headers or {}), "request-id": request_id, ID_HEADER: request_id}
        return Response(body, answers.status_of(error), headers, media_type="application/json")


def new_request_id() -> str:
    return f"req_{uuid.uuid4().hex}"


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
        asked, applied = await edited(call, body)
        reply = await begin_reply(call, asked, generation_settings(body), prefix="msg_")
    writer = answers.MessageWriter(reply, body, applied)
    headers = {"request-id": reply.generation.id, **left_out(body.left_out)}
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
        asked, _ = await edited(call, body)
        count = answers.TokenCount(await length(call, asked))
        if body.context_management is not None:
            count.context_management = answers.OriginalTokens(await length(call, conversation(body)))
    request_id = new_request_id()
    return json_response(count, request_id=request_id, headers={"request-id": request_id, **left_out(body.left_out)})


async def edited(
    call: ClientCall, body: bodies.CountTokensRequest
) -> tuple[Conversation, list[answers.AppliedEdit] | None]:
    """The conversation after context_management, and what that took out; None where it was not asked for."""
    turns = body.turns
    asked = conversation(body, turns)
    if body.context_management is None:
        return asked, None
    applied: list[answers.AppliedEdit] = []
    tokens: int | None = None
    for edit in body.context_management.edits:
        fewer, number = edit.applied(turns)
        if not number:
            continue
        if tokens is None:
            tokens = await length(call, asked)
        if isinstance(edit, ClearToolUses) and not edit.is_due(tokens, turns):
            continue
        smaller = conversation(body, fewer)
        left = await length(call, smaller)
        gone = max(tokens - left, 0)
        if isinstance(edit, ClearToolUses):
            if edit.clear_at_least is not None and gone < edit.clear_at_least.value:
                continue
            applied.append(answers.ClearedToolUses(cleared_tool_uses=number, cleared_input_tokens=gone))
        else:
            applied.append(answers.ClearedThinking(cleared_thinking_turns=number, cleared_input_tokens=gone))
        turns, asked, tokens = fewer, smaller, left
    return asked, applied


async def length(call: ClientCall, conversation: Conversation) -> int:
    """The tokens of its prompt."""
    rendered = await call.prepare(render, conversation, may_be_cut=True)
    return len(rendered.token_ids)


async def write_all(generation: Generation, writer: answers.MessageWriter) -> None:
    """Run an answer that is not streamed to its end."""
    async for events in generation.arrivals():
        for index, delta in events:
            for _ in writer.chunks(index, delta):
                pass


ERROR_PREFIX = "Error: "

FIELD_NAMES = chat.renaming({"structured_outputs": "output_config.format", "stop": "stop_sequences"})
"""The names that the fields of a Conversation and its GenerationSettings have here."""


def conversation(body: bodies.CountTokensRequest, turns: Sequence[Turn] | None = None) -> Conversation:
    """Of the body, or of other turns in place of its own. Raises InvalidRequestError: see FIELD_NAMES."""
    turns = body.turns if turns is None else turns
    choice, config, thinking = body.tool_choice, body.output_config or bodies.OutputConfig(), body.thinking
    tools = body.offered(turns)
    thinks = None if thinking is None else not isinstance(thinking, bodies.ThinkingDisabled)
    budget = thinking.budget_tokens if isinstance(thinking, bodies.ThinkingEnabled) else None
    schema = None if config.format is None else json.dumps(config.format.schema_)
    return Conversation(
        messages=messages(body.system, turns, {tool.name: tool for tool in tools if not tool.in_prompt}),
        tools=[] if isinstance(choice, bodies.ToolChoiceNone) else tools,
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=isinstance(choice, bodies.ToolChoiceNone | None) or not choice.disable_parallel_tool_use,
        rendering=Rendering(
            variables=chat.thinking_variables(thinks, body.effort, budget),
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
    )


BILLING = "x-anthropic-billing-header"
"""How a line begins that Claude Code puts first: it differs in each request, so no prefix would be found again."""


def messages(
    system: str | Sequence[TextBlockParam] | None, turns: Sequence[Turn], deferred: Mapping[str, Tool] | None = None
) -> list[Message]:
    """The system prompt first; each tool_result is a message of its own, and defines the `deferred` tools it names."""
    found = []
    texts = [system or ""] if isinstance(system, str | None) else [block.text for block in system]
    if text := "\n".join(_without_billing(text) for text in texts if _without_billing(text)):
        found.append(Message("system", text))
    for turn in turns:
        if turn.role == "assistant":
            text = "\n".join(block.text for block in turn.of(TextBlockParam))
            thoughts = [block.thinking for block in turn.of(ThinkingBlockParam)]
            reasoning = "\n".join(thoughts) if any(thoughts) else None
            calls = [Call(template_call_id(use.id), use.name, use.input) for use in turn.of(ToolUseBlockParam)]
            found.append(Message("assistant", text, reasoning=reasoning, calls=calls))
            continue
        found += [_result(block, deferred or {}) for block in turn.of(ToolResultBlockParam)]
        said = [block for block in turn.blocks if isinstance(block, TextBlockParam | ImageBlockParam)]
        if said:
            role = "user" if turn.role == "user" else "system"
            found.append(Message.of(role, [_part(block, {}) for block in said]))
    return found


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING) else text


def _result(block: ToolResultBlockParam, deferred: Mapping[str, Tool]) -> Message:
    content = block.content or ""
    parts = [content] if isinstance(content, str) else [_part(part, deferred) for part in content]
    if block.is_error:
        first = parts[0] if parts and isinstance(parts[0], str) else None
        parts = [ERROR_PREFIX + (first or ""), *parts[first is not None :]]
    return Message.of("tool", parts, call_id=template_call_id(block.tool_use_id))


def _part(part: TextBlockParam | ImageBlockParam | ToolReferenceParam, deferred: Mapping[str, Tool]) -> Part:
    if isinstance(part, TextBlockParam | ImageBlockParam):
        return part.text if isinstance(part, TextBlockParam) else part.picture
    if part.tool_name not in deferred:
        return f"Tool {part.tool_name}"
    return json.dumps(deferred[part.tool_name].for_template()["function"], ensure_ascii=False)


def _tool_choice(choice: bodies.ToolChoiceParam | None) -> ToolChoice:
    match choice:
        case bodies.ToolChoiceTool(name=name):
            return NamedTool(name)
        case bodies.ToolChoiceAuto(type="any"):
            return "required"
        case _:
            return "auto"
