"""Scanners of tool calls whose arguments are not JSON; they become JSON on the way."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.chat.calls import closing, json_calls, named_arguments, tool_name
from jaxllm.chat.events import CallWriter
from jaxllm.chat.source import MAX_DEPTH, Emit, MalformedError, Scan, Source, quoted_text
from jaxllm.chat.values import followed, json_from_raw, parameter_types, properties_of, raw_value, value_types

_BARE = re.compile(r"[^,:{}\[\]]+")


def keyed_call(source: Source, writer: CallWriter) -> Scan[None]:
    """Behind <tool_call>: name, <arg_key>key</arg_key><arg_value>raw value</arg_value> …, </tool_call>."""
    yield from source.skip_space()
    name = yield from tool_name(source, writer)
    writer.begin(name)
    yield from _keyed_arguments(source, writer, name, PLAIN_TAGS)


@dataclass(frozen=True)
class KeyedTags:
    """What a family's tags are called: `form` has {} where the plain name stands, as in "ifm|{}"."""

    form: str

    def open(self, name: str) -> str:
        return f"<{self.form.format(name)}>"

    def close(self, name: str) -> str:
        return f"</{self.form.format(name)}>"


PLAIN_TAGS = KeyedTags("{}")


def keyed_calls(
    source: Source, writer: CallWriter, *, tags: KeyedTags = PLAIN_TAGS, separator: str = "", inside: bool = False
) -> Scan[None]:
    """<tool_call>name, `separator`, arguments as keyed_call's, or a call as JSON, one after the other; </tool_calls>.

    `inside` is behind the first <tool_call>.
    """
    opening, close = tags.open("tool_call"), tags.close("tool_call")
    if not inside:
        yield from source.skip_space()
        yield from source.expect(opening)
    while True:
        yield from source.skip_space()
        if (yield from source.peek()) == "{":
            yield from json_calls(source, writer, close=close)
        else:
            name = yield from tool_name(source, writer)
            writer.begin(name)
            yield from source.skip_space()
            if separator:
                yield from source.literal(separator)
            yield from _keyed_arguments(source, writer, name, tags)
        yield from source.skip_space()
        if not ((yield from source.any_left()) and (yield from source.literal(opening))):
            break
    yield from closing(source, writer, tags.close("tool_calls"))


def _keyed_arguments(source: Source, writer: CallWriter, name: str, tags: KeyedTags) -> Scan[None]:
    """Keys and raw values between tags, up to and with </tool_call>. A value's type may be between the two.

    </arg_value> may be missing where the text ends with </tool_call>.
    """
    key_tag, value_tag, close = tags.open("arg_key"), tags.open("arg_value"), tags.close("tool_call")
    type_tag, end = tags.open("arg_type"), tags.close("arg_value")
    last = [before + close + behind for before in ("", "\n") for behind in ("", "\n")]
    yield from source.skip_space()
    while (yield from source.one_of((key_tag, close))) == key_tag:
        key = (yield from source.text_until(tags.close("arg_key"))).strip()
        yield from source.skip_space()
        types = parameter_types(writer, name, key)
        if (yield from source.one_of((value_tag, type_tag))) == type_tag:
            stated = (yield from source.text_until(tags.close("arg_type"))).strip().lower()
            types = types or value_types({"type": stated}, {})
            yield from source.skip_space()
            yield from source.expect(value_tag)
        writer.key(key)
        if (yield from raw_value(source, types, (end,), writer.write, last)) == end:
            yield from source.expect(end)
            writer.claim()
        yield from source.skip_space()
    writer.end()


def function_tag(source: Source, writer: CallWriter, *, wrapper: str = "", verbatim: bool = False) -> Scan[None]:
    """Behind <function=: name>, then {…} or <parameter=key>raw value</parameter> …, then </function>, and </`wrapper`>.

    A value is what stands between the tags if `verbatim`, as a string unless the schema says otherwise; else one on
    lines of its own is without their newlines.
    """
    name = yield from tool_name(source, writer)
    yield from source.expect(">")
    yield from source.skip_space()
    ends = ("</function>", *([f"</{wrapper}>"] if wrapper else []))
    if (yield from source.peek()) == "{":
        yield from named_arguments(source, writer, name)
    else:
        writer.begin(name)
        yield from _parameters(source, writer, name, ends, verbatim)
    yield from closing(source, writer, *ends)


def wrapped_function_tag(source: Source, writer: CallWriter, *, wrapper: str, verbatim: bool = False) -> Scan[None]:
    """Behind <`wrapper`>: function tags."""
    yield from source.skip_space()
    yield from source.expect("<function=")
    yield from function_tag(source, writer, wrapper=wrapper, verbatim=verbatim)


def _parameters(source: Source, writer: CallWriter, name: str, ends: Sequence[str], verbatim: bool) -> Scan[None]:
    """Up to and with one of `ends`. A value on lines of its own ends at a newline and a tag, another at a tag.

    </parameter> may be missing.
    """
    while (yield from source.one_of(("<parameter=", *ends))) not in ends:
        key = yield from source.text_until(">")
        writer.key(key)
        line = not verbatim and (yield from source.peek()) == "\n" and (yield from source.literal("\n"))
        stops = ["</parameter>", "</function>", "<parameter="]
        if line:
            stops = ["\n" + stop for stop in stops]
        types = parameter_types(writer, name, key) or ({"string"} if verbatim else set())
        stop = yield from raw_value(source, types, stops, writer.write)
        if stop == stops[0]:
            yield from source.expect(stop)
            writer.claim()
        yield from source.skip_space()
    writer.end()


def gemma_call(source: Source, writer: CallWriter, *, quote: str, close: str) -> Scan[None]:
    """call:name{key:value,…}: keys without quotes, strings between two `quote`s, the rest as in JSON."""
    yield from source.expect("call:")
    name = yield from tool_name(source, writer)
    if (yield from source.peek()) != "{":
        raise MalformedError
    writer.begin(name)
    yield from _GemmaObject(source, writer.write, quote, writer.schemas[name]).read()
    yield from closing(source, writer, close)


class _GemmaObject:
    """Reads one as json_value does, with a stack of closers and what is expected next, and a stack of schemas."""

    def __init__(self, source: Source, write: Emit, quote: str, schema: Any):
        self._source = source
        self._write = write
        self._quote = quote
        self._root = schema

    def read(self) -> Scan[None]:
        source, write = self._source, self._write
        closers: list[str] = []
        schemas: list[Any] = [self._root]
        expected = "value"
        while True:
            yield from source.skip_space()
            char = yield from source.peek()
            if closers and char == closers[-1] and expected in ("first key", "first value", "comma"):
                source.take(1)
                write(closers.pop())
                schemas.pop()
                expected = "comma"
            elif expected in ("value", "first value") and char in "{[":
                if len(closers) == MAX_DEPTH:
                    raise MalformedError
                write(source.take(1))
                closers.append("}" if char == "{" else "]")
                schemas.append(followed(schemas[-1], self._root).get("items") if char == "[" else None)
                expected = "first key" if char == "{" else "first value"
            elif expected in ("value", "first value"):
                yield from self._scalar(schemas[-1])
                expected = "comma"
            elif expected in ("key", "first key"):
                key = yield from self._key()
                write(f'"{quoted_text(key)}":')
                yield from source.skip_space()
                yield from source.expect(":")
                schemas[-1] = properties_of(schemas[-2], self._root).get(key)
                expected = "value"
            elif char == ",":
                write(source.take(1))
                expected = "key" if closers[-1] == "}" else "value"
            else:
                raise MalformedError
            if not closers:
                return

    def _key(self) -> Scan[str]:
        source, quote = self._source, self._quote
        if (yield from source.peek()) == quote[0] and (yield from source.literal(quote)):
            return (yield from source.text_until(quote))
        return (yield from _bare(source))

    def _scalar(self, schema: Any) -> Scan[None]:
        source, write, quote = self._source, self._write, self._quote
        if (yield from source.peek()) == quote[0] and (yield from source.literal(quote)):
            write('"')
            yield from source.copy_until((quote,), lambda text: write(quoted_text(text)))
            yield from source.expect(quote)
            write('"')
            return
        write(json_from_raw((yield from _bare(source)), value_types(schema, self._root)))


def _bare(source: Source) -> Scan[str]:
    pieces = []
    while (yield from source.any_left()) and (piece := source.take_run(_BARE)):
        pieces.append(piece)
    text = "".join(pieces).strip()
    if not text:
        raise MalformedError
    return text
