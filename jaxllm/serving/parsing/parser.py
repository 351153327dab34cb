"""One parser for whole answers and for streams."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter

import msgspec

from jaxllm.serving.conversation import Tool
from jaxllm.serving.parsing.calls import CallWriter
from jaxllm.serving.parsing.events import Content, Event, Reasoning, ToolArguments, ToolCall
from jaxllm.serving.parsing.harmony import Harmony
from jaxllm.serving.parsing.output_format import CallSyntax, OutputFormats
from jaxllm.serving.parsing.source import (
    WHITESPACE,
    MalformedError,
    Scan,
    Source,
    UnfinishedError,
    begun_marker,
    copy_until,
    possible_start,
    skip_space,
)
from jaxllm.text.reasoning import ReasoningFormat


class OutputParser:
    """Splits generated text into content, reasoning and tool calls as it arrives.

    Every way of splitting a text into `feed`s gives the same events but for how text is divided among them. Only what
    may still become a marker, the beginning of a call, or whitespace beside one is held back; time is linear in the
    text.

    Content: whitespace around reasoning and calls is dropped, except between two pieces of content, where it keeps them
    apart. Whitespace at the beginning of an answer without either, and at its end, is kept.

    Calls: a call of an unknown tool, or one that is malformed or ends before its arguments begin, is content, markers
    and all; one that max_tokens has cut before that is left out. Once the arguments have begun, the call has been
    sent: where they turn out malformed they end and what follows is content, and where the answer ends they stay
    unfinished, as they do at OpenAI's. In both cases they are not the JSON text of an object, so that no client runs a
    call that the model did not finish.
    """

    def __init__(
        self,
        formats: OutputFormats,
        *,
        tools: Sequence[Tool] | None,
        in_reasoning: bool,
        parse_tools: bool,
    ):
        self._in_reasoning = in_reasoning and formats.reasoning is not None
        self._source = Source()
        self._events: list[Event] = []
        self._format = formats.tools if parse_tools and tools else None
        schemas = {tool.name: tool.parameters or {} for tool in tools or ()}
        self._writer = CallWriter(self._source, self._events, schemas, self._format.new_id if self._format else str)
        syntaxes = self._format.syntaxes if self._format else ()
        around = formats.reasoning.around if formats.reasoning else ()
        self._begins = _Beginnings(syntaxes, schemas, around) if syntaxes or around else None
        self._line_is_blank = True
        self._has_content = False
        self._after_block = False  # reasoning or a call came after the last content
        self._space: list[str] = []  # held back
        self._harmony: Harmony | None = None
        if formats.has_channels:
            calls = self._format is not None
            self._harmony = Harmony(
                self._source, self._writer, self._events, in_analysis=self._in_reasoning, calls=calls
            )
        self._scan = self._harmony.answer() if self._harmony else self._answer(formats.reasoning)

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next is reasoning."""
        return self._harmony.in_analysis if self._harmony else self._in_reasoning

    @property
    def num_tool_calls(self) -> int:
        """Calls begun so far."""
        return self._writer.count

    def feed(self, text: str) -> list[Event]:
        """What `text`, the next piece of the answer, adds."""
        self._source.feed(text)
        next(self._scan)
        return self._new_events()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """What was held back; the answer is over. Where it was `cut`, a call's markup at its end is no content."""
        self._source.ended = True
        self._source.cut = cut
        next(self._scan, None)
        return self._new_events()

    def _new_events(self) -> list[Event]:
        events = list(_merged(self._events))
        self._events.clear()
        return events

    def _answer(self, reasoning: ReasoningFormat | None) -> Scan[None]:
        if reasoning is not None:
            yield from self._reasoning(reasoning)
        source = self._source
        while not source.ended or source.at < len(source.text):
            yield from self._text()
        if not self._after_block:
            self._events.append(Content("".join(self._space)))

    def _reasoning(self, reasoning: ReasoningFormat) -> Scan[None]:
        """The reasoning block, if the answer begins with one."""
        source = self._source
        yield from skip_space(source)
        opened = yield from _next_is(source, reasoning.open)
        if not self._in_reasoning and not opened:
            self._content("".join(source.kept))
            return
        self._in_reasoning = True
        if opened:
            source.take(len(reasoning.open))
            yield from skip_space(source)
        try:
            yield from copy_until(source, (reasoning.close,), _TrailingSpaceLeftOut(source, self._events))
            source.take(len(reasoning.close))
            self._in_reasoning = False
        except UnfinishedError:
            pass
        self._after_block = True

    def _text(self) -> Scan[None]:
        """Content up to the next call, and that call."""
        source = self._source
        found = self._begins.search(source) if self._begins else None
        if found is None:
            held = possible_start(source, self._begins.markers) if self._begins else 0
            if source.cut and self._begins:
                self._drop_begun(self._begins.markers)
            self._content(source.take(len(source.text) - source.at - held))
            if not source.ended:
                yield
            return
        start, mark, syntax = found
        self._content(source.take(start - source.at))
        if syntax is None:
            source.take(len(mark))
            source.kept.clear()
        elif syntax.marker or self._line_is_blank:
            yield from self._calls(syntax)
        else:
            self._content(source.take(1))

    def _drop_begun(self, markers: Sequence[str]) -> None:
        """Leave out the beginning of a marker at the text's end, unless a word or one character is all there is."""
        source = self._source
        count = begun_marker(source, markers)
        if count > 1 and not source.text[-count:].isalnum():
            source.text = source.text[:-count]

    def _calls(self, syntax: CallSyntax) -> Scan[None]:
        """What `syntax` reads; what it could not is content."""
        source, writer = self._source, self._writer
        source.kept.clear()
        source.take(len(syntax.marker))
        calls_before = writer.count
        try:
            yield from syntax.scan(source, writer)
        except UnfinishedError:
            if writer.count > calls_before or source.cut:
                source.kept.clear()
                self._after_block = True
        except MalformedError:
            pass
        if writer.count > calls_before:
            self._after_block = True
            self._line_is_blank = True
        elif not source.kept and not source.cut:
            source.take(1)
        self._content("".join(source.kept))

    def _content(self, text: str) -> None:
        """Content that has been read. Its trailing whitespace waits for what comes next where that may be a call."""
        self._source.kept.clear()
        if not text:
            return
        line = text.rfind("\n") + 1
        self._line_is_blank = (line > 0 or self._line_is_blank) and not text[line:].strip(WHITESPACE)
        body = text.rstrip(WHITESPACE)
        if body:
            body = "".join(self._space) + body
            self._space.clear()
            if self._after_block and not self._has_content:
                body = body.lstrip(WHITESPACE)
            self._events.append(Content(body))
            self._has_content = True
            self._after_block = False
        if space := text[len(text.rstrip(WHITESPACE)) :]:
            if self._format or self._after_block:
                self._space.append(space)
            else:
                self._events.append(Content(space))


class _Beginnings:
    """Where a format's calls may begin, and where marks are that are no part of the text."""

    def __init__(self, syntaxes: Sequence[CallSyntax], names: Iterable[str], around: Sequence[str]):
        self.markers = [*(syntax.marker for syntax in syntaxes if syntax.marker), *around]
        self._by_text: dict[str, CallSyntax | None] = dict.fromkeys(around)
        for syntax in syntaxes:
            texts = [syntax.marker] if syntax.marker else list(syntax.first or {name[0] for name in names})
            self._by_text |= dict.fromkeys(texts, syntax)
        self._pattern = re.compile("|".join(map(re.escape, sorted(self._by_text, key=len, reverse=True))))

    def search(self, source: Source) -> tuple[int, str, CallSyntax | None] | None:
        """Where the next is, its text, and how the call goes on that begins there; None for a mark."""
        match = self._pattern.search(source.text, source.at)
        return (match.start(), match.group(), self._by_text[match.group()]) if match else None


class _TrailingSpaceLeftOut:
    """Reasoning, whose whitespace at the end is not part of it."""

    def __init__(self, source: Source, events: list[Event]):
        self._source = source
        self._events = events
        self._space: list[str] = []

    def __call__(self, text: str) -> None:
        self._source.kept.clear()
        body = text.rstrip(WHITESPACE)
        if body:
            self._events.append(Reasoning("".join(self._space) + body))
            self._space.clear()
        if len(body) < len(text):
            self._space.append(text[len(body) :])


def _next_is(source: Source, marker: str) -> Scan[bool]:
    """Whether `marker` comes next; it is not consumed."""
    while (found := source.starts_with(marker)) is None and not source.ended:
        yield
    return bool(found)


def _merged(events: Iterable[Event]) -> Iterable[Event]:
    """Neighbouring texts of one kind as one event, empty ones left out."""
    for kind, group in groupby(events, key=type):
        if kind is ToolCall:
            yield from group
        elif kind is ToolArguments:
            for index, fragments in groupby(group, key=attrgetter("index")):
                yield ToolArguments(index, "".join(map(attrgetter("text"), fragments)))
        elif text := "".join(map(attrgetter("text"), group)):
            yield kind(text)


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
