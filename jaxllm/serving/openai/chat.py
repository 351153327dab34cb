"""/chat/completions"""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from jaxllm.engine.front.messages import TokenDelta
from jaxllm.serving.chat import ChatAnswer, ChatTurn, begin_chat
from jaxllm.serving.http.json_response import json_response
from jaxllm.serving.http.openapi import DONE, returns
from jaxllm.serving.http.request_model import ErrorResponse, StreamOptions, ignored_fields
from jaxllm.serving.http.route import JSONRoute
from jaxllm.serving.http.streaming import ChunkWriter, EventStream, collect_for
from jaxllm.serving.openai.chat_request import ChatRequest
from jaxllm.serving.openai.chat_response import (
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatMessage,
    FunctionDelta,
    MadeToolCall,
    RenderedPrompt,
    ToolCallDelta,
)
from jaxllm.serving.openai.logprobs import Step, chat_logprobs, prompt_logprobs
from jaxllm.serving.parsing.events import Content, Event, Reasoning, ToolArguments, ToolCall
from jaxllm.serving.prompts import render_chat, render_own_template
from jaxllm.serving.state import ServerState

router = APIRouter(route_class=JSONRoute, tags=["chat"])


@router.post(
    "/chat/completions", responses=returns(ChatCompletion, events=(ChatCompletionChunk, ErrorResponse), done=DONE)
)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Continue a conversation."""
    state: ServerState = request.app.state.server
    labels = body.take_labels(request.headers)
    turn = await begin_chat(state, body)
    if body.stream:
        return EventStream(turn.generation, ChatWriter(turn), state.config.sse_keep_alive, labels)
    choices = await collect_for(request, turn.generation)
    first = choices[0].prompt_logprobs
    answers = [turn.answer(choice) for choice in choices]
    completion = ChatCompletion(
        id=turn.generation.id,
        created=turn.generation.created,
        model=turn.model,
        choices=[_choice(turn, answer) for answer in answers],
        usage=turn.usage(),
        prompt_logprobs=UNSET if first is None else prompt_logprobs(first, turn.token_text),
        prompt_token_ids=turn.prompt_token_ids if body.return_token_ids else UNSET,
        conversation_id=body.conversation_id or UNSET,
        resource_id=body.resource_id or UNSET,
    )
    return json_response(completion, request_id=turn.generation.id, headers=labels)


@router.post("/chat/completions/render", responses=returns(RenderedPrompt))
async def render_chat_completion(body: ChatRequest, request: Request) -> Response:
    """The prompt that /chat/completions would give the model, as text and token ids; nothing is generated."""
    state: ServerState = request.app.state.server
    state.resolve_model(body.model)
    text = await render_own_template(state, body.messages, body, body.active_tools)
    rendered = await state.offload(render_chat, state, body, text)
    return json_response(
        RenderedPrompt(
            prompt=rendered.text,
            prompt_token_ids=rendered.token_ids,
            count=len(rendered.token_ids),
            max_model_len=state.engine.info.max_model_len,
        )
    )


def _choice(turn: ChatTurn, answer: ChatAnswer) -> ChatChoice:
    count = turn.body.logprobs_count
    reasoning = UNSET if answer.reasoning is None else answer.reasoning
    calls = [MadeToolCall(id=call.id, function=CalledFunction(call.name, call.arguments)) for call in answer.tool_calls]
    return ChatChoice(
        index=answer.index,
        message=ChatMessage(
            content=answer.content, reasoning=reasoning, reasoning_content=reasoning, tool_calls=calls or UNSET
        ),
        logprobs=None if count is None else chat_logprobs(answer.logprobs, count, turn.token_text),
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
        token_ids=answer.token_ids if turn.body.return_token_ids else UNSET,
    )


class ChatWriter(ChunkWriter):
    """Chunks of a chat stream: the role, then the answer, then the finish reason alone, then the usage if asked for."""

    def __init__(self, turn: ChatTurn):
        self._turn = turn
        self._generation = turn.generation
        self._options = turn.body.stream_options or StreamOptions()
        self._logprobs_count = turn.body.logprobs_count
        self._with_ids = turn.body.return_token_ids
        self._pending: list[list[Step]] = [[] for _ in range(turn.generation.num_choices)]
        self._pending_ids: list[list[int]] = [[] for _ in range(turn.generation.num_choices)]

    def first(self) -> Iterator[ChatCompletionChunk]:
        echoed = self._turn.body.echoed
        for index in range(self._generation.num_choices):
            chunk = self._chunk(ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content="")))
            if index == 0:
                chunk.warnings = ignored_fields.get() or UNSET
                chunk.prompt_token_ids = self._turn.prompt_token_ids if self._with_ids else UNSET
            yield chunk
            if echoed:
                yield self._chunk(ChatChunkChoice(index=index, delta=ChatDelta(content=echoed)))

    def chunks(self, index: int, delta: TokenDelta) -> Iterator[ChatCompletionChunk]:
        """Log-probabilities and ids of tokens whose text is still held back wait for the chunk that shows it."""
        piece = self._turn.parse(index, delta)
        self._pending[index] += piece.logprobs
        if self._with_ids:
            self._pending_ids[index] += piece.token_ids
        for event in piece.events:
            yield self._chunk(self._filled(ChatChunkChoice(index=index, delta=_delta(event))))
        if piece.finish_reason is not None:
            choice = self._filled(ChatChunkChoice(index=index, delta=ChatDelta()))
            choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason
            yield self._chunk(choice)

    def last(self) -> Iterator[ChatCompletionChunk]:
        if self._options.include_usage:
            chunk = self._chunk()
            chunk.usage = self._turn.usage()
            yield chunk

    def _chunk(self, *choices: ChatChunkChoice) -> ChatCompletionChunk:
        chunk = ChatCompletionChunk(
            id=self._generation.id, created=self._generation.created, model=self._turn.model, choices=list(choices)
        )
        if self._options.continuous_usage_stats:
            chunk.usage = self._turn.usage()
        elif self._options.include_usage:
            chunk.usage = None
        return chunk

    def _filled(self, choice: ChatChunkChoice) -> ChatChunkChoice:
        """The choice with the log-probabilities and ids that waited for it."""
        steps, self._pending[choice.index] = self._pending[choice.index], []
        if steps and self._logprobs_count is not None:
            choice.logprobs = chat_logprobs(steps, self._logprobs_count, self._turn.token_text)
        if self._with_ids:
            choice.token_ids, self._pending_ids[choice.index] = self._pending_ids[choice.index], []
        return choice


def _delta(event: Event) -> ChatDelta:
    match event:
        case Content(text=text):
            return ChatDelta(content=text)
        case Reasoning(text=text):
            return ChatDelta(reasoning=text, reasoning_content=text)
        case ToolCall(index=index, id=call_id, name=name):
            function = FunctionDelta(name=name, arguments="")
            return ChatDelta(tool_calls=[ToolCallDelta(index=index, id=call_id, type="function", function=function)])
        case ToolArguments(index=index, text=text):
            return ChatDelta(tool_calls=[ToolCallDelta(index=index, function=FunctionDelta(arguments=text))])
