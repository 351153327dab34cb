"""Scanners of tool calls written with JSON: {"name": …, "arguments": {…}}, or a name before its arguments.

Each consumes a call from a `Source` and tells a `CallWriter`. It raises MalformedError where the text is no call of a
known tool.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from jaxllm.chat.events import CallWriter
from jaxllm.chat.source import (
    Emit,
    MalformedError,
    Scan,
    Source,
    UnfinishedError,
    json_value,
    object_in_string,
)

_NAME_KEYS = ('"name"', '"function"', '"tool_name"')
_ARGUMENT_KEYS = ('"arguments"', '"parameters"')
_OTHER_KEYS = ('"type"', '"id"', '"index"', '"tool_call_id"')
_NAME = re.compile(r"[a-zA-Z0-9_.-]+")
_CALL_ID = re.compile(r"[a-zA-Z0-9_-]+")
_NUMBER = re.compile(r"[0-9]+")
CallScan = Callable[[Source, CallWriter], Scan[None]]


def tool_name(source: Source, writer: CallWriter, *, doubled: bool = False) -> Scan[str]:
    """A known tool's name, given up at the first character that makes it another. NAME.NAME is NAME if `doubled`."""
    known = {f"{name}.{name}": name for name in writer.schemas} if doubled else {}
    known |= {name: name for name in writer.schemas}
    name = ""
    while (yield from source.any_left()) and (piece := source.take_run(_NAME)):
        name += piece
        if not any(other.startswith(name) for other in known):
            raise MalformedError
    if name not in known:
        raise MalformedError if source.at < len(source.text) else UnfinishedError
    return known[name]


class BrokenCallError(MalformedError):
    """What began as a call's JSON does is no call of a known tool."""


def json_arguments(source: Source, write: Emit) -> Scan[None]:
    """An object, the JSON text of one in a string, or null for an empty one."""
    char = yield from source.peek()
    if char == "{":
        yield from json_value(source, write)
    elif char == '"':
        yield from object_in_string(source, write)
    else:
        yield from source.expect("null")
        write("{}")


def json_call(source: Source, writer: CallWriter, *, inner: bool = False) -> Scan[None]:
    """{"name": …, "arguments": {…}}, the keys in any order; arguments that come before the name wait for it.

    "function" may stand for "name" or hold such an object, "parameters" for "arguments"; without arguments they are {}.
    What follows the arguments in the object is skipped. Raises BrokenCallError behind the first of these keys.
    """
    yield from source.expect("{")
    key = yield from _call_key(source)
    try:
        yield from _json_members(source, writer, key, inner)
    except UnfinishedError:
        raise
    except MalformedError:
        raise BrokenCallError from None


def _json_members(source: Source, writer: CallWriter, key: str, inner: bool) -> Scan[None]:
    name: str | None = None
    waiting: list[str] = []
    called = False
    while True:
        if called or key in _OTHER_KEYS:
            yield from json_value(source, _nowhere)
        elif (key in _NAME_KEYS and name is not None) or (key in _ARGUMENT_KEYS and waiting):
            raise MalformedError
        elif key in _ARGUMENT_KEYS:
            if name is not None:
                writer.begin(name)
            yield from json_arguments(source, writer.write if name is not None else waiting.append)
            called = name is not None
        elif key == '"function"' and not inner and (yield from source.peek()) == "{":
            yield from json_call(source, writer, inner=True)
            called = True
        else:
            yield from source.expect('"')
            name = yield from tool_name(source, writer)
            yield from source.expect('"')
            if waiting:
                writer.begin(name)
                writer.write("".join(waiting))
                called = True
        yield from source.skip_space()
        if (yield from source.one_of((",", "}"))) == "}":
            break
        key = yield from _call_key(source, any_key=called)
    if not called:
        if name is None:
            raise MalformedError
        writer.begin(name)
        writer.end()
    writer.claim()


def _call_key(source: Source, any_key: bool = False) -> Scan[str]:
    """A key and its colon; "" for `any_key`."""
    key = ""
    yield from source.skip_space()
    if not any_key:
        key = yield from source.one_of((*_NAME_KEYS, *_ARGUMENT_KEYS, *_OTHER_KEYS))
    elif (yield from source.peek()) == '"':
        yield from json_value(source, _nowhere)
    yield from source.skip_space()
    yield from source.expect(":")
    yield from source.skip_space()
    return key


def _nowhere(text: str) -> None:
    """Text that is read and not used."""


def json_calls(source: Source, writer: CallWriter, *, close: str = "", bare: bool = False) -> Scan[None]:
    """One call as JSON, several with semicolons, commas or whitespace between, or an array; then perhaps `close`.

    An object among them that began as a call and is none of a known tool is left, and the next is read. A `bare` one,
    which no marker tells from other JSON, is not read to its end for that: it may be the answer, which streams.
    """
    yield from source.skip_space()
    array = (yield from source.peek()) == "["
    if array:
        source.take(1)
    before = writer.count
    while True:
        yield from source.skip_space()
        call = json_call(source, writer)
        if bare and not array and writer.count == before:
            yield from call
        else:
            yield from or_leave(source, writer, call, json_value(source, _nowhere))
        if array:
            yield from source.skip_space()
            if (yield from source.one_of((",", "]"))) == "]":
                break
        elif not (yield from _another_follows(source)):
            break
    if writer.count == before:
        raise MalformedError
    if array:
        writer.claim()
    yield from closing(source, writer, close)


def named_objects(source: Source, writer: CallWriter, *, close: str) -> Scan[None]:
    """[{"NAME": {…}}, …], and `close`. One among them that is no call of a known tool is left."""
    yield from source.skip_space()
    yield from source.expect("[")
    before = writer.count
    while True:
        yield from source.skip_space()
        yield from or_leave(source, writer, _named_object(source, writer), json_value(source, _nowhere))
        yield from source.skip_space()
        if (yield from source.one_of((",", "]"))) == "]":
            break
    if writer.count == before:
        raise MalformedError
    writer.claim()
    yield from closing(source, writer, close)


def _named_object(source: Source, writer: CallWriter) -> Scan[None]:
    try:
        yield from source.expect("{")
        yield from source.skip_space()
        yield from source.expect('"')
        name = yield from tool_name(source, writer)
        yield from source.expect('"')
        yield from source.skip_space()
        yield from source.expect(":")
        yield from named_arguments(source, writer, name)
        yield from source.skip_space()
        yield from source.expect("}")
        writer.claim()
    except UnfinishedError:
        raise
    except MalformedError:
        raise BrokenCallError from None


def or_leave(source: Source, writer: CallWriter, call: Scan[None], same: Scan[None]) -> Scan[None]:
    """`call`; where it is broken, what `same` reads in its place is left as text between calls."""
    count, start = writer.count, source.position
    try:
        yield from call
    except BrokenCallError:
        if writer.count > count:
            raise
        writer.forget()
        source.put_back(source.position - start)
        yield from same
        writer.leave()


def _another_follows(source: Source) -> Scan[bool]:
    yield from source.skip_space()
    if not (yield from source.any_left()) or (char := source.text[source.at]) not in ";,{":
        return False
    if char != "{":
        source.take(1)
    return True


def closing(source: Source, writer: CallWriter, *closers: str) -> Scan[None]:
    """The markers that end a call. Models leave them out, so each may be missing."""
    for closer in filter(None, closers):
        yield from source.skip_space()
        if (yield from source.any_left()) and (yield from source.literal(closer)):
            writer.claim()


def fenced_calls(source: Source, writer: CallWriter) -> Scan[None]:
    """json_calls in a fence of backticks whose language is json, tool_call or not named."""
    yield from source.skip_space()
    for language in ("json", "tool_call"):
        if (yield from source.peek()) == language[0]:
            yield from source.expect(language)
    yield from json_calls(source, writer, close="```")


def mistral_calls(source: Source, writer: CallWriter) -> Scan[None]:
    """Behind [TOOL_CALLS]: an array of calls, or name[CALL_ID]…[ARGS]{…}, whose markers may be missing."""
    yield from source.skip_space()
    if (yield from source.peek()) in "[{":
        yield from json_calls(source, writer)
        return
    name = yield from tool_name(source, writer)
    if (yield from source.peek()) == "[" and (yield from source.one_of(("[CALL_ID]", "[ARGS]"))) == "[CALL_ID]":
        while (yield from source.any_left()) and source.take_run(_CALL_ID):
            pass
        yield from source.expect("[ARGS]")
    yield from named_arguments(source, writer, name)


def named_arguments(
    source: Source, writer: CallWriter, name: str, call_id: str | None = None, ends: Sequence[str] = ()
) -> Scan[None]:
    """The JSON arguments of a call whose name has been read; nothing before one of `ends` is {}."""
    writer.begin(name, call_id)
    yield from source.skip_space()
    if ends and (yield from source.peek()) not in '{"n':
        yield from source.one_of(ends)
        writer.end()
    else:
        yield from json_arguments(source, writer.write)
    writer.claim()


def line_call(source: Source, writer: CallWriter) -> Scan[None]:
    """name, newline, {…}."""
    name = yield from tool_name(source, writer)
    if not (yield from source.literal("\n")):
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
    inside: bool = False,
) -> Scan[None]:
    """Calls written `open` `prefix` name `middle` {…} `closers`, one after the other, and `end` behind the last.

    Where they are `numbered` the name is name:0, which with its prefix is the call's id. `inside` is behind the first
    `open`.
    """
    if not inside:
        yield from source.skip_space()
        yield from source.expect(open)
    while True:
        yield from source.skip_space()
        if prefix:
            yield from source.literal(prefix)
        name = yield from tool_name(source, writer)
        call_id = f"{prefix}{name}{(yield from _number(source))}" if numbered else None
        yield from source.skip_space()
        yield from source.one_of(middles)
        yield from named_arguments(source, writer, name, call_id, closers)
        yield from closing(source, writer, *closers)
        yield from source.skip_space()
        if not ((yield from source.any_left()) and (yield from source.next_of((open,)))):
            break
        source.take(len(open))
    yield from closing(source, writer, end)


def _number(source: Source) -> Scan[str]:
    yield from source.expect(":")
    digits = ""
    while (yield from source.any_left()) and (piece := source.take_run(_NUMBER)):
        digits += piece
    return f":{digits}"
