"""/chat/completions"""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from jaxllm.engine.messages import TokenDelta
from jaxllm.serving.generation import Choice, Generation
from jaxllm.serving.openapi import returns
from jaxllm.serving.prompts import chat_prompt
from jaxllm.serving.protocol.chat import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatMessage,
    ChatRequest,
)
from jaxllm.serving.protocol.common import StreamOptions
from jaxllm.serving.protocol.logprobs import ChatLogprobs, Step, TokenText, chat_logprobs, prompt_logprobs
from jaxllm.serving.responses import json_response
from jaxllm.serving.route import JSONRoute
from jaxllm.serving.state import ServerState
from jaxllm.serving.streaming import EventStream, collect_for

router = APIRouter(route_class=JSONRoute, tags=["chat"])


@router.post("/chat/completions", responses=returns(ChatCompletion, stream=True))
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Continue a conversation."""
    state: ServerState = request.app.state.server
    model = state.resolve_model(body.model)
    state.check_accepting()
    prompt = await state.offload(chat_prompt, state, body)
    generation = Generation(state, [prompt], body, "chatcmpl")
    token_text = state.token_text
    if body.stream:
        return EventStream(generation, ChatWriter(body, generation, model, token_text), state.config.sse_keep_alive)
    choices = await collect_for(request, generation)
    first = choices[0].prompt_logprobs
    completion = ChatCompletion(
        id=generation.id,
        created=generation.created,
        model=model,
        choices=[_choice(choice, body, token_text) for choice in choices],
        usage=generation.usage(),
        prompt_logprobs=UNSET if first is None else prompt_logprobs(first, token_text),
    )
    return json_response(completion, request_id=generation.id)


def _choice(choice: Choice, body: ChatRequest, token_text: TokenText) -> ChatChoice:
    count = body.logprobs_count
    return ChatChoice(
        index=choice.index,
        message=ChatMessage(content=choice.text),
        logprobs=None if count is None else chat_logprobs(choice.logprobs, count, token_text),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
    )


class ChatWriter:
    """Chunks of a chat stream: the role, then content, then the finish reason alone, then the usage if asked for."""

    def __init__(self, body: ChatRequest, generation: Generation, model: str, token_text: TokenText):
        self._generation = generation
        self._model = model
        self._token_text = token_text
        self._options = body.stream_options or StreamOptions()
        self._logprobs_count = body.logprobs_count
        self._pending: list[list[Step]] = [[] for _ in range(generation.num_choices)]

    def first(self) -> Iterator[ChatCompletionChunk]:
        for index in range(self._generation.num_choices):
            yield self._chunk(ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content="")))

    def chunks(self, index: int, delta: TokenDelta) -> Iterator[ChatCompletionChunk]:
        """Log-probabilities of tokens whose text is still held back wait for the chunk that shows it."""
        self._pending[index] += delta.logprobs or []
        if delta.text:
            content = ChatDelta(content=delta.text)
            yield self._chunk(ChatChunkChoice(index=index, delta=content, logprobs=self._take_logprobs(index)))
        if delta.finish_reason is not None:
            left = self._take_logprobs(index) if self._pending[index] else None
            choice = ChatChunkChoice(index=index, delta=ChatDelta(), logprobs=left)
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
            yield self._chunk(choice)

    def last(self) -> Iterator[ChatCompletionChunk]:
        if self._options.include_usage:
            chunk = self._chunk()
            chunk.usage = self._generation.usage()
            yield chunk

    def _chunk(self, *choices: ChatChunkChoice) -> ChatCompletionChunk:
        chunk = ChatCompletionChunk(
            id=self._generation.id, created=self._generation.created, model=self._model, choices=list(choices)
        )
        if self._options.continuous_usage_stats:
            chunk.usage = self._generation.usage()
        elif self._options.include_usage:
            chunk.usage = None
        return chunk

    def _take_logprobs(self, index: int) -> ChatLogprobs | None:
        steps, self._pending[index] = self._pending[index], []
        return None if self._logprobs_count is None else chat_logprobs(steps, self._logprobs_count, self._token_text)
