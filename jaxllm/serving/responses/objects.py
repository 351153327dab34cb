"""Responses, their items and events, and conversations, as they are sent."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxllm.serving.openai.answers import ChatTokenLogprob, Timings
from jaxllm.serving.request_metrics import Usage
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
    encrypted_content: str | UnsetType = UNSET
    """The text, in the clear, where the request asked for it."""


class OutputFunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class OutputCustomToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


class ListedTool(msgspec.Struct, kw_only=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None
    annotations: dict[str, Any] | None


class OutputMcpListTools(msgspec.Struct, kw_only=True, tag_field="type", tag="mcp_list_tools"):
    """The tools of a server, or the reason why it could not be asked."""

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
    images: tuple[str, ...] | UnsetType = UNSET
    error: dict[str, Any] | None = None
    approval_request_id: str | None = None


class OutputMcpApprovalRequest(msgspec.Struct, kw_only=True, tag_field="type", tag="mcp_approval_request"):
    """A call that is made once the client approves it."""

    id: str
    server_label: str
    name: str
    arguments: str


OutputItem = (
    OutputMessage
    | OutputReasoning
    | OutputFunctionCall
    | OutputCustomToolCall
    | OutputMcpListTools
    | OutputMcpCall
    | OutputMcpApprovalRequest
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


def response_usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(usage.reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )


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
    """The fields sent in vain, on a server that accepts unknown ones."""


class DeletedResponse(msgspec.Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class CompactedResponse(msgspec.Struct, kw_only=True):
    """A conversation to go on with: what users said, and one item for the rest."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[ListedItem]
    usage: ResponseUsage


class InputTokens(msgspec.Struct):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class ListedItem(msgspec.Struct, kw_only=True):
    """An item of any kind, with the fields of that kind."""

    id: str
    type: str
    status: str | UnsetType | None = UNSET
    role: Literal["user", "system", "developer", "assistant"] | UnsetType = UNSET
    content: list[dict[str, Any]] | UnsetType = UNSET
    summary: list[dict[str, Any]] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    namespace: str | UnsetType = UNSET
    arguments: str | dict[str, Any] | UnsetType = UNSET
    input: str | UnsetType = UNSET
    action: dict[str, Any] | UnsetType = UNSET
    operation: dict[str, Any] | UnsetType = UNSET
    encrypted_content: str | UnsetType = UNSET
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


class ResponseEvent(msgspec.Struct, kw_only=True, tag_field="type"):
    sequence_number: int = 0
    """Counts the events of a response from 0."""


_RESPONSE = (("response", Response),)
_ITEM = (("output_index", int), ("item", OutputItem))
_IN_ITEM = (("item_id", str), ("output_index", int))
_IN_CONTENT = (*_IN_ITEM, ("content_index", int, 0))
_IN_SUMMARY = (*_IN_ITEM, ("summary_index", int, 0))
_PART, _SUMMARY_PART = ("part", OutputText | ReasoningText), ("part", SummaryText)
_DELTA, _TEXT, _LOGPROBS = ("delta", str), ("text", str), ("logprobs", list[ChatTokenLogprob])
_PADDING = ("obfuscation", str | UnsetType, UNSET)
_NAME, _ARGUMENTS, _INPUT = ("name", str), ("arguments", str), ("input", str)

_EVENTS: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("response.created", "Created", _RESPONSE),
    ("response.queued", "Queued", _RESPONSE),
    ("response.in_progress", "InProgress", _RESPONSE),
    ("response.completed", "Completed", _RESPONSE),
    ("response.incomplete", "Incomplete", _RESPONSE),
    ("response.failed", "Failed", _RESPONSE),
    ("response.output_item.added", "ItemAdded", _ITEM),
    ("response.output_item.done", "ItemDone", _ITEM),
    ("response.content_part.added", "PartAdded", (*_IN_CONTENT, _PART)),
    ("response.content_part.done", "PartDone", (*_IN_CONTENT, _PART)),
    ("response.output_text.delta", "OutputTextDelta", (*_IN_CONTENT, _DELTA, _LOGPROBS)),
    ("response.output_text.done", "OutputTextDone", (*_IN_CONTENT, _TEXT, _LOGPROBS)),
    ("response.reasoning_text.delta", "ReasoningDelta", (*_IN_CONTENT, _DELTA)),
    ("response.reasoning_text.done", "ReasoningDone", (*_IN_CONTENT, _TEXT)),
    ("response.reasoning_summary_part.added", "SummaryPartAdded", (*_IN_SUMMARY, _SUMMARY_PART)),
    ("response.reasoning_summary_part.done", "SummaryPartDone", (*_IN_SUMMARY, _SUMMARY_PART)),
    ("response.reasoning_summary_text.delta", "SummaryDelta", (*_IN_SUMMARY, _DELTA)),
    ("response.reasoning_summary_text.done", "SummaryDone", (*_IN_SUMMARY, _TEXT)),
    ("response.function_call_arguments.delta", "ArgumentsDelta", (*_IN_ITEM, _DELTA)),
    ("response.function_call_arguments.done", "ArgumentsDone", (*_IN_ITEM, _NAME, _ARGUMENTS)),
    ("response.custom_tool_call_input.delta", "InputDelta", (*_IN_ITEM, _DELTA)),
    ("response.custom_tool_call_input.done", "InputDone", (*_IN_ITEM, _INPUT)),
    ("response.mcp_list_tools.in_progress", "McpListToolsInProgress", _IN_ITEM),
    ("response.mcp_list_tools.completed", "McpListToolsCompleted", _IN_ITEM),
    ("response.mcp_list_tools.failed", "McpListToolsFailed", _IN_ITEM),
    ("response.mcp_call.in_progress", "McpCallInProgress", _IN_ITEM),
    ("response.mcp_call_arguments.delta", "McpArgumentsDelta", (*_IN_ITEM, _DELTA)),
    ("response.mcp_call_arguments.done", "McpArgumentsDone", (*_IN_ITEM, _ARGUMENTS)),
    ("response.mcp_call.completed", "McpCallCompleted", _IN_ITEM),
    ("response.mcp_call.failed", "McpCallFailed", _IN_ITEM),
    ("error", "StreamError", (("code", str | None), ("message", str), ("param", str | None))),
)
"""The name of each event, that of its schema, and its fields after the number."""

EVENTS: dict[str, Any] = {
    name: msgspec.defstruct(
        schema, (*fields, _PADDING) if _DELTA in fields else fields, bases=(ResponseEvent,), kw_only=True, tag=name
    )
    for name, schema, fields in _EVENTS
}
"""The events by their names."""
