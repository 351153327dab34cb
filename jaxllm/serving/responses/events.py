"""The events of a response's stream, as a table of their names and fields."""

from __future__ import annotations

from typing import Any

import msgspec

from jaxllm.serving.openai.answers import ChatTokenLogprob
from jaxllm.serving.responses.objects import OutputItem, OutputText, ReasoningText, Response, SummaryText


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
_NAME, _ARGUMENTS = ("name", str), ("arguments", str)

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

EVENTS: dict[str, type[ResponseEvent]] = {
    name: msgspec.defstruct(schema, fields, bases=(ResponseEvent,), kw_only=True, tag=name)
    for name, schema, fields in _EVENTS
}
"""The events by their names."""
