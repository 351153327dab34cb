"""Answers of gpt-oss, functionary and Muse: messages with headers that say whom each is for."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar

from jaxllm.chat.calls import closing, named_arguments
from jaxllm.chat.elements import invoked_calls
from jaxllm.chat.events import CallWriter, Content, Event, Reasoning, Tags, ToolFormat, Written
from jaxllm.chat.source import MalformedError, Scan, Source, UnfinishedError
from jaxllm.text.reasoning import FUNCTIONARY, HARMONY, HARMONY_TOKENS, MUSE, MUSE_TOKENS

MESSAGE, START = "<|message|>", "<|start|>"


class MessageReader(ABC):
    """Reads an answer from a `Source`; `in_analysis` is whether reasoning is being read.

    Attributes:
        HEADERS: what begins a header.
        LATE_HEADERS: those of them that end text without a header too.
        ENDS: what ends a message, and is no part of it.
        TEXT_ENDS: those of them that end a message which is no call.
        CUT_HEADER: a header that the answer's end has cut off, which is not shown.
        also_ends: what ends a body besides, and belongs to the next message.
    """

    HEADERS: ClassVar[tuple[str, ...]]
    LATE_HEADERS: ClassVar[tuple[str, ...]] = ()
    ENDS: ClassVar[tuple[str, ...]]
    TEXT_ENDS: ClassVar[tuple[str, ...]]
    CUT_HEADER: ClassVar[re.Pattern[str]]

    def __init__(self, source: Source, writer: CallWriter, events: list[Event], *, in_analysis: bool, calls: bool):
        self.in_analysis = in_analysis
        self.source = source
        self.writer = writer
        self.calls = calls
        self.also_ends: tuple[str, ...] = (START,)
        self._events = events
        self._constrained_after = ""
        self._said: set[type[Event]] = set()
        self._begins = True

    @abstractmethod
    def addressed(self, header: str) -> Scan[None]:
        """The body of a message whose header has been read."""

    def answer(self, constrained_after: str = "", openings: Sequence[str] = ()) -> Scan[None]:
        """The whole answer; what comes before `constrained_after` is reasoning, if it begins as such or with an
        opening.
        """
        if constrained_after and (self.in_analysis or (yield from self.source.next_of(openings))):
            self._constrained_after = constrained_after
            self.also_ends += (constrained_after,)
        if self.in_analysis:
            yield from self.body(Reasoning)
        while (yield from self.source.any_left()):
            self.source.kept.clear()
            yield from self.message()

    def message(self) -> Scan[None]:
        """A message, or text without a header, which is content."""
        source = self.source
        yield from source.skip_space()
        if end := (yield from source.next_of(self.ENDS)):
            source.take(len(end))
            return
        if not (yield from source.next_of(self.HEADERS)):
            yield from self.body(Content, self.LATE_HEADERS)
            return
        header: list[str] = []
        try:
            stop = yield from source.copy_until((MESSAGE, *self.TEXT_ENDS), header.append)
        except UnfinishedError:
            if not self.CUT_HEADER.fullmatch("".join(header).strip()):
                self.say_kept()
            return
        if stop != MESSAGE:
            self.say_kept()
            return
        source.take(len(stop))
        if "".join(source.kept).endswith(self._constrained_after):
            self._constrained_after = ""
        yield from self.addressed("".join(header))

    def call(self, scan: Scan[None]) -> Scan[None]:
        """The body, which `scan` reads; what is malformed is content, with its header where no call has begun."""
        source, writer = self.source, self.writer
        before = writer.count
        try:
            yield from source.skip_space()
            yield from scan
            yield from closing(source, writer, *self.ENDS)
            source.kept.clear()
        except UnfinishedError:
            if writer.count > before or source.cut:
                source.kept.clear()
            self.say_kept()
        except MalformedError:
            yield from self.body(Content)
        writer.forget()

    def body(self, kind: type[Content] | type[Reasoning] | None, more_ends: Sequence[str] = ()) -> Scan[None]:
        """Text up to an end; what was read before it and not cleared comes with it. None says nothing of it."""
        source = self.source
        if kind is Content and self._constrained_after:
            kind = Reasoning
        self._begins = True
        self.in_analysis = kind is Reasoning
        self._say(kind, "".join(source.kept))
        with suppress(UnfinishedError):
            ends = (*self.TEXT_ENDS, *self.also_ends, *more_ends)
            stop = yield from source.copy_until(ends, lambda text: self._say(kind, text))
            if stop in self.TEXT_ENDS:
                source.take(len(stop))
        self.in_analysis = False

    def say_kept(self) -> None:
        self._begins = True
        self._say(Reasoning if self._constrained_after else Content, "".join(self.source.kept))

    def _say(self, kind: type[Content] | type[Reasoning] | None, text: str) -> None:
        """Messages of one kind are lines of their own."""
        self.source.kept.clear()
        if text and kind is not None:
            line = "\n" if self._begins and kind in self._said else ""
            self._begins = False
            self._said.add(kind)
            self._events.append(kind(line + text))


_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_FUNCTIONS = "functions."
_NOBODY = "assistant"
"""A recipient that is no function; one of this name is functions.assistant."""


class Harmony(MessageReader):
    """gpt-oss's answers: messages on channels, each `header<|message|>body<|end|>`.

    A header is `<|channel|>analysis` or ` to=functions.name<|channel|>commentary<|constrain|>json`, after the first
    with `<|start|>assistant` before it. The analysis is reasoning, what goes to a known function a call, the rest
    content.
    """

    HEADERS = (START, "<|channel|>", "<|constrain|>", MESSAGE, "to=")
    LATE_HEADERS = ("<|channel|>",)
    ENDS = ("<|end|>", "<|return|>", "<|call|>")
    TEXT_ENDS = ENDS[:2]
    CUT_HEADER = re.compile(
        r"(<\|start\|>)?\w*( ?to=[^\s<]*)?(<\|channel\|>\w*)?( ?to=[^\s<]*)? ?(<\|constrain\|>\w*)?(<\|?\w*\|?)?"
    )

    def addressed(self, header: str) -> Scan[None]:
        channels, recipients = _CHANNEL.findall(header), _RECIPIENT.findall(header)
        recipient = recipients[-1] if recipients else _NOBODY
        name = recipient.removeprefix(_FUNCTIONS)
        if self.calls and recipient != _NOBODY and name in self.writer.schemas:
            yield from self.call(self._arguments(name))
        elif recipient != _NOBODY:
            yield from self.body(Content)
        else:
            self.source.kept.clear()
            yield from self.body(Reasoning if channels[-1:] == ["analysis"] else Content)

    def _arguments(self, name: str) -> Scan[None]:
        source, writer = self.source, self.writer
        if not (yield from source.any_left()) and not source.cut:  # <|call|> ended the answer
            writer.begin(name)
            writer.end()
        else:
            yield from named_arguments(source, writer, name, ends=self.ENDS)


SEPARATOR = ">>>"
_EVERYBODY = "all"


class Functionary(MessageReader):
    """functionary v3.2's answers: messages with `>>>` between them, each a name, a newline and the body.

    What is for `all` is content; what is for a known function is the JSON text of its arguments.
    """

    HEADERS = ENDS = TEXT_ENDS = ()

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        names = (_EVERYBODY, *(self.writer.schemas if self.calls else ()))
        later_headers = [f"{SEPARATOR}{name}\n" for name in names]
        self.also_ends = tuple(space + header for space in ("\n", "") for header in later_headers)
        self._headers = (*later_headers, *(f"{name}\n" for name in names))
        self._first = True

    def message(self) -> Scan[None]:
        source = self.source
        yield from source.skip_space()
        headers = self._headers if self._first else self._headers[: len(self._headers) // 2]
        header = yield from source.next_of(headers)
        rest = source.text[source.at :]
        if not header and source.cut and any(header.startswith(rest) for header in headers):
            source.take(len(rest))
            return
        self._first = False
        if header:
            source.take(len(header))
            yield from self.addressed(header)
        else:
            yield from self.body(Content)

    def addressed(self, header: str) -> Scan[None]:
        source = self.source
        name = header.removeprefix(SEPARATOR).removesuffix("\n")
        if name == _EVERYBODY:
            source.kept.clear()
            yield from self.body(Content)
        else:
            yield from self.call(named_arguments(source, self.writer, name))
            yield from source.skip_space()
            source.kept.clear()


ATEM = "atem:"
"""The beginning of the tags' names."""
ATEM_CALLS, ATEM_CALLS_END = f"<{ATEM}function_calls>", f"</{ATEM}function_calls>"
_KINDS = {"self": Reasoning, "user": Content, "commentary": Content, "developer": None}


class Muse(MessageReader):
    """Muse's answers: messages, each `to=NAME<|message|>body` and `<|eom|>`, or `<|eot|>` at the answer's end.

    What the model writes to itself is reasoning; what it writes to the user or as commentary is content; what goes to
    the developer is not shown; a message to a tool holds calls between tags. `<|start|>assistant` may be missing.
    """

    HEADERS = (START, MESSAGE, "to=")
    ENDS = ("<|eom|>", "<|eot|>")
    TEXT_ENDS = ENDS
    CUT_HEADER = re.compile(r"(<\|start\|>)?\w*( ?to=[^\s<]*)?(<\|?\w*\|?)?")

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        tools = [form for name in self.writer.schemas for form in (name, f"{name}.{name}")]
        headers = [f"to={recipient}{MESSAGE}" for recipient in (*_KINDS, *tools)]
        self.also_ends += tuple(space + header for space in (" ", "") for header in headers)

    def addressed(self, header: str) -> Scan[None]:
        recipients = _RECIPIENT.findall(header)
        recipient = recipients[-1] if recipients else "self"
        if recipient in _KINDS:
            self.source.kept.clear()
            yield from self.body(_KINDS[recipient])
        elif self.calls:
            yield from self.call(self._calls())
        else:
            yield from self.body(Content)

    def _calls(self) -> Scan[None]:
        source = self.source
        yield from source.literal(ATEM_CALLS)
        yield from source.skip_space()
        yield from invoked_calls(
            source, self.writer, prefix=ATEM, end=ATEM_CALLS_END, doubled=True, after=(*self.ENDS, *self.also_ends)
        )


HARMONY_FORMAT = ToolFormat(
    HARMONY,
    (),
    Written(
        "", " to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>", "", "<|call|><|start|>assistant"
    ),
    thought=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    detect=(("<|channel|>analysis",),),
    markers=HARMONY_TOKENS,
)
FUNCTIONARY_FORMAT = ToolFormat(
    FUNCTIONARY, (), Written("", "{name}\n", "", SEPARATOR), detect=((f"{SEPARATOR}all", f"{SEPARATOR}${{recipient}}"),)
)
MUSE_FORMAT = ToolFormat(
    MUSE,
    (),
    Written(
        "",
        f' to={{name}}<|message|>{ATEM_CALLS}\n<{ATEM}invoke name="{{name}}">\n',
        f"</{ATEM}invoke>\n{ATEM_CALLS_END}",
        "<|eom|><|start|>assistant",
    ),
    thought=(" to=self<|message|>", "<|eom|><|start|>assistant"),
    arguments=Tags((f'<{ATEM}parameter name="{{key}}">',), f"</{ATEM}parameter>"),
    detect=((ATEM_CALLS,),),
    markers=MUSE_TOKENS,
)
