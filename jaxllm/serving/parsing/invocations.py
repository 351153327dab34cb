"""Scanners of calls written as tags with raw values between them, and as calls of a programming language."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial

from jaxllm.serving.parsing.calls import CallWriter, closing, fenced_calls, tool_name
from jaxllm.serving.parsing.json_text import is_scalar, quoted_text
from jaxllm.serving.parsing.notations import properties_of, raw_value
from jaxllm.serving.parsing.source import (
    Emit,
    MalformedError,
    Scan,
    Source,
    any_left,
    copy_until,
    expect,
    literal,
    one_of,
    peek,
    skip_space,
)

MAX_NESTING = 64
"""Of the values of a pythonic call, each level of which takes some of Python's stack."""
_IDENTIFIER = re.compile(r"\w+")
_WORD = re.compile(r"[-+.\w]+")
_HEX = re.compile(r"[0-9A-Fa-f]+")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_STATED = {'string="true">': {"type": "string"}, 'string="false">': {}}
"""What a parameter's tag may say of its value: text as it is, or JSON."""


def invoked_calls(source: Source, writer: CallWriter, *, prefix: str, end: str) -> Scan[None]:
    """<invoke name="NAME">, <parameter name="KEY">raw value</parameter> …, </invoke>, one call after the other; `end`.

    `prefix` begins the tags' names.
    """
    opening = f'<{prefix}invoke name="'
    yield from skip_space(source)
    yield from expect(source, opening)
    while True:
        yield from _invocation(source, writer, prefix)
        yield from skip_space(source)
        if not ((yield from any_left(source)) and (yield from literal(source, opening))):
            break
    yield from closing(source, writer, end)


def _invocation(source: Source, writer: CallWriter, prefix: str) -> Scan[None]:
    name = yield from tool_name(source, writer)
    properties = properties_of(writer, name)
    parameter, finished = f'<{prefix}parameter name="', f"</{prefix}invoke>"
    before = "{"
    if (yield from one_of(source, ('"/>', '">'))) == '">':
        yield from skip_space(source)
        while (yield from one_of(source, (parameter, finished))) == parameter:
            key: list[str] = []
            yield from copy_until(source, ('"',), key.append)
            yield from expect(source, '"')
            yield from skip_space(source)
            stated = yield from one_of(source, (*_STATED, ">"))
            if before == "{":
                writer.begin(name)
            label = "".join(key)
            writer.write(f'{before}"{quoted_text(label)}": ')
            before = ", "
            schema = _STATED.get(stated, properties.get(label))
            yield from raw_value(source, schema, (f"</{prefix}parameter>",), writer.write)
            yield from expect(source, f"</{prefix}parameter>")
            yield from skip_space(source)
    if before == "{":
        writer.begin(name)
    writer.write("{}" if before == "{" else "}")
    writer.complete()


def action_calls(source: Source, writer: CallWriter) -> Scan[None]:
    """Behind Action: a fence with JSON calls."""
    yield from skip_space(source)
    yield from expect(source, "```")
    yield from fenced_calls(source, writer)


def pythonic_calls(source: Source, writer: CallWriter, *, end: str) -> Scan[None]:
    """[name(key=value, …), …], the values as Python or JSON writes them; then perhaps `end`."""
    yield from skip_space(source)
    yield from expect(source, "[")
    while True:
        yield from skip_space(source)
        name = yield from tool_name(source, writer)
        yield from expect(source, "(")
        writer.begin(name)
        yield from _keywords(source, writer.write)
        yield from skip_space(source)
        if (yield from one_of(source, (",", "]"))) == "]":
            writer.complete()
            break
    yield from closing(source, writer, end)


def _keywords(source: Source, write: Emit) -> Scan[None]:
    """key=value, … ) as an object."""
    before = "{"
    while True:
        yield from skip_space(source)
        if (yield from peek(source)) == ")":
            source.take(1)
            break
        key = yield from _run(source, _IDENTIFIER)
        yield from skip_space(source)
        yield from expect(source, "=")
        write(f'{before}"{quoted_text(key)}": ')
        before = ", "
        yield from _value(source, write)
        yield from skip_space(source)
        if (yield from one_of(source, (",", ")"))) == ")":
            break
    write("{}" if before == "{" else "}")


def _value(source: Source, write: Emit, depth: int = 0) -> Scan[None]:
    yield from skip_space(source)
    char = yield from peek(source)
    if depth == MAX_NESTING:
        raise MalformedError
    if char in "'\"":
        yield from _string(source, write)
    elif char == "[":
        yield from _items(source, write, "[", "]", partial(_value, source, write, depth + 1))
    elif char == "{":
        yield from _items(source, write, "{", "}", partial(_member, source, write, depth + 1))
    else:
        word = yield from _run(source, _WORD)
        word = _WORDS.get(word, word)
        if not is_scalar(word):
            raise MalformedError
        write(word)


def _items(source: Source, write: Emit, open: str, close: str, item: Callable[[], Scan[None]]) -> Scan[None]:
    """`item`s with commas between, and perhaps one behind the last."""
    source.take(1)
    write(open)
    between = ""
    while True:
        yield from skip_space(source)
        if (yield from peek(source)) == close:
            source.take(1)
            break
        write(between)
        between = ", "
        yield from item()
        yield from skip_space(source)
        if (yield from one_of(source, (",", close))) == close:
            break
    write(close)


def _member(source: Source, write: Emit, depth: int) -> Scan[None]:
    if (yield from peek(source)) not in "'\"":
        raise MalformedError
    yield from _string(source, write)
    yield from skip_space(source)
    yield from expect(source, ":")
    write(": ")
    yield from _value(source, write, depth)


def _string(source: Source, write: Emit) -> Scan[None]:
    quote = source.take(1)
    write('"')
    while (yield from copy_until(source, (quote, "\\"), lambda text: write(quoted_text(text)))) == "\\":
        source.take(1)
        yield from _escape(source, write)
    source.take(1)
    write('"')


def _escape(source: Source, write: Emit) -> Scan[None]:
    """What follows a backslash. A surrogate, which JSON writes in pairs, stays an escape."""
    yield from peek(source)
    char = source.take(1)
    if char not in _HEX_ESCAPES:
        write(quoted_text(_ESCAPES.get(char, char if char in "'\"\\/" else f"\\{char}")))
        return
    digits = ""
    while len(digits) < _HEX_ESCAPES[char]:
        yield from peek(source)
        digits += source.take(1)
    if not _HEX.fullmatch(digits) or int(digits, 16) > 0x10FFFF:
        raise MalformedError
    write(json.dumps(chr(int(digits, 16)))[1:-1])


def _run(source: Source, pattern: re.Pattern[str]) -> Scan[str]:
    pieces = []
    while (yield from any_left(source)) and (piece := source.take_run(pattern)):
        pieces.append(piece)
    if not pieces:
        raise MalformedError
    return "".join(pieces)
