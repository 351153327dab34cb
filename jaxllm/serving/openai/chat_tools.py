"""/chat/completions whose MCP tools the server runs: one completion of several answers, with results in between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import Request, Response
from msgspec import UNSET

from jaxllm.chat.conversation import Conversation, Tool
from jaxllm.chat.parsing.events import Content, Reasoning
from jaxllm.config.server import ServerConfig
from jaxllm.errors import Field
from jaxllm.serving.call import ClientCall, chunk_stream
from jaxllm.serving.generation import begin_reply
from jaxllm.serving.http.answers import ignored_fields, json_response
from jaxllm.serving.http.route import ChunkWriter, until_disconnect
from jaxllm.serving.mcp import Ended, Execution, Happening, ToolRun, asked_tools, injected_tools
from jaxllm.serving.openai.chat_request import ChatRequest
from jaxllm.serving.openai.chat_response import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatMessage,
    MCPCall,
    MCPCallDelta,
)
from jaxllm.serving.openai.usage import chunk_usage, stream_options, usage_object
from jaxllm.serving.served_model import ServedModel
from jaxllm.serving.state import ServerState


async def tools_for(state: ServerState, model: ServedModel, body: ChatRequest) -> list[Tool]:
    """The MCP servers' tools, for a request that asks for them, or says nothing of tools."""
    if body.mcp is not None:
        return await asked_tools(state, model, body.mcp.allowed_tools, Field("mcp"))
    return await injected_tools(state, model) if body.takes_tools else []


async def execute(
    call: ClientCall,
    body: ChatRequest,
    conversation: Conversation,
    request: Request,
    labels: dict[str, str],
) -> Response:
    """The answer, once the model calls no more tools; a client that goes away ends the tool that runs."""
    assert body.mcp is not None
    config = call.state.config
    settings = body.generation_settings()
    reply = await begin_reply(call, conversation, settings, prefix="chatcmpl-")
    execution = Execution(
        call,
        reply,
        conversation,
        settings,
        max_turns=min(config.mcp_max_turns, body.mcp.max_turns or config.mcp_max_turns),
        max_calls=min(config.mcp_max_calls, body.mcp.max_calls or config.mcp_max_calls),
    )
    if body.stream:
        writer = ExecutionWriter(execution, body, config)
        return await chunk_stream(call, execution, writer, labels)
    async with execution:
        choice = await until_disconnect(request.receive, _collected(execution, body))
    completion = ChatCompletion(
        id=execution.id,
        created=reply.generation.created,
        model=reply.name,
        system_fingerprint=reply.system_fingerprint,
        choices=[choice],
        usage=usage_object(execution.usage()),
        conversation_id=body.conversation_id or UNSET,
        resource_id=body.resource_id or UNSET,
    )
    return json_response(completion, request_id=execution.id, headers=labels)


async def _collected(execution: Execution, body: ChatRequest) -> ChatChoice:
    content, reasoning = "", ""
    calls: dict[int, MCPCall] = {}
    ended = Ended("abort")
    async for happenings in execution.arrivals():
        for _, happening in happenings:
            match happening:
                case Content(text=text):
                    content += text
                case Reasoning(text=text):
                    reasoning += text
                case ToolRun(index=index):
                    calls[index] = MCPCall(**_call(happening))
                case Ended():
                    ended = happening
    thought = reasoning if reasoning and body.include_reasoning else UNSET
    message = ChatMessage(
        content=content, reasoning=thought, reasoning_content=thought, mcp_calls=[calls[at] for at in sorted(calls)]
    )
    return ChatChoice(
        index=0, message=message, logprobs=None, finish_reason=ended.finish_reason, stop_reason=ended.stop_reason
    )


class ExecutionWriter(ChunkWriter[Happening]):
    """Chunks of the role, of texts as they come, of each call as it begins and as it ends, and of the end."""

    def __init__(self, execution: Execution, body: ChatRequest, config: ServerConfig):
        self._execution = execution
        self._body = body
        self._options = stream_options(body.stream_options, config)

    def first(self) -> Iterator[ChatCompletionChunk]:
        chunk = self._chunk(ChatDelta(role="assistant", content=""))
        chunk.warnings = ignored_fields.get() or UNSET
        yield chunk

    def chunks(self, index: int, delta: Happening) -> Iterator[ChatCompletionChunk]:
        match delta:
            case Content(text=text):
                yield self._chunk(ChatDelta(content=text))
            case Reasoning(text=text):
                if self._body.include_reasoning:
                    yield self._chunk(ChatDelta(reasoning=text, reasoning_content=text))
            case ToolRun():
                yield self._chunk(ChatDelta(mcp_calls=[MCPCallDelta(index=delta.index, **_call(delta))]))
            case Ended():
                chunk = self._chunk(ChatDelta())
                choice = chunk.choices[0]
                choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
                yield chunk

    def last(self) -> Iterator[ChatCompletionChunk]:
        if self._options.include_usage:
            chunk = self._chunk()
            chunk.usage = usage_object(self._execution.usage())
            yield chunk

    def _chunk(self, *deltas: ChatDelta) -> ChatCompletionChunk:
        reply = self._execution.first
        chunk = ChatCompletionChunk(
            id=self._execution.id,
            created=reply.generation.created,
            model=reply.name,
            system_fingerprint=reply.system_fingerprint,
            choices=[ChatChunkChoice(index=0, delta=delta) for delta in deltas],
        )
        chunk.usage = chunk_usage(self._options, self._execution.usage)
        return chunk


def _call(run: ToolRun) -> dict[str, Any]:
    return {
        "id": run.call.id,
        "name": run.call.name,
        "server_label": run.server,
        "arguments": run.call.arguments,
        "status": run.status,
        "output": None if run.result is None else run.result.text,
        "error": None if run.result is None else run.result.error,
    }
