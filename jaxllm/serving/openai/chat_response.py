"""/v1/chat/completions: the response and the chunks of a stream."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxllm.serving.openai.kv_transfer import KVTransferAnswer
from jaxllm.serving.openai.logprobs import ChatLogprobs, PromptLogprobs
from jaxllm.serving.openai.timings import Timings
from jaxllm.serving.openai.usage import CompletionUsage
from jaxllm.serving.openai.weight_spans import WeightSpan


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class MadeToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class MCPCall(msgspec.Struct, kw_only=True):
    """A tool that the server ran; of what a failed one says to the model, `error` has OpenAI's form."""

    id: str
    name: str
    server_label: str
    arguments: str
    status: Literal["in_progress", "completed", "failed"]
    output: str | None
    error: dict[str, Any] | None


class MCPCallDelta(MCPCall, kw_only=True):
    """The whole call: once as it begins, without output, and once as it has ended."""

    index: int


class ChatMessage(msgspec.Struct, kw_only=True):
    """`reasoning` and `reasoning_content` are one thing under vLLM's two names."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MadeToolCall] | UnsetType = UNSET
    mcp_calls: list[MCPCall] | UnsetType = UNSET
    """With mcp.execute: what the server ran before this was said, or while."""


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[WeightSpan] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    timings: Timings | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: KVTransferAnswer | UnsetType = UNSET
    conversation_id: str | UnsetType = UNSET
    resource_id: str | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """A call's first delta has id, type and name, the others a fragment of the arguments only."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    """null where a call opens, as at OpenAI's."""
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    mcp_calls: list[MCPCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[WeightSpan] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: CompletionUsage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class RenderedPrompt(msgspec.Struct, kw_only=True):
    """What /v1/chat/completions/render answers: the prompt as text and as token ids."""

    prompt: str
    prompt_token_ids: list[int]
    count: int
    max_model_len: int
