"""The events of a response's stream, in the order in which a client sees them."""

from __future__ import annotations

import msgspec

from jaxllm.serving.responses.objects import OutputItem, OutputText, ReasoningText, Response, SummaryText, TokenLogprob

_encode = msgspec.json.Encoder().encode


class ResponseEvent(msgspec.Struct, kw_only=True, tag_field="type"):
    sequence_number: int = 0
    """Counts the events of a response from 0."""


class _OfResponse(ResponseEvent, kw_only=True):
    response: Response


class Created(_OfResponse, kw_only=True, tag="response.created"):
    pass


class Queued(_OfResponse, kw_only=True, tag="response.queued"):
    pass


class InProgress(_OfResponse, kw_only=True, tag="response.in_progress"):
    pass


class Completed(_OfResponse, kw_only=True, tag="response.completed"):
    pass


class Incomplete(_OfResponse, kw_only=True, tag="response.incomplete"):
    pass


class Failed(_OfResponse, kw_only=True, tag="response.failed"):
    pass


class _OfItem(ResponseEvent, kw_only=True):
    output_index: int
    item: OutputItem


class ItemAdded(_OfItem, kw_only=True, tag="response.output_item.added"):
    pass


class ItemDone(_OfItem, kw_only=True, tag="response.output_item.done"):
    pass


class _InItem(ResponseEvent, kw_only=True):
    item_id: str
    output_index: int


class _OfContent(_InItem, kw_only=True):
    content_index: int = 0


class PartAdded(_OfContent, kw_only=True, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(_OfContent, kw_only=True, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class OutputTextDelta(_OfContent, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[TokenLogprob]


class OutputTextDone(_OfContent, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(_OfContent, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(_OfContent, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class _OfSummary(_InItem, kw_only=True):
    summary_index: int = 0


class SummaryPartAdded(_OfSummary, kw_only=True, tag="response.reasoning_summary_part.added"):
    part: SummaryText


class SummaryPartDone(_OfSummary, kw_only=True, tag="response.reasoning_summary_part.done"):
    part: SummaryText


class SummaryDelta(_OfSummary, kw_only=True, tag="response.reasoning_summary_text.delta"):
    delta: str


class SummaryDone(_OfSummary, kw_only=True, tag="response.reasoning_summary_text.done"):
    text: str


class ArgumentsDelta(_InItem, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_InItem, kw_only=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class McpListToolsInProgress(_InItem, kw_only=True, tag="response.mcp_list_tools.in_progress"):
    pass


class McpListToolsCompleted(_InItem, kw_only=True, tag="response.mcp_list_tools.completed"):
    pass


class McpListToolsFailed(_InItem, kw_only=True, tag="response.mcp_list_tools.failed"):
    pass


class McpCallInProgress(_InItem, kw_only=True, tag="response.mcp_call.in_progress"):
    pass


class McpArgumentsDelta(_InItem, kw_only=True, tag="response.mcp_call_arguments.delta"):
    delta: str


class McpArgumentsDone(_InItem, kw_only=True, tag="response.mcp_call_arguments.done"):
    arguments: str


class McpCallCompleted(_InItem, kw_only=True, tag="response.mcp_call.completed"):
    pass


class McpCallFailed(_InItem, kw_only=True, tag="response.mcp_call.failed"):
    pass


class StreamError(ResponseEvent, kw_only=True, tag="error"):
    code: str | None
    message: str
    param: str | None


ResponseStreamEvent = (
    Created | Queued | InProgress | Completed | Incomplete | Failed | ItemAdded | ItemDone | PartAdded | PartDone
    | OutputTextDelta | OutputTextDone | ReasoningDelta | ReasoningDone | SummaryPartAdded | SummaryPartDone
    | SummaryDelta | SummaryDone | ArgumentsDelta | ArgumentsDone | McpListToolsInProgress | McpListToolsCompleted
    | McpListToolsFailed | McpCallInProgress | McpArgumentsDelta | McpArgumentsDone | McpCallCompleted | McpCallFailed
    | StreamError
)  # fmt: skip


def server_sent(event: ResponseEvent) -> bytes:
    """b'event: response.created\\ndata: {"type":"response.created",…}\\n\\n'"""
    return b"event: " + str(event.__struct_config__.tag).encode() + b"\ndata: " + _encode(event) + b"\n\n"
