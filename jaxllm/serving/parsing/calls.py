"""Scanners of tool calls written with JSON: {"name": …, "arguments": {…}}, or a name before its arguments.

Each consumes a call from a `Source` and tells a `CallWriter`. It raises MalformedError where the text is no call of a
known tool.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jaxllm.serving.parsing.events import Event, ToolArguments, ToolCall
from jaxllm.serving.parsing.json_text import json_object, json_value, object_in_string
from jaxllm.serving.parsing.source import (
    Emit,
    MalformedError,
    Scan,
    Source,
    UnfinishedError,
    any_left,
    expect,
    literal,
    one_of,
    peek,
    skip_space,
)

_NAME_KEYS = ('"name"', '"function"', '"tool_name"')
_ARGUMENT_KEYS = ('"arguments"', '"parameters"')
_OTHER_KEYS = ('"type"', '"id"', '"index"', '"tool_call_id"')
_NAME = re.compile(r"[a-zA-Z0-9_.-]+")
_CALL_ID = re.compile(r"[a-zA-Z0-9_-]+")
_NUMBER = re.compile(r"[0-9]+")
_ALPHANUMERIC = string.ascii_letters + string.digits


def long_id() -> str:
    return "call_" + secrets.token_hex(12)


def short_id() -> str:
    """Mistral's templates take ids of exactly nine alphanumerics."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


class CallWriter:
    """Turns what scanners find into events; a call begins with its arguments' first character.

    Attributes:
        schemas: the known tools' parameters, by name.
        count: calls begun.
    """

    def __init__(
        self, source: Source, events: list[Event], schemas: dict[str, dict[str, Any]], new_id: Callable[[], str]
    ):
        self.schemas = schemas
        self.count = 0
        self._source = source
        self._events = events
        self._new_id = new_id
        self._given: set[str] = set()

    def begin(self, name: str, call_id: str | None = None) -> None:
        """A call; `call_id` is the model's own name for it, where it has to see that again. No two calls share one."""
        if call_id is None or call_id in self._given:
            call_id = self._new_id()
        self._given.add(call_id)
        self._events.append(ToolCall(self.count, call_id, name))
        self.count += 1

    def write(self, text: str) -> None:
        """More of the arguments; what was read up to here is part of the call."""
        self._source.kept.clear()
        self._events.append(ToolArguments(self.count - 1, text))

    def complete(self) -> None:
        """What was read up to here is part of the call."""
        self._source.kept.clear()


CallScan = Callable[[Source, CallWriter], Scan[None]]


def tool_name(source: Source, writer: CallWriter) -> Scan[str]:
    """A known tool's name, given up at the first character that makes it another."""
    name = ""
    while (yield from any_left(source)) and (piece := source.take_run(_NAME)):
        name += piece
        if not any(known.startswith(name) for known in writer.schemas):
            raise MalformedError
    if name not in writer.schemas:
        raise MalformedError if source.at < len(source.text) else UnfinishedError
    return name


def json_arguments(source: Source, begin: Callable[[], None], write: Emit) -> Scan[None]:
    """An object, the JSON text of one in a string, or null for an empty one; `begin` is called once it has begun."""
    char = yield from peek(source)
    if char == "{":
        begin()
        yield from json_object(source, write)
    elif char == '"':
        begin()
        yield from object_in_string(source, write)
    else:
        yield from expect(source, "null")
        begin()
        write("{}")


def json_call(source: Source, writer: CallWriter, *, inner: bool = False) -> Scan[None]:
    """{"name": …, "arguments": {…}}, the keys in any order; arguments that come before the name wait for it.

    "function" may stand for "name" or hold such an object, "parameters" for "arguments"; without arguments they are {}.
    """
    yield from expect(source, "{")
    name: str | None = None
    waiting: list[str] = []
    called = False
    while True:
        yield from skip_space(source)
        key = yield from one_of(source, (*_NAME_KEYS, *_ARGUMENT_KEYS, *_OTHER_KEYS))
        yield from skip_space(source)
        yield from expect(source, ":")
        yield from skip_space(source)
        if key in _OTHER_KEYS:
            yield from json_value(source, lambda text: None)
        elif called or (key in _NAME_KEYS and name is not None) or (key in _ARGUMENT_KEYS and waiting):
            raise MalformedError
        elif key in _ARGUMENT_KEYS:
            begin = partial(writer.begin, name) if name is not None else lambda: None
            yield from json_arguments(source, begin, writer.write if name is not None else waiting.append)
            called = name is not None
        elif key == '"function"' and not inner and (yield from peek(source)) == "{":
            yield from json_call(source, writer, inner=True)
            called = True
        else:
            yield from expect(source, '"')
            name = yield from tool_name(source, writer)
            yield from expect(source, '"')
            if waiting:
                writer.begin(name)
                writer.write("".join(waiting))
                called = True
        yield from skip_space(source)
        if (yield from one_of(source, (",", "}"))) == "}":
            break
    if not called:
        if name is None:
            raise MalformedError
        writer.begin(name)
        writer.write("{}")
    writer.complete()


def json_calls(source: Source, writer: CallWriter, *, close: str = "") -> Scan[None]:
    """One call as JSON, several with semicolons, commas or whitespace between, or an array; then perhaps `close`."""
    yield from skip_space(source)
    array = (yield from peek(source)) == "["
    if array:
        source.take(1)
    while True:
        yield from skip_space(source)
        yield from json_call(source, writer)
        if array:
            yield from skip_space(source)
            if (yield from one_of(source, (",", "]"))) == "]":
                writer.complete()
                break
        elif not (yield from _another_follows(source)):
            break
    yield from closing(source, writer, close)


def _another_follows(source: Source) -> Scan[bool]:
    yield from skip_space(source)
    if not (yield from any_left(source)) or (char := source.text[source.at]) not in ";,{":
        return False
    if char != "{":
        source.take(1)
    return True


def closing(source: Source, writer: CallWriter, *closers: str) -> Scan[None]:
    """The markers that end a call. Models leave them out, so each may be missing."""
    for closer in filter(None, closers):
        yield from skip_space(source)
        if (yield from any_left(source)) and (yield from literal(source, closer)):
            writer.complete()


def fenced_calls(source: Source, writer: CallWriter) -> Scan[None]:
    """json_calls in a fence of backticks whose language is json, tool_call or not named."""
    yield from skip_space(source)
    for language in ("json", "tool_call"):
        if (yield from peek(source)) == language[0]:
            yield from expect(source, language)
    yield from json_calls(source, writer, close="```")


def mistral_calls(source: Source, writer: CallWriter) -> Scan[None]:
    """Behind [TOOL_CALLS]: an array of calls, or name[CALL_ID]…[ARGS]{…}, whose markers may be missing."""
    yield from skip_space(source)
    if (yield from peek(source)) in "[{":
        yield from json_calls(source, writer)
        return
    name = yield from tool_name(source, writer)
    if (yield from peek(source)) == "[" and (yield from one_of(source, ("[CALL_ID]", "[ARGS]"))) == "[CALL_ID]":
        while (yield from any_left(source)) and source.take_run(_CALL_ID):
            pass
        yield from expect(source, "[ARGS]")
    yield from named_arguments(source, writer, name)


def named_arguments(source: Source, writer: CallWriter, name: str, call_id: str | None = None) -> Scan[None]:
    """The JSON arguments of a call whose name has been read."""
    yield from skip_space(source)
    yield from json_arguments(source, partial(writer.begin, name, call_id), writer.write)
    writer.complete()


def line_call(source: Source, writer: CallWriter) -> Scan[None]:
    """name, newline, {…}."""
    name = yield from tool_name(source, writer)
    if not (yield from literal(source, "\n")):
        raise MalformedError
    yield from named_arguments(source, writer, name)


def sectioned_calls(
    source: Source,
    writer: CallWriter,
    *,
    open: str,
    prefix: str,
    middles: Sequence[str],
    closers: Sequence[str],
    end: str,
    numbered: bool = False,
) -> Scan[None]:
    """Calls written `open` `prefix` name `middle` {…} `closers`, one after the other, and `end` behind the last.

    Where they are `numbered` the name is name:0, which with its prefix is the call's id.
    """
    first = True
    while True:
        yield from skip_space(source)
        if first:
            yield from expect(source, open)
        elif not ((yield from any_left(source)) and (yield from literal(source, open))):
            break
        first = False
        if prefix:
            yield from literal(source, prefix)
        name = yield from tool_name(source, writer)
        call_id = f"{prefix}{name}{(yield from _number(source))}" if numbered else None
        yield from skip_space(source)
        yield from one_of(source, middles)
        yield from named_arguments(source, writer, name, call_id)
        yield from closing(source, writer, *closers)
    yield from closing(source, writer, end)


def _number(source: Source) -> Scan[str]:
    yield from expect(source, ":")
    digits = ""
    while (yield from any_left(source)) and (piece := source.take_run(_NUMBER)):
        digits += piece
    return f":{digits}"
