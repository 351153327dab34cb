"""What a parser finds in generated text, how scanners write calls, and a whole answer put together."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from jaxllm.chat.source import Emit, Source, quoted_text
from jaxllm.requests.outputs import ParsedCall


class Content(msgspec.Struct, frozen=True):
    """Text for the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text of the reasoning block, its markers left out."""

    text: str


class ToolCall(msgspec.Struct, frozen=True):
    """Call number `index` of this answer begins."""

    index: int
    id: str
    name: str


class ToolArguments(msgspec.Struct, frozen=True):
    """A fragment of the JSON text of call `index`'s arguments; fragments joined are one JSON object."""

    index: int
    text: str


Event = Content | Reasoning | ToolCall | ToolArguments


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


_ALPHANUMERIC = string.ascii_letters + string.digits


def long_id() -> str:
    return "call_" + secrets.token_hex(12)


def short_id() -> str:
    """Mistral's templates take ids of exactly nine alphanumerics."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


class CallWriter:
    """Turns what scanners find into events; a call is given with the first text of its arguments.

    Attributes:
        schemas: the known tools' parameters, by name.
        count: calls given.
    """

    def __init__(
        self,
        source: Source,
        events: list[Event],
        schemas: dict[str, dict[str, Any]],
        new_id: Callable[[], str],
        leave: Emit = lambda text: None,
    ):
        self.schemas = schemas
        self.count = 0
        self._source = source
        self._events = events
        self._new_id = new_id
        self._leave = leave
        self._given: set[str] = set()
        self._next: tuple[str, str | None] | None = None
        self._held = ""
        self._num_keys = 0

    def begin(self, name: str, call_id: str | None = None) -> None:
        """A call; `call_id` is the model's own name for it, where it has to see that again. No two calls share one."""
        self._next = name, call_id
        self._held = ""
        self._num_keys = 0

    def key(self, name: str) -> None:
        """The next argument's name, for scanners that put the object together; the argument itself is written."""
        self._held += f'{", " if self._num_keys else "{"}"{quoted_text(name)}": '
        self._num_keys += 1

    def write(self, text: str) -> None:
        """More of the arguments; what was read up to here is part of the call."""
        if self._next is not None:
            self._give(*self._next)
        self._source.kept.clear()
        self._events.append(ToolArguments(self.count - 1, self._held + text))
        self._held = ""

    def end(self) -> None:
        """No more keys come."""
        self.write("}" if self._num_keys else "{}")

    def claim(self) -> None:
        """What was read up to here is part of a call, if one has been given."""
        if self._next is None:
            self._source.kept.clear()

    def forget(self) -> None:
        """A call that has begun and is not given was none."""
        self._next = None
        self._held = ""

    def leave(self) -> None:
        """What was read since the last call is text between calls."""
        self.forget()
        text = "".join(self._source.kept)
        self._source.kept.clear()
        self._leave(text)

    def _give(self, name: str, call_id: str | None) -> None:
        if call_id is None or call_id in self._given:
            call_id = self._new_id()
        self._given.add(call_id)
        self._events.append(ToolCall(self.count, call_id, name))
        self.count += 1
        self._next = None
