"""Who speaks in a session: an engine of this process, or a server somewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from jaxllm.chat.parsing.events import Content, Event, Reasoning, ToolArguments, ToolCall
from jaxllm.errors import InvalidRequestError
from jaxllm.session.tools import LoopThread

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from jaxllm.engine.doors.async_llm import AsyncLLM
    from jaxllm.llm import LLM
    from jaxllm.serving.openai.chat_request import ChatRequest


@dataclass(frozen=True)
class Ended:
    """A reply is over: "stop", "tool_calls", "length" or what else its server says."""

    reason: str | None


class Speaker(Protocol):
    def reply(self, body: Mapping[str, Any]) -> AsyncGenerator[Event | Ended, None]:
        """What the model says to a chat request's body, as it comes; an Ended is the last."""

    async def special_tokens(self) -> Sequence[str]:
        """Texts that mean more to the model than their letters."""


class EngineModel:
    """An engine of this process, asked as a chat request asks the server, without HTTP."""

    def __init__(self, engine: LLM | AsyncLLM, thread: LoopThread):
        from jaxllm.chat.model import ChatModel
        from jaxllm.engine.doors.async_llm import AsyncLLM

        self._engine = engine if isinstance(engine, AsyncLLM) else engine.asynchronous()
        self._model = ChatModel(self._engine)
        self._thread = thread

    async def reply(self, body: Mapping[str, Any]) -> AsyncGenerator[Event | Ended, None]:
        async with aclosing(self._thread.iterate(self._reply(body))) as events:
            async for event in events:
                yield event

    async def special_tokens(self) -> Sequence[str]:
        return list(self._model.special_tokens)

    async def _reply(self, body: Mapping[str, Any]) -> AsyncGenerator[Event | Ended, None]:
        from jaxllm.chat.answer import speak
        from jaxllm.chat.conversation import naming
        from jaxllm.chat.prompt import prepare

        request = _chat_request(body)
        settings = request.generation_settings()
        for name, value in (("lora", settings.lora), ("kv_transfer_params", settings.hand_over)):
            if value is not None:
                raise InvalidRequestError(f"{name} is not available in a session with an engine", name)
        with naming(request.own_names()):
            ready = await asyncio.to_thread(prepare, self._model, request.conversation(), settings)
        pieces = speak(self._engine, ready, priority=settings.priority, cache_salt=settings.cache_salt)
        async with aclosing(pieces):
            async for piece in pieces:
                for event in piece.events:
                    yield event
                if piece.finish_reason is not None:
                    yield Ended(piece.finish_reason)


class ClientModel:
    """A server behind an AsyncOpenAI client; without a `name` the first model that it lists."""

    def __init__(self, client: AsyncOpenAI, name: str | None):
        self._client = client
        self._name = name

    async def reply(self, body: Mapping[str, Any]) -> AsyncGenerator[Event | Ended, None]:
        if self._name is None:
            self._name = (await self._client.models.list()).data[0].id
        chunks = await self._client.chat.completions.create(model=self._name, stream=True, **body)
        reason: str | None = None
        async with chunks:
            async for chunk in chunks:
                for choice in chunk.choices:
                    for event in _events(choice.delta):
                        yield event
                    reason = choice.finish_reason or reason
        yield Ended(reason)

    async def special_tokens(self) -> Sequence[str]:
        return ()


def _chat_request(body: Mapping[str, Any]) -> ChatRequest:
    """Raises InvalidRequestError naming the field."""
    from fastapi.exceptions import RequestValidationError
    from pydantic import ValidationError

    from jaxllm.serving.http.answers import to_api_error
    from jaxllm.serving.openai.chat_request import ChatRequest

    try:
        return ChatRequest.model_validate(body)
    except ValidationError as error:
        errors = [{**item, "loc": ("body", *item["loc"])} for item in error.errors()]
        told = to_api_error(RequestValidationError(errors, body=body))
        raise InvalidRequestError(str(told), told.body["error"]["param"]) from None


def _events(delta: Any) -> list[Event]:
    events: list[Event] = []
    if reasoning := getattr(delta, "reasoning_content", None):
        events.append(Reasoning(reasoning))
    if delta.content:
        events.append(Content(delta.content))
    for call in delta.tool_calls or ():
        if call.id and call.function and call.function.name:
            events.append(ToolCall(call.index, call.id, call.function.name))
        if call.function and call.function.arguments:
            events.append(ToolArguments(call.index, call.function.arguments))
    return events
