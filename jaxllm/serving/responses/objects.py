"""The response and conversation objects."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxllm.serving.openai.answers import ChatTokenLogprob, Timings
from jaxllm.serving.responses.items import CallStatus, Item, ItemStatus

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
RUNNING = ("queued", "in_progress")


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[dict[str, Any]] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text"):
    text: str


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputReasoning(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """The text is in `summary` when the request asked for a summary, else in `content`."""

    id: str
    status: ItemStatus
    summary: list[SummaryText]
    content: list[ReasoningText]


class OutputFunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class ListedTool(msgspec.Struct, kw_only=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None
    annotations: dict[str, Any] | None


class OutputMcpListTools(msgspec.Struct, kw_only=True, tag_field="type", tag="mcp_list_tools"):
    """What a tool server offers, or why it could not be asked."""

    id: str
    server_label: str
    tools: list[ListedTool]
    error: str | None = None


class OutputMcpCall(msgspec.Struct, kw_only=True, tag_field="type", tag="mcp_call"):
    """A call that this server made; `error` instead of `output` where it failed."""

    id: str
    status: CallStatus
    server_label: str
    name: str
    arguments: str
    output: str | None = None
    error: dict[str, Any] | None = None
    approval_request_id: str | None = None


class OutputMcpApprovalRequest(msgspec.Struct, kw_only=True, tag_field="type", tag="mcp_approval_request"):
    """A call that is made once the client approves it."""

    id: str
    server_label: str
    name: str
    arguments: str


OutputItem = (
    OutputMessage | OutputReasoning | OutputFunctionCall | OutputMcpListTools | OutputMcpCall | OutputMcpApprovalRequest
)


class ResponseError(msgspec.Struct):
    code: str
    message: str


STOPPED = ResponseError("server_error", "the server stopped before the response was complete")


class IncompleteDetails(msgspec.Struct):
    reason: str


class ConversationReference(msgspec.Struct):
    id: str


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Response(msgspec.Struct, kw_only=True):
    """One answer and the settings it was made with; temperature and top_p are those that were used."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | UnsetType = UNSET
    status: ResponseStatus
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    conversation: ConversationReference | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    timings: Timings | UnsetType = UNSET
    """With timings_per_token: of all that the model has said, together."""
    user: str | None
    warnings: list[str] | UnsetType = UNSET
    """What the request sent in vain, on a server that accepts unknown fields."""


class DeletedResponse(msgspec.Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputTokens(msgspec.Struct):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class ListedItem(msgspec.Struct, kw_only=True):
    """An item of any kind, with the fields of that kind."""

    id: str
    type: Literal[
        "message", "reasoning", "function_call", "function_call_output", "mcp_list_tools", "mcp_call",
        "mcp_approval_request", "mcp_approval_response",
    ]  # fmt: skip
    status: CallStatus | UnsetType = UNSET
    role: Literal["user", "system", "developer", "assistant"] | UnsetType = UNSET
    content: list[dict[str, Any]] | UnsetType = UNSET
    summary: list[dict[str, Any]] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    output: str | list[dict[str, Any]] | UnsetType | None = UNSET
    server_label: str | UnsetType = UNSET
    tools: list[dict[str, Any]] | UnsetType = UNSET
    error: str | dict[str, Any] | UnsetType | None = UNSET
    approval_request_id: str | UnsetType | None = UNSET
    approve: bool | UnsetType = UNSET
    reason: str | UnsetType | None = UNSET


class ItemList(msgspec.Struct):
    """A page of items; first_id and last_id are null when it is empty."""

    data: list[ListedItem]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


def listed(item: Item) -> ListedItem:
    return msgspec.convert(item, ListedItem)


class StoredConversation(msgspec.Struct):
    id: str
    created_at: int
    metadata: dict[str, str]
    object: Literal["conversation"] = "conversation"


class DeletedConversation(msgspec.Struct):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True
