"""/chat/completions: whole or streamed, and with MCP tools that the server runs between several answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from jaxllm.chat.conversation import Conversation, Tool, naming
from jaxllm.chat.events import Content, Event, Reasoning, ToolArguments, ToolCall
from jaxllm.chat.parser import Piece, Step
from jaxllm.chat.prompt import Rendered, render
from jaxllm.config.server import ServerConfig
from jaxllm.engine.messages import TokenDelta
from jaxllm.errors import Field
from jaxllm.requests.outputs import ParsedCall, WeightVersionSpan
from jaxllm.serving.call import ClientCall, chunk_stream, open_call
from jaxllm.serving.generation import Choice, Reply, Usage, begin_reply, collect_for, note_version
from jaxllm.serving.http.answers import DONE, ErrorResponse, json_response, returns
from jaxllm.serving.http.request_model import ignored_fields
from jaxllm.serving.http.route import ChunkWriter, Gaining, JSONRoute, until_disconnect
from jaxllm.serving.mcp import Ended, Execution, Happening, ToolRun, asked_tools, injected_tools
from jaxllm.serving.openai import answers, chat_types
from jaxllm.serving.openai.chat_types import (
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatRequest,
)
from jaxllm.serving.openai.kv_transfer import kv_transfer_answer
from jaxllm.serving.openai.sampling import chunk_usage, stream_options, usage_object
from jaxllm.serving.served_model import ServedModel
from jaxllm.serving.state import ServerState

router = APIRouter(route_class=JSONRoute, tags=["chat"])


@router.post(
    "/chat/completions", responses=returns(ChatCompletion, events=(ChatCompletionChunk, ErrorResponse), done=DONE)
)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Continue a conversation."""
    call = await open_call(request, body.model, keep_alive=body.keep_alive, stream=body.stream)
    state = call.state
    labels = body.take_labels(request.headers)
    with naming(body.own_names()):
        conversation = body.conversation(await _tools(state, call.model, body))
        if body.executes:
            return await _execute(call, body, conversation, request, labels)
        reply = await begin_reply(call, conversation, body.generation_settings(), prefix="chatcmpl-")
    if body.stream:
        return await chunk_stream(call, reply.generation, ChatWriter(reply, body, state.config), labels)
    choices = await collect_for(request, reply.generation)
    first = choices[0].prompt_logprobs
    scored = UNSET if first is None else await state.offload(answers.prompt_logprobs, first, reply.token_text)
    completion = ChatCompletion(
        id=reply.generation.id,
        created=reply.generation.created,
        model=reply.name,
        system_fingerprint=reply.system_fingerprint,
        choices=[_choice(reply, body, choice) for choice in choices],
        usage=usage_object(reply.usage()),
        timings=answers.timings(reply.usage(), reply.generation.phases()) if body.timings_per_token else UNSET,
        prompt_logprobs=scored,
        prompt_token_ids=reply.prompt_token_ids if body.return_token_ids else UNSET,
        kv_transfer_params=kv_transfer_answer(reply.generation),
        conversation_id=body.conversation_id or UNSET,
        resource_id=body.resource_id or UNSET,
    )
    return json_response(completion, request_id=reply.generation.id, headers=labels)


@router.post("/chat/completions/render", responses=returns(chat_types.RenderedPrompt))
async def render_chat_completion(body: ChatRequest, request: Request) -> Response:
    """The prompt that /chat/completions would give the model, as text and token ids; nothing is generated."""
    call = await open_call(request, body.model, keep_alive=body.keep_alive)
    found = await rendered(call, body)
    token_ids, longest = found.token_ids, call.model.engine.info.max_model_len
    prompt = chat_types.RenderedPrompt(
        prompt=found.text, prompt_token_ids=token_ids, count=len(token_ids), max_model_len=longest
    )
    return json_response(prompt)


async def rendered(call: ClientCall, body: ChatRequest) -> Rendered:
    """The prompt of a chat."""
    with naming(body.own_names()):
        conversation = body.conversation(await _tools(call.state, call.model, body))
        return await call.prepare(render, conversation)


async def _tools(state: ServerState, model: ServedModel, body: ChatRequest) -> list[Tool]:
    if body.mcp is not None:
        return await asked_tools(state, model, body.mcp.allowed_tools, Field("mcp"))
    return await injected_tools(state, model) if body.takes_tools else []


def _choice(reply: Reply, body: ChatRequest, choice: Choice) -> chat_types.ChatChoice:
    answer, finish_reason = reply.whole(choice.index, choice.deltas)
    content = body.echoed + (answer.content or "")
    reasoning = UNSET if answer.reasoning is None or not body.include_reasoning else answer.reasoning
    calls = [_made(call, body.custom_names) for call in answer.tool_calls]
    return chat_types.ChatChoice(
        index=choice.index,
        message=chat_types.ChatMessage(
            content=None if calls and not content else content,
            reasoning=reasoning,
            reasoning_content=reasoning,
            tool_calls=calls or UNSET,
        ),
        logprobs=_logprobs(reply, body, choice.logprobs),
        finish_reason=finish_reason,
        stop_reason=choice.stop_reason,
        token_ids=choice.token_ids if body.return_token_ids else UNSET,
        weight_versions=answers.weight_spans(choice.weight_versions) if body.return_weight_versions else UNSET,
    )


def _made(call: ParsedCall, custom: Collection[str]) -> chat_types.MadeToolCall:
    if call.name in custom:
        return chat_types.MadeToolCall(
            id=call.id, type="custom", custom=chat_types.CalledCustom(call.name, call.arguments)
        )
    return chat_types.MadeToolCall(id=call.id, function=chat_types.CalledFunction(call.name, call.arguments))


def _logprobs(reply: Reply, body: ChatRequest, steps: Sequence[Step]) -> answers.ChatLogprobs | None:
    if body.logprobs_count is None:
        return None
    return answers.chat_logprobs(
        steps,
        body.logprobs_count,
        reply.token_bytes,
        body.logprob_token_ids or (),
        by_number=body.return_tokens_as_token_ids,
    )


class _Writer(ChunkWriter[Gaining]):
    """Chunks of a chat stream, all with what `reply` says of the answer; the usage comes last, if asked for."""

    def __init__(self, reply: Reply, body: ChatRequest, config: ServerConfig, usage: Callable[[], Usage]):
        self._reply = reply
        self._body = body
        self._options = stream_options(body.stream_options, config)
        self._usage = usage

    def last(self) -> Iterator[ChatCompletionChunk]:
        if self._options.include_usage:
            chunk = self._chunk()
            chunk.usage = usage_object(self._usage())
            yield chunk

    def _chunk(self, *choices: ChatChunkChoice) -> ChatCompletionChunk:
        chunk = ChatCompletionChunk(
            id=self._reply.generation.id,
            created=self._reply.generation.created,
            model=self._reply.name,
            system_fingerprint=self._reply.system_fingerprint,
            choices=list(choices),
        )
        if self._body.timings_per_token:
            chunk.timings = answers.timings(self._usage(), self._reply.generation.phases())
        chunk.usage = chunk_usage(self._options, self._usage)
        if self._options.include_obfuscation:
            chunk.obfuscation = answers.obfuscation(choices)
        return chunk


class ChatWriter(_Writer[TokenDelta]):
    """Chunks of the role, of the answer, and of the finish reason alone."""

    def __init__(self, reply: Reply, body: ChatRequest, config: ServerConfig):
        super().__init__(reply, body, config, reply.usage)
        self._num_choices = reply.generation.num_choices
        self._pending: list[list[Step]] = [[] for _ in range(self._num_choices)]
        self._pending_ids: list[list[int]] = [[] for _ in range(self._num_choices)]
        self._versions: list[list[WeightVersionSpan]] = [[] for _ in range(self._num_choices)]
        self._custom: set[tuple[int, int]] = set()
        """(choice, call) of the calls of custom tools."""
        self._thoughts = [""] * self._num_choices
        """Reasoning that is sent once it has ended, for clients that ask for that."""

    def first(self) -> Iterator[ChatCompletionChunk]:
        echoed = self._body.echoed
        opening = None if self._reply.must_call else ""
        for index in range(self._num_choices):
            chunk = self._chunk(ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=opening)))
            if index == 0:
                chunk.warnings = ignored_fields.get() or UNSET
                chunk.prompt_token_ids = self._reply.prompt_token_ids if self._body.return_token_ids else UNSET
            yield chunk
            if echoed:
                yield self._chunk(ChatChunkChoice(index=index, delta=ChatDelta(content=echoed)))

    def chunks(self, index: int, delta: TokenDelta) -> Iterator[ChatCompletionChunk]:
        """Log-probabilities and ids of tokens whose text is still held back wait for the chunk that shows it."""
        piece = self._reply.parse(index, delta)
        self._pending[index] += piece.logprobs
        if self._body.return_token_ids:
            self._pending_ids[index] += piece.token_ids
        note_version(self._versions[index], delta)
        for event in self._shown(index, piece):
            if isinstance(event, ToolCall) and event.name in self._body.custom_names:
                self._custom.add((index, event.index))
            delta_of = _custom_delta if (index, getattr(event, "index", -1)) in self._custom else _delta
            yield self._chunk(self._filled(ChatChunkChoice(index=index, delta=delta_of(event))))
        if piece.finish_reason is not None:
            choice = self._filled(ChatChunkChoice(index=index, delta=ChatDelta()))
            choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason
            if self._body.return_weight_versions:
                choice.weight_versions = answers.weight_spans(self._versions[index])
            yield self._chunk(choice)

    def _shown(self, index: int, piece: Piece) -> Iterator[Event]:
        for event in piece.events:
            if not isinstance(event, Reasoning):
                yield from self._ended_thoughts(index)
                yield event
            elif self._body.include_reasoning and self._body.stream_reasoning:
                yield event
            elif self._body.include_reasoning:
                self._thoughts[index] += event.text
        if piece.finish_reason is not None:
            yield from self._ended_thoughts(index)

    def _ended_thoughts(self, index: int) -> Iterator[Event]:
        if self._thoughts[index]:
            yield Reasoning(self._thoughts[index])
            self._thoughts[index] = ""

    def _filled(self, choice: ChatChunkChoice) -> ChatChunkChoice:
        steps, self._pending[choice.index] = self._pending[choice.index], []
        if steps:
            choice.logprobs = _logprobs(self._reply, self._body, steps)
        if self._body.return_token_ids:
            choice.token_ids, self._pending_ids[choice.index] = self._pending_ids[choice.index], []
        return choice


def _delta(event: Event) -> ChatDelta:
    match event:
        case Content(text=text):
            return ChatDelta(content=text)
        case Reasoning(text=text):
            return ChatDelta(reasoning=text, reasoning_content=text)
        case ToolCall(index=index, id=call_id, name=name):
            function = chat_types.FunctionDelta(name=name, arguments="")
            call = chat_types.ToolCallDelta(index=index, id=call_id, type="function", function=function)
            return ChatDelta(content=None, tool_calls=[call])
        case ToolArguments(index=index, text=text):
            call = chat_types.ToolCallDelta(index=index, function=chat_types.FunctionDelta(arguments=text))
            return ChatDelta(tool_calls=[call])


def _custom_delta(event: Event) -> ChatDelta:
    """Of a call of a custom tool."""
    match event:
        case ToolCall(index=index, id=call_id, name=name):
            custom = chat_types.CustomDelta(name=name, input="")
            return ChatDelta(
                content=None,
                tool_calls=[chat_types.ToolCallDelta(index=index, id=call_id, type="custom", custom=custom)],
            )
        case ToolArguments(index=index, text=text):
            custom = chat_types.CustomDelta(input=text)
            return ChatDelta(tool_calls=[chat_types.ToolCallDelta(index=index, custom=custom)])
    return _delta(event)


async def _execute(
    call: ClientCall, body: ChatRequest, conversation: Conversation, request: Request, labels: dict[str, str]
) -> Response:
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
        writer = ExecutionWriter(reply, body, config, execution.usage)
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


async def _collected(execution: Execution, body: ChatRequest) -> chat_types.ChatChoice:
    content, reasoning = "", ""
    calls: dict[int, chat_types.MCPCall] = {}
    ended = Ended("abort")
    async for happenings in execution.arrivals():
        for _, happening in happenings:
            match happening:
                case Content(text=text):
                    content += text
                case Reasoning(text=text):
                    reasoning += text
                case ToolRun(index=index):
                    calls[index] = chat_types.MCPCall(**_call(happening))
                case Ended():
                    ended = happening
    thought = reasoning if reasoning and body.include_reasoning else UNSET
    message = chat_types.ChatMessage(
        content=content, reasoning=thought, reasoning_content=thought, mcp_calls=[calls[at] for at in sorted(calls)]
    )
    return chat_types.ChatChoice(
        index=0, message=message, logprobs=None, finish_reason=ended.finish_reason, stop_reason=ended.stop_reason
    )


class ExecutionWriter(_Writer[Happening]):
    """Chunks of the role, of texts as they come, of each call as it begins and as it ends, and of the end."""

    def first(self) -> Iterator[ChatCompletionChunk]:
        chunk = self._of(ChatDelta(role="assistant", content=""))
        chunk.warnings = ignored_fields.get() or UNSET
        yield chunk

    def chunks(self, index: int, delta: Happening) -> Iterator[ChatCompletionChunk]:
        match delta:
            case Reasoning() if not self._body.include_reasoning:
                return
            case Content() | Reasoning():
                yield self._of(_delta(delta))
            case ToolRun():
                yield self._of(ChatDelta(mcp_calls=[chat_types.MCPCallDelta(index=delta.index, **_call(delta))]))
            case Ended():
                chunk = self._of(ChatDelta())
                choice = chunk.choices[0]
                choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
                yield chunk

    def _of(self, delta: ChatDelta) -> ChatCompletionChunk:
        return self._chunk(ChatChunkChoice(index=0, delta=delta))


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
