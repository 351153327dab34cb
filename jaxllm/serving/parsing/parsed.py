"""All of an answer's events put together."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from jaxllm.serving.parsing.events import Content, Event, Reasoning, ToolArguments, ToolCall


class ParsedCall(msgspec.Struct):
    """A call of an answer that is complete."""

    id: str
    name: str
    arguments: str
    """JSON text of an object; what there is of it where the answer broke off or was malformed inside."""


class ParsedOutput(msgspec.Struct):
    """An answer's parts; None where there is no such text."""

    content: str | None
    reasoning: str | None
    tool_calls: list[ParsedCall]


def join_events(events: Iterable[Event]) -> ParsedOutput:
    """All the events of one answer as its parts."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[ToolCall, list[str]]] = []
    for event in events:
        match event:
            case Content(text=text):
                content.append(text)
            case Reasoning(text=text):
                reasoning.append(text)
            case ToolCall():
                calls.append((event, []))
            case ToolArguments(index=index, text=text):
                calls[index][1].append(text)
    parsed = [ParsedCall(call.id, call.name, "".join(arguments)) for call, arguments in calls]
    return ParsedOutput("".join(content) or None, "".join(reasoning) or None, parsed)
