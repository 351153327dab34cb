"""Ollama's API: answers as they grow, in lines of JSON, and what is told of models."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxllm.chat.events import Content, Reasoning, ToolArguments, ToolCall
from jaxllm.chat.parser import Step
from jaxllm.engine.messages import TokenDelta
from jaxllm.serving.generation import Reply
from jaxllm.serving.http.answers import ignored_fields
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.route import ChunkWriter
from jaxllm.serving.ollama.types import AnswerFields
from jaxllm.serving.openai.answers import ChatTokenLogprob, chat_logprobs

LINES = "application/x-ndjson"
_encode = msgspec.json.Encoder().encode


class OllamaError(msgspec.Struct):
    error: str


def told(error: APIError) -> OllamaError:
    """The shape has no place for the field's name, so the message begins with it unless it says it anyway."""
    param = error.body["error"]["param"] or ""
    return OllamaError(str(error) if param in str(error) else f"{param}: {error.reason}")


class _Answer(msgspec.Struct, kw_only=True):
    model: str
    """The name that was asked for."""
    created_at: datetime
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    """Nanoseconds, as all durations: from the request's arrival to its last token."""
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class OllamaFunction(msgspec.Struct, kw_only=True):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(msgspec.Struct, kw_only=True):
    id: str
    function: OllamaFunction


class OllamaAnswerMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaChatAnswer(_Answer, kw_only=True):
    """A whole answer, or one line of it; the last is `done`."""

    message: OllamaAnswerMessage


class OllamaTextAnswer(_Answer, kw_only=True):
    """A whole answer, or one line of it; the last is `done`."""

    response: str
    thinking: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET
    """All tokens so far: a field of the next request."""


class OllamaEmbedAnswer(msgspec.Struct, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsAnswer(msgspec.Struct):
    embedding: list[float]


class ModelDetails(msgspec.Struct, kw_only=True):
    parent_model: str = ""
    """Of an adapter, the model that it belongs to."""
    format: str = ""
    family: str = ""
    families: list[str] = msgspec.field(default_factory=list)
    parameter_size: str = ""
    quantization_level: str = ""


class ListedModel(msgspec.Struct, kw_only=True):
    name: str
    model: str
    modified_at: datetime
    size: int
    digest: str
    details: ModelDetails


class TagList(msgspec.Struct):
    models: list[ListedModel]


class LoadedModel(msgspec.Struct, kw_only=True):
    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: datetime
    size_vram: int
    """What it takes of the devices' memory; 0 on a CPU."""
    context_length: int


class LoadedList(msgspec.Struct):
    models: list[LoadedModel]


class ShownModel(msgspec.Struct, kw_only=True):
    license: str
    modelfile: str
    parameters: str
    """What the model recommends to sample with, a line each."""
    template: str
    """In Jinja's notation."""
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "embedding", "insert", "thinking", "tools"]]
    modified_at: datetime


class PullProgress(msgspec.Struct, kw_only=True):
    status: str


class SpokenVersion(msgspec.Struct):
    version: str


class Emptied(msgspec.Struct):
    """No more is said."""


def now() -> datetime:
    return datetime.now(UTC)


def line(value: msgspec.Struct) -> bytes:
    return _encode(value) + b"\n"


def nothing_said(model: str, *, chat: bool, reason: Literal["load", "unload"]) -> OllamaChatAnswer | OllamaTextAnswer:
    """The answer to a request that only loads or unloads a model."""
    return _answer(chat, "", model=model, created_at=now(), done=True, done_reason=reason)


def _answer(
    chat: bool,
    text: str,
    thinking: str | UnsetType = UNSET,
    calls: list[OllamaCall] | UnsetType = UNSET,
    context: list[int] | UnsetType = UNSET,
    **fields: Any,
) -> OllamaChatAnswer | OllamaTextAnswer:
    if chat:
        message = OllamaAnswerMessage(content=text, thinking=thinking or UNSET, tool_calls=calls or UNSET)
        return OllamaChatAnswer(message=message, **fields)
    return OllamaTextAnswer(response=text, thinking=thinking or UNSET, context=context, **fields)


class AnswerWriter(ChunkWriter[TokenDelta]):
    """The lines of one answer; a call is sent whole, when its arguments are, and one that is cut off is left out.

    The times are those at which the request came, and at which its model was loaded, on the monotonic clock.
    """

    done = b""

    def __init__(
        self, reply: Reply, body: AnswerFields, came: float, loaded: float, *, chat: bool, shows_context: bool = False
    ):
        self._reply = reply
        self.streams = body.stream
        self._body = body
        self._came, self._loaded = came, loaded
        self._chat = chat
        self._context = list(reply.prompt_token_ids) if shows_context else None
        self._text, self._thinking = "", ""
        self._calls: list[OllamaCall] = []
        self._call: ToolCall | None = None
        self._arguments = ""
        self._pending: list[Step] = []
        self._steps: list[Step] = []
        self._reason: Literal["stop", "length"] = "stop"
        self.keep_alive = self.encode(self._line(""))

    def encode(self, chunk: msgspec.Struct) -> bytes:
        return line(chunk)

    def error(self, error: APIError) -> bytes:
        return line(told(error))

    def chunks(self, index: int, delta: TokenDelta) -> Iterator[msgspec.Struct]:
        """A line for each text and each call, of which the next begins or the answer ends."""
        piece = self._reply.parse(index, delta)
        self._pending += piece.logprobs
        if self._context is not None:
            self._context += piece.token_ids
        for event in piece.events:
            if isinstance(event, ToolArguments):
                self._arguments += event.text
                continue
            yield from self._ended_call()
            match event:
                case Content(text):
                    self._text += text
                    yield self._line(text)
                case Reasoning(text):
                    self._thinking += text
                    yield self._line("", thinking=text)
                case ToolCall():
                    self._call = event
        if piece.finish_reason is not None:
            yield from self._ended_call()
            self._reason = "length" if piece.finish_reason == "length" else "stop"

    def last(self) -> Iterator[msgspec.Struct]:
        yield self._last("", UNSET, UNSET, self._taken())

    def whole(self) -> msgspec.Struct:
        """All of it, once it has ended."""
        self._taken()
        return self._last(self._text, self._thinking, self._calls, self._steps)

    def _ended_call(self) -> Iterator[msgspec.Struct]:
        call, text = self._call, self._arguments
        self._call, self._arguments = None, ""
        if call is None:
            return
        try:
            arguments = json.loads(text)
        except ValueError:
            return  # it was cut off, and must not be run
        self._calls.append(
            OllamaCall(id=call.id, function=OllamaFunction(index=call.index, name=call.name, arguments=arguments))
        )
        yield self._line("", calls=self._calls[-1:])

    def _taken(self) -> list[Step]:
        """The log-probabilities that no line has shown yet."""
        steps, self._pending = self._pending, []
        self._steps += steps
        return steps

    def _line(self, text: str, **shown: Any) -> msgspec.Struct:
        return self._made(text, self._taken(), done=False, **shown)

    def _last(self, text: str, thinking: Any, calls: Any, steps: list[Step]) -> msgspec.Struct:
        usage, phases = self._reply.usage(), self._reply.generation.phases()
        return self._made(
            text,
            steps,
            thinking=thinking,
            calls=calls,
            context=UNSET if self._context is None else self._context,
            done=True,
            done_reason=self._reason,
            total_duration=_ns(time.monotonic() - self._came),
            load_duration=_ns(self._loaded - self._came),
            prompt_eval_count=usage.prompt_tokens,
            prompt_eval_duration=_ns(phases.prefill),
            eval_count=usage.completion_tokens,
            eval_duration=_ns(phases.decode),
        )

    def _made(self, text: str, steps: list[Step], **fields: Any) -> msgspec.Struct:
        body = self._body
        if body.logprobs:
            shown = chat_logprobs(steps, body.top_logprobs or 0, self._reply.token_bytes).content
            fields["logprobs"] = shown or UNSET
        warnings = (ignored_fields.get() or UNSET) if fields["done"] else UNSET
        return _answer(self._chat, text, model=body.model, created_at=now(), warnings=warnings, **fields)


def _ns(seconds: float | None) -> int:
    return int((seconds or 0.0) * 1e9)
