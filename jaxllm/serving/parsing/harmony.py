"""gpt-oss's answers: messages on channels, each `header<|message|>body<|end|>`.

A header names its channel and perhaps a recipient: `<|channel|>analysis`, or ` to=functions.name<|channel|>commentary
<|constrain|>json`; each but the first begins with `<|start|>assistant`. The analysis is reasoning, what goes to a known
function is a call of it, the rest is content.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxllm.serving.parsing.calls import closing, named_arguments
from jaxllm.serving.parsing.events import Content, Event, Reasoning
from jaxllm.serving.parsing.source import (
    MalformedError,
    Scan,
    Source,
    UnfinishedError,
    any_left,
    copy_until,
    next_of,
    skip_space,
)
from jaxllm.serving.parsing.writer import CallWriter

_HEADERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "to=")
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_BODY_ENDS = ("<|end|>", "<|return|>", "<|start|>")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_CUT_HEADER = re.compile(
    r"(<\|start\|>)?\w*( ?to=[^\s<]*)?(<\|channel\|>\w*)?( ?to=[^\s<]*)? ?(<\|constrain\|>\w*)?(<\|?\w*\|?)?"
)
"""One that the answer's end has cut off: nobody is shown its markers."""
_FUNCTIONS = "functions."
_NOBODY = "assistant"
"""A recipient that is no function; one of this name is functions.assistant."""


class Harmony:
    """Reads an answer from a `Source`; `in_analysis` follows the text."""

    def __init__(self, source: Source, writer: CallWriter, events: list[Event], *, in_analysis: bool, calls: bool):
        self.in_analysis = in_analysis
        self._source = source
        self._writer = writer
        self._events = events
        self._calls = calls
        self._said: set[type[Event]] = set()
        self._begins = True

    def answer(self) -> Scan[None]:
        """The whole answer; it may begin inside the analysis, or behind `<|start|>assistant`."""
        if self.in_analysis:
            yield from self._body(Reasoning)
        while (yield from any_left(self._source)):
            self._source.kept.clear()
            yield from self._message()

    def _message(self) -> Scan[None]:
        """A message, or text that has no header: content. Markers in the wrong place are content too."""
        source = self._source
        yield from skip_space(source)
        if end := (yield from next_of(source, _ENDS)):
            source.take(len(end))
            return
        if not (yield from next_of(source, _HEADERS)):
            yield from self._body(Content, (*_BODY_ENDS, "<|channel|>"))
            return
        header: list[str] = []
        try:
            stop = yield from copy_until(source, ("<|message|>", *_BODY_ENDS[:2]), header.append)
        except UnfinishedError:
            if not _CUT_HEADER.fullmatch("".join(header).strip()):
                self._say_kept()
            return
        if stop != "<|message|>":
            self._say_kept()
            return
        source.take(len(stop))
        yield from self._addressed("".join(header))

    def _addressed(self, header: str) -> Scan[None]:
        channels, recipients = _CHANNEL.findall(header), _RECIPIENT.findall(header)
        recipient = recipients[-1] if recipients else _NOBODY
        name = recipient.removeprefix(_FUNCTIONS)
        if self._calls and recipient != _NOBODY and name in self._writer.schemas:
            yield from self._call(name)
        elif recipient != _NOBODY:
            yield from self._body(Content)
        else:
            self._source.kept.clear()
            yield from self._body(Reasoning if channels[-1:] == ["analysis"] else Content)

    def _call(self, name: str) -> Scan[None]:
        """The arguments; what is malformed is content, with its header where the call has not begun."""
        source, writer = self._source, self._writer
        before = writer.count
        try:
            yield from skip_space(source)
            if not (yield from any_left(source)) and not source.cut:  # <|call|> ended the answer
                writer.begin(name)
                writer.end()
            else:
                yield from named_arguments(source, writer, name, ends=_ENDS)
            yield from closing(source, writer, *_ENDS)
            source.kept.clear()
        except UnfinishedError:
            if writer.count > before or source.cut:
                source.kept.clear()
            self._say_kept()
        except MalformedError:
            yield from self._body(Content)
        writer.forget()

    def _body(self, kind: type[Content] | type[Reasoning], ends: Sequence[str] = _BODY_ENDS) -> Scan[None]:
        """Text up to one of `ends`; what was read before it and not cleared comes with it."""
        source = self._source
        self._begins = True
        self.in_analysis = kind is Reasoning
        self._say(kind, "".join(source.kept))
        try:
            stop = yield from copy_until(source, ends, lambda text: self._say(kind, text))
            if stop in _ENDS:
                source.take(len(stop))
        except UnfinishedError:
            pass
        self.in_analysis = False

    def _say_kept(self) -> None:
        self._begins = True
        self._say(Content, "".join(self._source.kept))

    def _say(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        """Messages of one kind are lines of their own."""
        self._source.kept.clear()
        if text:
            line = "\n" if self._begins and kind in self._said else ""
            self._begins = False
            self._said.add(kind)
            self._events.append(kind(line + text))
