"""Scanners of tool calls in JSON: {"name": …, "arguments": {…}}, or a name before its arguments.

Each reads a `Source`, tells a `CallWriter`, and raises MalformedError where the text is no call of a known tool.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from jaxllm.chat.events import CallScan, CallSyntax, CallWriter
from jaxllm.chat.source import Emit, MalformedError, Scan, Source, UnfinishedError, json_value, object_in_string

_NAME_KEYS = ('"name"', '"function"', '"tool_name"')
_ARGUMENT_KEYS = ('"arguments"', '"parameters"')
_OTHER_KEYS = ('"type"', '"id"', '"index"', '"tool_call_id"')
_NAME = re.compile(r"[a-zA-Z0-9_.-]+")
_CALL_ID = re.compile(r"[a-zA-Z0-9_-]+")
_NUMBER = re.compile(r"[0-9]+")


class BrokenCallError(MalformedError):
    """The text began as a call and is none of a known tool."""


@contextmanager
def begun() -> Iterator[None]:
    """Malformed text from here on is a broken call."""
    try:
        yield
    except UnfinishedError:
        raise
    except MalformedError:
        raise BrokenCallError from None


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
    """{"name": …, "arguments": {…}}, the keys in any order; without arguments they are {}.

    "function" may stand for "name" or hold such an object. Raises BrokenCallError after the first of these keys.
    """
    yield from source.expect("{")
    key = yield from _call_key(source)
    with begun():
        yield from _json_members(source, writer, key, inner)


def _json_members(source: Source, writer: CallWriter, key: str, inner: bool) -> Scan[None]:
    name: str | None = None
    waiting: list[str] = []
    called = False
    while True:
        if called or key in _OTHER_KEYS:
            yield from json_value(source)
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
            name = yield from _quoted_name(source, writer)
            if waiting:
                writer.begin(name)
                writer.write("".join(waiting))
                called = True
        if (yield from source.one_of((",", "}"), spaced=True)) == "}":
            break
        key = yield from _call_key(source, any_key=called)
    if not called:
        if name is None:
            raise MalformedError
        writer.begin(name)
        writer.end()
    writer.claim()


def _quoted_name(source: Source, writer: CallWriter) -> Scan[str]:
    yield from source.expect('"', spaced=True)
    name = yield from tool_name(source, writer)
    yield from source.expect('"')
    return name


def _call_key(source: Source, any_key: bool = False) -> Scan[str]:
    """A key and its colon; "" for `any_key`."""
    key = ""
    if not any_key:
        key = yield from source.one_of((*_NAME_KEYS, *_ARGUMENT_KEYS, *_OTHER_KEYS), spaced=True)
    elif (yield from source.peek(spaced=True)) == '"':
        yield from json_value(source)
    yield from source.expect(":", spaced=True)
    yield from source.skip_space()
    return key


def json_calls(source: Source, writer: CallWriter, *, close: str = "", bare: bool = False) -> Scan[None]:
    """One call as JSON, several with semicolons, commas or whitespace between, or an array; then perhaps `close`.

    A broken call among them is left, and the next is read; but a `bare` one may be the answer, which streams.
    """
    if (yield from source.peek(spaced=True)) == "[":
        yield from listed_calls(source, writer, json_call, json_value, close)
        return
    before = writer.count
    while True:
        yield from source.skip_space()
        call = json_call(source, writer)
        if bare and writer.count == before:
            yield from call
        else:
            yield from or_leave(source, writer, call, json_value(source))
        yield from source.skip_space()
        if not (yield from source.any_left()) or (char := source.text[source.at]) not in ";,{":
            break
        if char != "{":
            source.take(1)
    if writer.count == before:
        raise MalformedError
    yield from closing(source, writer, close)


def listed_calls(
    source: Source, writer: CallWriter, call: CallScan, same: Callable[[Source], Scan[None]], close: str
) -> Scan[None]:
    """[`call`, …], then perhaps `close`. One among them that is no call of a known tool is left: `same` reads it."""
    yield from source.expect("[", spaced=True)
    before = writer.count
    while True:
        yield from source.skip_space()
        yield from or_leave(source, writer, call(source, writer), same(source))
        if (yield from source.one_of((",", "]"), spaced=True)) == "]":
            break
    if writer.count == before:
        raise MalformedError
    writer.claim()
    yield from closing(source, writer, close)


def or_leave(source: Source, writer: CallWriter, call: Scan[None], same: Scan[None]) -> Scan[None]:
    """`call`; where it is broken, the text that `same` reads in its place is left as text between calls."""
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


def closing(source: Source, writer: CallWriter, *closers: str) -> Scan[None]:
    """The markers that end a call. Models leave them out, so each may be missing."""
    for closer in filter(None, closers):
        yield from source.skip_space()
        if (yield from source.any_left()) and (yield from source.literal(closer)):
            writer.claim()


def named_objects(source: Source, writer: CallWriter, *, close: str) -> Scan[None]:
    """[{"NAME": {…}}, …], then perhaps `close`."""
    yield from listed_calls(source, writer, _named_object, json_value, close)


def _named_object(source: Source, writer: CallWriter) -> Scan[None]:
    with begun():
        yield from source.expect("{")
        name = yield from _quoted_name(source, writer)
        yield from source.expect(":", spaced=True)
        yield from named_arguments(source, writer, name)
        yield from source.expect("}", spaced=True)
        writer.claim()


def fenced_calls(source: Source, writer: CallWriter) -> Scan[None]:
    """json_calls in a fence of backticks whose language is json, tool_call or not named."""
    yield from source.skip_space()
    for language in ("json", "tool_call"):
        if (yield from source.peek()) == language[0]:
            yield from source.expect(language)
    yield from json_calls(source, writer, close="```")


def action_calls(source: Source, writer: CallWriter) -> Scan[None]:
    """After Action: a fence with JSON calls."""
    yield from source.expect("```", spaced=True)
    yield from fenced_calls(source, writer)


def mistral_calls(source: Source, writer: CallWriter) -> Scan[None]:
    """After [TOOL_CALLS]: an array of calls, or name[CALL_ID]…[ARGS]{…}, whose markers may be missing."""
    if (yield from source.peek(spaced=True)) in "[{":
        yield from json_calls(source, writer)
        return
    name = yield from tool_name(source, writer)
    if (yield from source.peek()) == "[" and (yield from source.one_of(("[CALL_ID]", "[ARGS]"))) == "[CALL_ID]":
        yield from source.run(_CALL_ID)
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
    name = yield from tool_name(source, writer)
    if not (yield from source.literal("\n")):
        raise MalformedError
    yield from named_arguments(source, writer, name)


def section(
    source: Source, writer: CallWriter, *, open: str, call: CallScan, end: str, inside: bool = False, part: bool = False
) -> Scan[None]:
    """`call` after each `open`, and `end`; begun `inside`, after the first `open`, or ended with a `part` of one."""
    if not inside:
        yield from source.expect(open, spaced=True)
    while True:
        yield from call(source, writer)
        yield from source.skip_space()
        if not (yield from source.any_left()) or not (yield from source.literal(open, whole=not part)):
            break
    yield from closing(source, writer, end)


def prefixed_call(
    source: Source,
    writer: CallWriter,
    *,
    middles: Sequence[str],
    closers: Sequence[str],
    prefix: str = "",
    numbered: bool = False,
) -> Scan[None]:
    """`prefix` name `middle` {…} `closers`; if `numbered`, the name is name:0, and with its prefix the call's id."""
    yield from source.skip_space()
    if prefix:
        yield from source.literal(prefix)
    name = yield from tool_name(source, writer)
    call_id = None
    if numbered:
        yield from source.expect(":")
        call_id = f"{prefix}{name}:{(yield from source.run(_NUMBER))}"
    yield from source.one_of(middles, spaced=True)
    yield from named_arguments(source, writer, name, call_id, closers)
    yield from closing(source, writer, *closers)


def marked(scan: CallScan, marker: str) -> tuple[CallSyntax, ...]:
    """Calls after a marker that is a token, or that models do not quote."""
    return (CallSyntax(scan, marker, ends_reasoning=True),)


def either(scan: Callable[..., Scan[None]], open: str, call: str) -> tuple[CallSyntax, ...]:
    """Calls that each begin with `call`, after `open`, which models leave out, or write before a call that is none."""
    return (*marked(scan, open), CallSyntax(partial(scan, inside=True), call))


def sections(open: str, call: str, scan: CallScan, end: str, *, part: bool = False) -> tuple[CallSyntax, ...]:
    return either(partial(section, open=call, call=scan, end=end, part=part), open, call)
