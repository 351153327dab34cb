"""Events of an answer, the writer of calls, and what a format of answers is."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec

from jaxllm.chat.source import Emit, Scan, Source, quoted_text
from jaxllm.requests.outputs import ParsedCall
from jaxllm.text.reasoning import CHANNELS, ReasoningFormat


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
Schemas = dict[str, dict[str, Any]]


class ParsedOutput(msgspec.Struct):
    """An answer's parts; None where there is no such text."""

    content: str | None
    reasoning: str | None
    tool_calls: list[ParsedCall]


def join_events(events: Iterable[Event]) -> ParsedOutput:
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


def long_id() -> str:
    return "call_" + secrets.token_hex(12)


def random_id(characters: str, length: int) -> str:
    return "".join(secrets.choice(characters) for _ in range(length))


short_id = partial(random_id, string.ascii_letters + string.digits, 9)
"""Mistral's ids are exactly nine alphanumerics."""


class CallWriter:
    """Turns what scanners find into events; a call is given with the first text of its arguments.

    Attributes:
        schemas: the known tools' parameters, by name.
        count: calls given.
    """

    def __init__(self, source: Source, events: list[Event], schemas: Schemas, new_id: Callable[[], str], leave: Emit):
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
            name, call_id = self._next
            if call_id is None or call_id in self._given:
                call_id = self._new_id()
            self._given.add(call_id)
            self._events.append(ToolCall(self.count, call_id, name))
            self.count += 1
            self._next = None
        self._source.kept.clear()
        self._events.append(ToolArguments(self.count - 1, self._held + text))
        self._held = ""

    def end(self) -> None:
        self.write("}" if self._num_keys else "{}")

    def claim(self) -> None:
        """What was read up to here is part of a call, if one was given."""
        if self._next is None:
            self._source.kept.clear()

    def forget(self) -> None:
        self._next = None
        self._held = ""

    def leave(self) -> None:
        """What was read since the last call is text between calls."""
        self.forget()
        text = "".join(self._source.kept)
        self._source.kept.clear()
        self._leave(text)


CallScan = Callable[[Source, CallWriter], Scan[None]]
Groups = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class CallSyntax:
    """One way in which a format's calls begin.

    Attributes:
        scan: reads what follows `marker`.
        marker: text that begins calls anywhere; "" for calls that begin a line without one.
        first: without a marker, the characters that a call begins with; "" stands for the tools' names.
        ends_reasoning: a call inside open reasoning ends that.
    """

    scan: CallScan
    marker: str = ""
    first: str = ""
    ends_reasoning: bool = False


@dataclass(frozen=True)
class Tags:
    """How raw arguments are written, each between tags of its own.

    Attributes:
        open: the opening tag, or its parts, between which a newline may come; with {key} in it, and {string} where it
            says whether the value is text ("true") or JSON ("false"), or {type} where it says which type it has.
        close: the closing tag, which may have {key} in it.
        also_ends: a regular expression of other text that ends a value, so that none can have it.
        exact: newlines are where `open` and `close` have them, and `between` is behind each argument; else they may
            come.
        literal: what stands around a text that holds one of the characters in `markup`.
    """

    open: tuple[str, ...]
    close: str
    also_ends: str = ""
    exact: bool = False
    between: str = "\n"
    literal: tuple[str, str] | None = None
    markup: str = ""


class Written(NamedTuple):
    """The text around the arguments of calls: start call end [between call end]… stop.

    `call` has {name} in it, {index} where calls are numbered, and {id} where the model names them itself.
    """

    start: str
    call: str
    end: str = ""
    between: str = ""
    stop: str = ""


@dataclass(frozen=True)
class ToolFormat:
    """One format of tool calls.

    Attributes:
        quote: what stands around strings in Gemma's notation.
        thought: what opens and closes reasoning that may come before all this.
        marked: the `mark` where it is not the first marker.
        detect: groups of strings, all of one of which a template of the format has; by default the first marker.
        markers: strings that may be special tokens and that the parser must see.
        variant_of: the format in whose place a template that speaks this one gets this.
    """

    name: str
    syntaxes: tuple[CallSyntax, ...]
    written: Written
    arguments: Literal["json", "gemma", "pythonic"] | Tags = "json"
    quote: str = ""
    thought: tuple[str, str] | None = None
    marked: str = ""
    detect: Groups = ()
    markers: tuple[str, ...] = ()
    new_id: Callable[[], str] = long_id
    variant_of: str = ""

    @property
    def first_marker(self) -> str:
        return self.syntaxes[0].marker if self.syntaxes else ""

    @property
    def mark(self) -> str:
        """The beginning of start + call that only calls have; "" if text may look alike."""
        marker = self.first_marker
        return self.marked or (marker if (self.written.start + self.written.call).startswith(marker) else "")

    def head(self, name: str, index: int = 0) -> str:
        call = self.written.call.replace("{index}", str(index)).replace("{id}", f"call{index:06}")
        return call.replace("{name}", name)

    def is_spoken(self, template: str) -> bool:
        groups = self.detect or ((self.first_marker,),)
        return any(all(text in template for text in group) for group in groups)


@dataclass(frozen=True)
class OutputFormats:
    """What an answer is parsed for; None parses nothing."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None

    @property
    def markers(self) -> tuple[str, ...]:
        """Strings that the parser must see in the text, although they may be special tokens."""
        known = self.reasoning
        reasoning = (known.open, known.close, *known.special) if known else ()
        return (*reasoning, *(self.tools.markers if self.tools else ()))

    @property
    def channels(self) -> str:
        """The name of the format whose answers are messages; "" where they are one text."""
        names = {known.name for known in (self.tools, self.reasoning) if known is not None}
        return next((name for name in CHANNELS if name in names), "")
