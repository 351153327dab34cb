"""Parser events become content blocks, one open at a time, and the events that stream them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from copy import copy
from typing import Any

import pydantic_core

from jaxllm.chat.events import Content, Event, Reasoning, ToolArguments, ToolCall
from jaxllm.serving.anthropic.ids import tool_use_id
from jaxllm.serving.anthropic.response import (
    BlockDelta,
    BlockTextDelta,
    ContentBlock,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJSONDelta,
    MessageStreamEvent,
    SignatureDelta,
    TextBlock,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)


class BlockBuilder:
    """Collects `blocks` and says what a stream must send for each event.

    White space opens no block: what stands between reasoning, text and calls would be blocks without words, which
    clients may not send back. With `show_thinking` off thinking blocks stay empty.
    """

    def __init__(self, *, show_thinking: bool = True):
        self.blocks: list[ContentBlock] = []
        self.has_unfinished_call = False
        """Some input is not what the model meant: nobody should act on it."""
        self._show_thinking = show_thinking
        self._open = False
        self._space = ""
        self._thinking: list[str] = []
        self._arguments: list[str] = []

    def add(self, events: Iterable[Event]) -> Iterator[MessageStreamEvent]:
        for event in events:
            match event:
                case Content(text):
                    yield from self._add_text(text)
                case Reasoning(text):
                    yield from self._add_thinking(text)
                case ToolCall(_, id, name):
                    yield from self._start(ToolUseBlock(id=tool_use_id(id), name=name, input={}))
                case ToolArguments(_, text):
                    self._arguments.append(text)
                    yield self._delta(InputJSONDelta(text))

    def finish(self) -> Iterator[MessageStreamEvent]:
        """Close the open block."""
        if not self._open:
            return
        match self.blocks[-1]:
            case ThinkingBlock() as block:
                block.signature = signature("".join(self._thinking))
                yield self._delta(SignatureDelta(block.signature))
            case ToolUseBlock() as block:
                block.input, finished = parse_input("".join(self._arguments))
                self.has_unfinished_call |= not finished
        yield ContentBlockStop(len(self.blocks) - 1)
        self._open, self._thinking, self._arguments = False, [], []

    def _add_text(self, text: str) -> Iterator[MessageStreamEvent]:
        if not (self._open and isinstance(self.blocks[-1], TextBlock)):
            if not text.strip():
                self._space += text
                return
            text = self._space + text
            yield from self._start(TextBlock(""))
        block = self.blocks[-1]
        assert isinstance(block, TextBlock)
        block.text += text
        yield self._delta(BlockTextDelta(text))

    def _add_thinking(self, text: str) -> Iterator[MessageStreamEvent]:
        if not (self._open and isinstance(self.blocks[-1], ThinkingBlock)):
            yield from self._start(ThinkingBlock("", ""))
        self._thinking.append(text)
        if self._show_thinking:
            block = self.blocks[-1]
            assert isinstance(block, ThinkingBlock)
            block.thinking += text
            yield self._delta(ThinkingDelta(text))

    def _start(self, block: ContentBlock) -> Iterator[MessageStreamEvent]:
        yield from self.finish()
        self.blocks.append(block)
        self._open, self._space = True, ""
        yield ContentBlockStart(len(self.blocks) - 1, copy(block))

    def _delta(self, delta: BlockDelta) -> ContentBlockDelta:
        return ContentBlockDelta(len(self.blocks) - 1, delta)


def signature(thinking: str) -> str:
    """What clients keep beside a thinking block: a digest of its text."""
    return hashlib.sha256(thinking.encode()).hexdigest()


def parse_input(arguments: str) -> tuple[dict[str, Any], bool]:
    """The input of a call, and whether it is finished; of one that was cut off, what of it there is."""
    try:
        return _object(pydantic_core.from_json(arguments)), True
    except ValueError:
        pass
    try:
        return _object(pydantic_core.from_json(arguments, allow_partial="trailing-strings")), False
    except ValueError:
        return {}, False


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value
