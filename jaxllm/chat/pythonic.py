"""Scanners of calls written as calls of Python's, whose arguments are its literals or JSON's."""

from __future__ import annotations

import ast
import json
import re
import unicodedata
from collections.abc import Callable
from functools import partial

from jaxllm.chat.calls import begun, closing, json_calls, listed_calls, or_leave, tool_name
from jaxllm.chat.events import CallWriter
from jaxllm.chat.source import Emit, MalformedError, Scan, Source, is_scalar, nowhere, quoted_text

MAX_NESTING = 64
"""Of the values of a call, each level of which takes some of Python's stack."""
MAX_DIGITS = 400
"""Of a number that JSON writes otherwise. A longer one is no double."""
_IDENTIFIER = re.compile(r"\w+")
_FUNCTION = re.compile(r"[\w.-]+")
_WORD = re.compile(r"[-+.\w]+")
_HEX = re.compile(r"[0-9A-Fa-f]+")
_OCTAL = re.compile(r"[0-7]")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_NUMBER = re.compile(
    r"[-+]?(?:0[xX][0-9a-fA-F_]+|0[oO][0-7_]+|0[bB][01_]+|(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9_]+)?)"
)


def pythonic_calls(source: Source, writer: CallWriter, *, end: str) -> Scan[None]:
    """[name(key=value, …), …]; then perhaps `end`."""
    yield from listed_calls(source, writer, _call, _any_call, end)


def json_or_pythonic_calls(source: Source, writer: CallWriter, *, end: str) -> Scan[None]:
    start = source.position
    yield from source.expect("[", spaced=True)
    as_json = (yield from source.peek(spaced=True)) == "{"
    source.put_back(source.position - start)
    yield from (json_calls(source, writer, close=end) if as_json else pythonic_calls(source, writer, end=end))


def python_lines(source: Source, writer: CallWriter, *, end: str) -> Scan[None]:
    """name(key=value, …), each on a line; then `end`, which may be missing."""
    before = writer.count
    while True:
        yield from source.skip_space()
        yield from or_leave(source, writer, _call(source, writer), _any_call(source))
        yield from source.skip_space()
        if not (yield from source.any_left()) or (yield from source.next_of((end[0],))):
            break
    if writer.count == before:
        raise MalformedError
    yield from closing(source, writer, end)


def _call(source: Source, writer: CallWriter) -> Scan[None]:
    with begun():
        name = yield from tool_name(source, writer)
        yield from source.expect("(")
        writer.begin(name)
        yield from _items(source, ")", partial(_keyword, source, writer))
        writer.end()


def _keyword(source: Source, writer: CallWriter) -> Scan[None]:
    key = yield from _run(source, _IDENTIFIER)
    yield from source.expect("=", spaced=True)
    writer.key(key)
    yield from _value(source, writer.write)


def _any_call(source: Source) -> Scan[None]:
    yield from _run(source, _FUNCTION)
    yield from source.expect("(")
    yield from _items(source, ")", partial(_any_argument, source))


def _any_argument(source: Source) -> Scan[None]:
    if not _IDENTIFIER.match(source.text, source.at) or source.text[source.at].isdecimal():
        yield from _value(source, nowhere)
        return
    word = yield from _run(source, _IDENTIFIER)
    if (yield from source.peek(spaced=True)) == "=":
        source.take(1)
        yield from _value(source, nowhere)
    elif word not in _WORDS:
        raise MalformedError


def _value(source: Source, write: Emit, depth: int = 0) -> Scan[None]:
    char = yield from source.peek(spaced=True)
    if depth == MAX_NESTING:
        raise MalformedError
    if char in "'\"":
        yield from _strings(source, write, raw=False)
    elif char == "[":
        source.take(1)
        write("[")
        yield from _items(source, "]", partial(_value, source, write, depth + 1), write)
        write("]")
    elif char in "({":
        yield from _group(source, write, depth + 1)
    else:
        word = yield from _run(source, _WORD)
        if word in ("r", "R", "u", "U") and (yield from source.any_left()) and source.text[source.at] in "'\"":
            yield from _strings(source, write, raw=word in "rR")
        else:
            write(_scalar(word))


def _scalar(word: str) -> str:
    word = _WORDS.get(word, word)
    if is_scalar(word):
        return word
    if len(word) > MAX_DIGITS or not _NUMBER.fullmatch(word):
        raise MalformedError
    try:
        return json.dumps(ast.literal_eval(word), allow_nan=False)
    except (ValueError, SyntaxError):
        raise MalformedError from None


def _items(
    source: Source, close: str, item: Callable[[], Scan[None]], write: Emit = nowhere, between: str = ""
) -> Scan[None]:
    """`item`s with commas between, and perhaps one after the last, and `close`. `between` comes before the first."""
    while True:
        if (yield from source.peek(spaced=True)) == close:
            source.take(1)
            return
        write(between)
        between = ", "
        yield from item()
        if (yield from source.one_of((",", close), spaced=True)) == close:
            return


def _group(source: Source, write: Emit, depth: int) -> Scan[None]:
    """(a, b) and {a, b} as an array, {a: b} as an object; one value in parentheses without a comma is that value."""
    in_braces = source.take(1) == "{"
    close = "}" if in_braces else ")"
    if (yield from source.peek(spaced=True)) == close:
        source.take(1)
        write("{}" if in_braces else "[]")
        return
    pieces: list[str] = []
    yield from _value(source, pieces.append, depth)
    first = "".join(pieces)
    mark = yield from source.one_of((":", ",", "}") if in_braces else (",", ")"), spaced=True)
    if mark == ":":
        write("{" + _key(first) + ": ")
        yield from _value(source, write, depth)
        if (yield from source.one_of((",", "}"), spaced=True)) == ",":
            yield from _items(source, "}", partial(_member, source, write, depth), write, ", ")
        write("}")
    elif mark == ")":
        write(first)
    else:
        write("[" + first)
        if mark == ",":
            yield from _items(source, close, partial(_value, source, write, depth), write, ", ")
        write("]")


def _member(source: Source, write: Emit, depth: int) -> Scan[None]:
    name: list[str] = []
    yield from _value(source, name.append, depth)
    yield from source.expect(":", spaced=True)
    write(_key("".join(name)) + ": ")
    yield from _value(source, write, depth)


def _key(value: str) -> str:
    if value[0] in "[{":
        raise MalformedError
    return value if value[0] == '"' else f'"{value}"'


def _strings(source: Source, write: Emit, raw: bool) -> Scan[None]:
    write('"')
    while True:
        yield from _string(source, write, raw)
        yield from source.skip_space()
        if not (yield from source.any_left()) or (char := source.text[source.at]) not in "'\"rRuU":
            break
        raw = char in "rR"
        if char not in "'\"":
            source.take(1)
            if (yield from source.peek()) not in "'\"":
                raise MalformedError
    write('"')


def _string(source: Source, write: Emit, raw: bool) -> Scan[None]:
    quote = source.take(1)
    if (yield from source.next_of((quote * 2,))):
        source.take(2)
        quote *= 3
    elif (yield from source.next_of((quote,))):
        source.take(1)
        return
    while (yield from source.copy_until((quote, "\\"), lambda text: write(quoted_text(text)))) == "\\":
        source.take(1)
        yield from source.peek()
        if raw:
            write(quoted_text("\\" + source.take(1)))
        else:
            yield from _escape(source, write)
    source.take(len(quote))


def _escape(source: Source, write: Emit) -> Scan[None]:
    """What follows a backslash. A surrogate, which JSON writes in pairs, stays an escape."""
    char = source.take(1)
    if char == "N":
        yield from source.expect("{")
        try:
            write(quoted_text(unicodedata.lookup((yield from source.text_until("}")))))
        except KeyError:
            raise MalformedError from None
    elif _OCTAL.match(char):
        while len(char) < 3 and _OCTAL.match((yield from source.peek())):
            char += source.take(1)
        write(quoted_text(chr(int(char, 8))))
    elif char not in _HEX_ESCAPES:
        write(quoted_text(_ESCAPES.get(char, char if char in "'\"\\/" else f"\\{char}")))
    else:
        digits = ""
        while len(digits) < _HEX_ESCAPES[char]:
            yield from source.peek()
            digits += source.take(1)
        if not _HEX.fullmatch(digits) or int(digits, 16) > 0x10FFFF:
            raise MalformedError
        write(json.dumps(chr(int(digits, 16)))[1:-1])


def _run(source: Source, pattern: re.Pattern[str]) -> Scan[str]:
    text = yield from source.run(pattern)
    if not text:
        raise MalformedError
    return text
