"""One parser for whole answers and for streams, and the reader of all choices of an answer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from jaxllm.chat.channels import Functionary, Harmony, MessageReader, Muse
from jaxllm.chat.conversation import Conversation, Tool
from jaxllm.chat.custom import InputReader
from jaxllm.chat.events import (
    CallSyntax,
    CallWriter,
    Content,
    Event,
    OutputFormats,
    ParsedOutput,
    Reasoning,
    ToolArguments,
    ToolCall,
    join_events,
)
from jaxllm.chat.source import WHITESPACE, MalformedError, Scan, Source, UnfinishedError
from jaxllm.engine.messages import TokenDelta
from jaxllm.requests.outputs import Logprob
from jaxllm.text.reasoning import CITATION_END, FUNCTIONARY, HARMONY, MUSE, ReasoningFormat

_MESSAGES: dict[str, type[MessageReader]] = {HARMONY: Harmony, MUSE: Muse, FUNCTIONARY: Functionary}
_CITED = re.compile(r"[0-9:,.\[\] ]+")


class OutputParser:
    """A parser that splits generated text into content, reasoning and tool calls as it arrives.

    Every way of splitting a text into `feed`s gives the same events but for how text is divided among them. Only a
    possible beginning of a marker or a call, or whitespace beside one, is held back; time is linear in the text.

    Content: whitespace around reasoning and calls is dropped, except between two pieces of content.

    Calls: a call of an unknown tool, or one that is malformed or ends before its arguments begin, is content; one that
    max_tokens has cut before that is left out. Once the arguments have begun, the call has been sent: malformed or cut
    arguments are left unfinished, so that no client runs such a call. Text that looked like a call and was none is
    looked through once more.

    Reasoning: ends at its closing mark, or at a call whose marker models write nowhere else. A closing mark where no
    reasoning is open is left out at the answer's beginning, and right after reasoning or a call. With
    `constrained_after`, the text that a constraint waits for, reasoning ends there alone.
    """

    def __init__(
        self, formats: OutputFormats, *, tools: Sequence[Tool], in_reasoning: bool, constrained_after: str = ""
    ):
        self._constrained_after = constrained_after
        self._in_reasoning = in_reasoning and formats.reasoning is not None
        self._source = Source()
        self._events: list[Event] = []
        self._format = formats.tools if tools else None
        schemas = {tool.name: tool.parameters or {} for tool in tools}
        new_id = self._format.new_id if self._format else str
        self._writer = CallWriter(self._source, self._events, schemas, new_id, self._left)
        self._syntaxes = self._format.syntaxes if self._format else ()
        around = formats.reasoning.around if formats.reasoning else ()
        self._wrapper = formats.reasoning.wrapper if formats.reasoning else None
        self._wrapped = False
        self._closes = formats.reasoning.closes if formats.reasoning else ()
        self._begins = _Beginnings(self._syntaxes, schemas, (*around, *(self._wrapper or ())[:1]))
        self._line_is_blank = True
        self._has_content = False
        self._after_block = False  # reasoning or a call came after the last content
        self._calls_seen = 0
        self._space: list[str] = []  # held back
        self._looked_through = 0  # up to this position of the source, for the second time
        self._thought_space: list[str] = []  # whitespace at the end of reasoning is no part of it
        self._messages: MessageReader | None = None
        if formats.channels:
            calls = self._format is not None
            self._messages = _MESSAGES[formats.channels](
                self._source, self._writer, self._events, in_analysis=self._in_reasoning, calls=calls
            )
            openings = formats.reasoning.openings if formats.reasoning else ()
            self._scan = self._messages.answer(constrained_after, openings)
        else:
            self._scan = self._answer(formats.reasoning)

    @property
    def in_reasoning(self) -> bool:
        return self._messages.in_analysis if self._messages else self._in_reasoning and not self._writer.count

    @property
    def num_tool_calls(self) -> int:
        return self._writer.count

    def feed(self, text: str) -> list[Event]:
        """The events that `text`, the next piece of the answer, adds."""
        self._source.feed(text)
        next(self._scan)
        return self._new_events()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """The events held back; the answer is over. If it was `cut`, a call's markup at its end is no content."""
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
        self._note_calls()
        if not self._after_block:
            self._events.append(Content("".join(self._space)))

    def _reasoning(self, reasoning: ReasoningFormat) -> Scan[None]:
        """The reasoning block, if the answer begins with one, or what is left of it."""
        source = self._source
        yield from source.skip_space()
        opened = yield from source.next_of(reasoning.opens)
        if opened:
            if source.position and not self._in_reasoning:
                self._constrained_after = ""  # a constraint waits only where the answer begins with the mark
            self._in_reasoning = True
            source.take(len(opened))
            yield from source.skip_space()
        if self._in_reasoning and reasoning.in_content:
            yield from self._thinking_aloud(reasoning, opened)
            return
        if self._in_reasoning:
            self._after_block = True
            yield from self._thinking(reasoning)
            self._in_reasoning = False
        elif (yield from source.next_of(reasoning.closes)):
            self._after_block = True
        else:
            self._content("".join(source.kept))
            return
        yield from self._stray_marks()

    def _stray_marks(self) -> Scan[None]:
        """Marks that would close reasoning and come right after it, or after a call, are no part of the text."""
        source = self._source
        start = source.position
        yield from source.skip_space()
        space = source.position - start
        while mark := (yield from source.next_of(self._closes)):
            space = 0
            source.take(len(mark))
            yield from source.skip_space()
        source.put_back(space)
        source.kept.clear()

    def _thinking(self, reasoning: ReasoningFormat) -> Scan[None]:
        """Reasoning up to and with its closing mark, or up to and with a call."""
        source = self._source
        calls, closes = self._reasoning_ends(reasoning)
        stops = (*closes, *calls, *reasoning.around)
        with suppress(UnfinishedError):
            while (stop := (yield from source.copy_until(stops, self._thought))) not in closes:
                if stop in reasoning.around:
                    yield from self._mark(stop)
                    continue
                yield from self._calls(calls[stop])
                if self._writer.count:
                    self._begins.add_mark(reasoning.close)
                    return
            source.take(len(stop))

    def _thinking_aloud(self, reasoning: ReasoningFormat, opened: str) -> Scan[None]:
        source = self._source
        self._content(("" if opened else reasoning.open) + "".join(source.kept))
        calls, closes = self._reasoning_ends(reasoning)
        with suppress(UnfinishedError):
            stop = yield from source.copy_until((*closes, *calls), self._content)
            if stop in closes:
                self._content(source.take(len(stop)))
        self._in_reasoning = False

    def _reasoning_ends(self, reasoning: ReasoningFormat) -> tuple[dict[str, CallSyntax], tuple[str, ...]]:
        """The calls, by their markers, and the marks that end open reasoning."""
        if self._constrained_after:
            return {}, (self._constrained_after,)
        return {syntax.marker: syntax for syntax in self._syntaxes if syntax.ends_reasoning}, reasoning.closes

    def _text(self) -> Scan[None]:
        source = self._source
        found = self._begins.search(source)
        if found is None:
            held = source.possible_start(self._begins.markers)
            self._content(source.take(len(source.text) - source.at - held))
            if source.ended:
                source.text = source.text[: source.at]
            else:
                yield
            return
        start, mark, syntax = found
        self._content(source.take(start - source.at))
        if syntax is None:
            yield from self._mark(mark)
        elif syntax.marker or self._line_is_blank:
            yield from self._calls(syntax)
        else:
            self._content(source.take(1))

    def _mark(self, mark: str) -> Scan[None]:
        """A mark, which is no part of the text where it is in its place."""
        source = self._source
        source.take(len(mark))
        if mark == CITATION_END:
            try:
                yield from source.run(_CITED)
                yield from source.expect(">")
            except MalformedError:
                self._left("".join(source.kept))
        elif self._wrapper and mark == self._wrapper[0]:
            if self._has_content:
                self._content(mark)
            else:
                self._wrapped = self._after_block = True
                self._begins.add_mark(self._wrapper[1])
        elif self._wrapped:
            self._after_block = True
        source.kept.clear()

    def _calls(self, syntax: CallSyntax) -> Scan[None]:
        """What `syntax` reads; what it could not is text, and is looked through for calls unless it was before."""
        source, writer = self._source, self._writer
        source.kept.clear()
        start, count = source.position, writer.count
        source.take(len(syntax.marker))
        try:
            while syntax.marker and (yield from _comes_again(source, syntax.marker)):
                source.take(len(syntax.marker))
            yield from syntax.scan(source, writer)
        except UnfinishedError:
            if writer.count > count or source.cut:
                source.kept.clear()
                self._after_block = True
        except MalformedError:
            pass
        writer.forget()
        kept = sum(map(len, source.kept))
        if source.position == start and not source.cut:
            kept = len(source.take(1))
        left = (len(syntax.marker) or 1) if source.position - start == kept else 0
        again = max(0, min(kept - left, source.position - self._looked_through))
        self._looked_through = max(self._looked_through, source.position)
        source.put_back(again)
        self._left("".join(source.kept))
        if writer.count > count and not again and self._closes:
            yield from self._stray_marks()

    def _left(self, text: str) -> None:
        """Text that was read as calls or as a mark and is none."""
        if self._in_reasoning and not self._writer.count:
            self._thought(text)
        else:
            self._content(text)

    def _thought(self, text: str) -> None:
        self._source.kept.clear()
        if body := text.rstrip(WHITESPACE):
            self._events.append(Reasoning("".join(self._thought_space) + body))
            self._thought_space.clear()
        self._thought_space.append(text[len(body) :])

    def _note_calls(self) -> None:
        if self._writer.count > self._calls_seen:
            self._calls_seen = self._writer.count
            self._after_block = True
            self._line_is_blank = True

    def _content(self, text: str) -> None:
        """Content that has been read. Its trailing whitespace waits for what comes next where that may be a call."""
        self._source.kept.clear()
        self._note_calls()
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
            if self._format or self._after_block or self._wrapped:
                self._space.append(space)
            else:
                self._events.append(Content(space))


class _Beginnings:
    """Where a format's calls may begin, and where marks are that are no part of the text."""

    def __init__(self, syntaxes: Sequence[CallSyntax], names: Iterable[str], marks: Sequence[str]):
        self._by_text: dict[str, CallSyntax | None] = dict.fromkeys(marks)
        for syntax in syntaxes:
            texts = [syntax.marker] if syntax.marker else list(syntax.first or {name[0] for name in names})
            self._by_text |= dict.fromkeys(texts, syntax)
        self._prepare()

    def add_mark(self, mark: str) -> None:
        self._by_text[mark] = None
        self._prepare()

    def _prepare(self) -> None:
        self.markers = [text for text, syntax in self._by_text.items() if syntax is None or syntax.marker]
        texts = sorted(self._by_text, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts))) if texts else None

    def search(self, source: Source) -> tuple[int, str, CallSyntax | None] | None:
        """Where the next is, its text, and how the call goes on that begins there; None for a mark."""
        match = self._pattern.search(source.text, source.at) if self._pattern else None
        return (match.start(), match.group(), self._by_text[match.group()]) if match else None


def _comes_again(source: Source, marker: str) -> Scan[bool]:
    """Whether `marker`, which has been read, is next once more; models write some twice."""
    start = source.position
    yield from source.skip_space()
    if (yield from source.next_of((marker,))):
        return True
    source.put_back(source.position - start)
    return False


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


Step = Sequence[tuple[int, Logprob]]
"""One token's candidates as the engine gives them: the chosen token first, then the most likely ones."""


@dataclass
class Piece:
    """What one choice gained. `logprobs` and `token_ids` are of the tokens that came, whose text may still be held."""

    index: int
    events: list[Event]
    logprobs: Sequence[Step]
    token_ids: list[int]
    finish_reason: str | None
    """"tool_calls" where it called any."""
    stop_reason: int | str | None


class AnswerReader:
    """Reads the choices of the answer to a conversation.

    Attributes:
        must_call: the answer is made of calls, whatever the model would rather say.
        reasoning_tokens: of all choices, so far.
    """

    def __init__(self, conversation: Conversation, parsers: list[OutputParser | None]):
        self.must_call = bool(conversation.tools) and conversation.tool_choice != "auto"
        self.reasoning_tokens = 0
        self._parallel_tool_calls = conversation.parallel_tool_calls
        self._parsers = parsers
        self._custom = {tool.name for tool in conversation.tools if tool.text_input is not None}
        self._inputs: dict[int, InputReader] = {}
        """By choice: of the call of a custom tool that it has come to."""

    def parse(self, index: int, delta: TokenDelta) -> Piece:
        """What a delta of one choice means; each delta is to be given once, in order."""
        parser = self._parsers[index]
        finish_reason = delta.finish_reason
        if parser is None:
            events: list[Event] = [Content(delta.text)] if delta.text else []
        else:
            in_reasoning = parser.in_reasoning
            events = parser.feed(delta.text) if delta.text else []
            if in_reasoning or parser.in_reasoning:
                self.reasoning_tokens += len(delta.token_ids)
            if finish_reason is not None:
                held = parser.finish(cut=finish_reason in ("length", "repetition"))
                events += [event for event in held if not (self.must_call and isinstance(event, Content))]
            if finish_reason == "stop" and parser.num_tool_calls:
                finish_reason = "tool_calls"
            if not self._parallel_tool_calls:
                events = [event for event in events if getattr(event, "index", 0) == 0]
            if self._custom:
                events = list(self._with_inputs(index, events, ended=finish_reason is not None))
        return Piece(index, events, delta.logprobs or (), delta.token_ids, finish_reason, delta.stop_reason)

    def _with_inputs(self, choice: int, events: Iterable[Event], *, ended: bool) -> Iterable[Event]:
        """The events with the text that a custom tool is given in place of the arguments which hold it."""
        for event in events:
            if choice in self._inputs and isinstance(event, ToolArguments):
                if text := self._inputs[choice].feed(event.text):
                    yield ToolArguments(event.index, text)
                continue
            yield from self._last_input(choice)
            if isinstance(event, ToolCall) and event.name in self._custom:
                self._inputs[choice] = InputReader(event.index)
            yield event
        if ended:
            yield from self._last_input(choice)

    def _last_input(self, choice: int) -> Iterable[Event]:
        reader = self._inputs.pop(choice, None)
        if reader is not None and (text := reader.rest()):
            yield ToolArguments(reader.index, text)

    def whole(self, index: int, deltas: Iterable[TokenDelta]) -> tuple[ParsedOutput, str | None]:
        """All of one choice, and its finish reason."""
        pieces = [self.parse(index, delta) for delta in deltas]
        return join_events(event for piece in pieces for event in piece.events), pieces[-1].finish_reason
