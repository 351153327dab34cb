"""Ollama's API: answers as they grow, in lines of JSON, and what is told of models."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxllm.chat.events import Content, Reasoning, ToolArguments, ToolCall
from jaxllm.chat.parser import Step
from jaxllm.engine.messages import TokenDelta
from jaxllm.requests.outputs import ParsedCall
from jaxllm.serving.generation import Choice, Reply
from jaxllm.serving.http.answers import ignored_fields
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.route import ChunkWriter
from jaxllm.serving.ollama.types import AnswerFields, GenerateRequest, OllamaChatRequest
from jaxllm.serving.openai.answers import ChatTokenLogprob, chat_logprobs

LINES = "application/x-ndjson"


class OllamaError(msgspec.Struct):
    error: str


class OllamaFunction(msgspec.Struct, kw_only=True):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(msgspec.Struct, kw_only=True):
    id: str
    function: OllamaFunction


class OllamaReply(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaAnswer(msgspec.Struct, kw_only=True):
    """A whole answer, or one line of it; the last is `done`. Durations are in nanoseconds."""

    model: str
    """The name that was asked for."""
    created_at: datetime
    done: bool
    message: OllamaReply | UnsetType = UNSET
    """Of a chat; of a prompt it is the `response` with its `thinking`."""
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET
    """All tokens so far: a field of the next request."""
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class OllamaEmbedAnswer(msgspec.Struct):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsAnswer(msgspec.Struct):
    embedding: list[float]


class ModelDetails(msgspec.Struct, kw_only=True, frozen=True):
    parent_model: str = ""
    """Of an adapter, the model that it belongs to."""
    format: str = ""
    family: str = ""
    families: list[str] = msgspec.field(default_factory=list)
    parameter_size: str = ""
    quantization_level: str = ""


class ListedModel(msgspec.Struct, kw_only=True):
    name: str = ""
    model: str = ""
    modified_at: datetime = datetime.fromtimestamp(0, UTC)
    size: int = 0
    digest: str = ""
    details: ModelDetails = ModelDetails()
    expires_at: datetime | UnsetType = UNSET
    """Of a loaded one, as the two below."""
    size_vram: int | UnsetType = UNSET
    """What it takes of the devices' memory; 0 on a CPU."""
    context_length: int | UnsetType = UNSET


class ModelTags(msgspec.Struct):
    models: list[ListedModel]


class ShownModel(msgspec.Struct, kw_only=True):
    license: str
    modelfile: str
    parameters: str
    """What the model recommends to sample with, a line each."""
    template: str
    """In Jinja's notation."""
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    """completion or embedding, and insert, thinking and tools."""
    modified_at: datetime


class PullProgress(msgspec.Struct):
    status: str


class SpokenVersion(msgspec.Struct):
    version: str


class Deleted(msgspec.Struct):
    """Nothing is said of it."""


def told(error: APIError) -> OllamaError:
    """The shape has no place for the field's name, so the message begins with it unless it says it anyway."""
    param = error.body["error"]["param"] or ""
    return OllamaError(str(error) if param in str(error) else f"{param}: {error.reason}")


def line(value: msgspec.Struct) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def answer(
    body: AnswerFields, text: str = "", thinking: str = "", calls: list[OllamaCall] | None = None, **fields: Any
) -> OllamaAnswer:
    said: dict[str, Any] = {"response": text, "thinking": thinking or UNSET}
    if isinstance(body, OllamaChatRequest):
        said = {"message": OllamaReply(content=text, thinking=thinking or UNSET, tool_calls=calls or UNSET)}
    return OllamaAnswer(model=body.model, created_at=datetime.now(UTC), **said, **fields)


class AnswerWriter(ChunkWriter[TokenDelta]):
    """A whole answer, or its lines, in which a call comes whole once the next begins or the answer ends.

    The times are those at which the request came, and at which its model was loaded, on the monotonic clock.
    """

    done = b""

    def __init__(self, reply: Reply, body: AnswerFields, came: float, loaded: float):
        self.keep_alive = line(answer(body, done=False))
        self._reply = reply
        self._body = body
        self._came, self._loaded = came, loaded
        self._context = list(reply.prompt_token_ids)
        self._calls: list[ParsedCall] = []
        """The one that has begun, with its arguments so far."""
        self._num_calls = 0
        self._steps: list[Step] = []
        """Those that no line has shown."""
        self._reason: str | None = None

    def encode(self, chunk: msgspec.Struct) -> bytes:
        return line(chunk)

    def error(self, error: APIError) -> bytes:
        return line(told(error))

    def chunks(self, index: int, delta: TokenDelta) -> Iterator[OllamaAnswer]:
        piece = self._reply.parse(index, delta)
        self._steps += piece.logprobs
        self._context += piece.token_ids
        self._reason = piece.finish_reason
        for event in piece.events:
            if not isinstance(event, ToolArguments):
                yield from self._ended_call()
            match event:
                case Content(text):
                    yield self._line(text)
                case Reasoning(text):
                    yield self._line(thinking=text)
                case ToolCall():
                    self._calls = [ParsedCall(event.id, event.name, "")]
                case ToolArguments(text=text):
                    self._calls[0].arguments += text
        if piece.finish_reason is not None:
            yield from self._ended_call()

    def last(self) -> Iterator[OllamaAnswer]:
        yield self._ending(warnings=ignored_fields.get() or UNSET)

    def whole(self, choice: Choice) -> OllamaAnswer:
        said, self._reason = self._reply.whole(choice.index, choice.deltas)
        self._context += choice.token_ids
        self._steps = choice.logprobs
        return self._ending(text=said.content or "", thinking=said.reasoning or "", calls=whole_calls(said.tool_calls))

    def _ended_call(self) -> Iterator[OllamaAnswer]:
        ended, self._calls = self._calls, []
        if calls := whole_calls(ended, self._num_calls):
            yield self._line(calls=calls)
        self._num_calls += len(ended)

    def _line(self, text: str = "", **shown: Any) -> OllamaAnswer:
        return answer(self._body, text, done=False, logprobs=self._logprobs(), **shown)

    def _ending(self, **shown: Any) -> OllamaAnswer:
        usage, phases = self._reply.usage(), self._reply.generation.phases()
        shows_context = isinstance(self._body, GenerateRequest) and not (self._body.raw or self._body.suffix)
        return answer(
            self._body,
            **shown,
            context=self._context if shows_context else UNSET,
            logprobs=self._logprobs(),
            done=True,
            done_reason="length" if self._reason == "length" else "stop",
            total_duration=nanoseconds(time.monotonic() - self._came),
            load_duration=nanoseconds(self._loaded - self._came),
            prompt_eval_count=usage.prompt_tokens,
            prompt_eval_duration=nanoseconds(phases.prefill),
            eval_count=usage.completion_tokens,
            eval_duration=nanoseconds(phases.decode),
        )

    def _logprobs(self) -> list[ChatTokenLogprob] | UnsetType:
        steps, self._steps = self._steps, []
        return chat_logprobs(steps, self._body.top_logprobs or 0, self._reply.token_bytes).content or UNSET


def whole_calls(made: Sequence[ParsedCall], first: int = 0) -> list[OllamaCall]:
    """The calls, numbered from `first`, without one that was cut off, which must not be run."""
    calls = []
    for index, call in enumerate(made, first):
        with suppress(ValueError):
            function = OllamaFunction(index=index, name=call.name, arguments=json.loads(call.arguments))
            calls.append(OllamaCall(id=call.id, function=function))
    return calls


def nanoseconds(seconds: float | None) -> int:
    return int((seconds or 0.0) * 1e9)
