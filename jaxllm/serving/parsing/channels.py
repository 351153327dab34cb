"""Answers made of messages, each `header<|message|>body` and an end; the header says whom the body is for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from jaxllm.serving.parsing.calls import closing
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

MESSAGE, START = "<|message|>", "<|start|>"


class MessageReader(ABC):
    """Reads an answer from a `Source`; `in_analysis`, whether reasoning is being read, follows the text.

    Attributes:
        HEADERS: what begins a header.
        LATE_HEADERS: those of them that end text without a header too.
        ENDS: what ends a message, and is no part of it.
        TEXT_ENDS: those of them that end a message which is no call.
        calls: messages for known tools are calls.
        also_ends: what ends a body besides, and belongs to the next message.
    """

    HEADERS: ClassVar[tuple[str, ...]]
    LATE_HEADERS: ClassVar[tuple[str, ...]] = ()
    ENDS: ClassVar[tuple[str, ...]]
    TEXT_ENDS: ClassVar[tuple[str, ...]]

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

    @abstractmethod
    def is_cut_header(self, text: str) -> bool:
        """Whether the answer's end has cut a header off, which nobody is shown."""

    def answer(self, constrained_after: str = "", openings: Sequence[str] = ()) -> Scan[None]:
        """The whole answer; it may begin inside the analysis, or behind `<|start|>assistant`.

        If it does, or with one of `openings`, all messages before `constrained_after`, the end of a header, are
        reasoning.
        """
        if constrained_after and (self.in_analysis or (yield from next_of(self.source, openings))):
            self._constrained_after = constrained_after
            self.also_ends += (constrained_after,)
        if self.in_analysis:
            yield from self.body(Reasoning)
        while (yield from any_left(self.source)):
            self.source.kept.clear()
            yield from self.message()

    def message(self) -> Scan[None]:
        """A message, or text that has no header: content. Markers in the wrong place are content too."""
        source = self.source
        yield from skip_space(source)
        if end := (yield from next_of(source, self.ENDS)):
            source.take(len(end))
            return
        if not (yield from next_of(source, self.HEADERS)):
            yield from self.body(Content, self.LATE_HEADERS)
            return
        header: list[str] = []
        try:
            stop = yield from copy_until(source, (MESSAGE, *self.TEXT_ENDS), header.append)
        except UnfinishedError:
            if not self.is_cut_header("".join(header).strip()):
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
            yield from skip_space(source)
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
        try:
            ends = (*self.TEXT_ENDS, *self.also_ends, *more_ends)
            stop = yield from copy_until(source, ends, lambda text: self._say(kind, text))
            if stop in self.TEXT_ENDS:
                source.take(len(stop))
        except UnfinishedError:
            pass
        self.in_analysis = False

    def say_kept(self) -> None:
        """What was read and is no message, as content."""
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
