"""/v1/chat/completions: request, response and chunk."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field, model_validator

from jaxllm.sampling_params import MAX_LOGPROBS
from jaxllm.serving.protocol.common import UNSUPPORTED_SAMPLING, GenerationRequest, Usage, refuse
from jaxllm.serving.protocol.logprobs import ChatLogprobs, PromptLogprobs
from jaxllm.serving.protocol.messages import Message, TemplateFields


class ChatRequest(GenerationRequest, TemplateFields):
    unsupported: ClassVar[frozenset[str]] = UNSUPPORTED_SAMPLING | {
        "audio", "conversation_id", "echo", "function_call", "functions", "mm_processor_kwargs",
        "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort",
        "resource_id", "safety_identifier", "suffix", "tools", "verbosity", "web_search_options",
    }  # fmt: skip

    messages: list[Message] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    max_tokens: int | None = Field(default=None, ge=1)
    """The older name of max_completion_tokens."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Upper bound on generated tokens; by default what is left of the context."""
    add_special_tokens: bool = False
    """Add the tokenizer's own special tokens to the rendered prompt, whose template usually has them already."""
    modalities: list[Literal["text"]] | None = None
    tool_choice: Literal["none"] | None = None
    metadata: dict[str, str] | None = None
    """Accepted, without effect: nothing is stored."""
    store: bool | None = None
    """Accepted, without effect: nothing is stored."""
    service_tier: str | None = None
    """Accepted, without effect, as OpenAI documents it for a single tier."""

    @model_validator(mode="after")
    def _chat_fields(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise refuse("top_logprobs needs logprobs to be true", "top_logprobs")
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise refuse(
                f"max_tokens is {self.max_tokens} and max_completion_tokens is {self.max_completion_tokens}: "
                "they are one setting, give one of them",
                "max_tokens",
            )
        return self

    @property
    def asked_max_tokens(self) -> tuple[str, int | None]:
        """The field that bounds the completion, and its value."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def logprobs_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
