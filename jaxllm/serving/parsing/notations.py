"""Scanners of tool calls whose arguments are not JSON; they become JSON on the way."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from jaxllm.serving.parsing.calls import CallWriter, closing, named_arguments, tool_name
from jaxllm.serving.parsing.json_text import MAX_DEPTH, is_scalar, quoted_text
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

_KINDS = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}
_BARE = re.compile(r"[^,:{}\[\]]+")


def value_types(schema: Any, depth: int = 0) -> set[str]:
    """The JSON types that a property's schema allows; empty when it doesn't say."""
    if not isinstance(schema, dict) or depth > 8:
        return set()
    stated = schema.get("type", [])
    types = {stated} if isinstance(stated, str) else {kind for kind in stated if isinstance(kind, str)}
    for union in ("anyOf", "oneOf"):
        options = schema.get(union)
        if isinstance(options, list):
            types |= {kind for option in options for kind in value_types(option, depth + 1)}
    if not types:
        values = (
            schema["enum"] if isinstance(schema.get("enum"), list) else [schema[k] for k in ("const",) if k in schema]
        )
        types = {_KINDS[type(value)] for value in values if type(value) in _KINDS}
    if "number" in types:
        types.add("integer")
    return types


def json_from_raw(raw: str, types: set[str]) -> str:
    """The JSON text of a value written raw: a string as it is, anything else as JSON.

    `raw` is what JSON says it is where `types` allow that, and a string otherwise.
    """
    text = raw.strip()
    if "boolean" in types and text in ("True", "False"):
        text = text.lower()
    if "null" in types and text == "None":
        text = "null"
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return f'"{quoted_text(raw)}"'
    kind = _KINDS[type(value)]
    whole = kind == "number" and "integer" in types and value.is_integer()
    return text if not types or kind in types or whole else f'"{quoted_text(raw)}"'


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def raw_value(source: Source, schema: Any, stops: Sequence[str], write: Emit) -> Scan[str]:
    """Text up to the first of `stops` as JSON, streamed where only a string is allowed; the stop, not consumed."""
    types = value_types(schema)
    if types == {"string"}:
        write('"')
        stop = yield from copy_until(source, stops, lambda text: write(quoted_text(text)))
        write('"')
    else:
        pieces: list[str] = []
        stop = yield from copy_until(source, stops, pieces.append)
        write(json_from_raw("".join(pieces), types))
    return stop


def properties_of(writer: CallWriter, name: str) -> dict[str, Any]:
    """The schemas of a known tool's parameters, by name."""
    properties = writer.schemas[name].get("properties")
    return properties if isinstance(properties, dict) else {}


def keyed_call(source: Source, writer: CallWriter) -> Scan[None]:
    """Behind <tool_call>: name, <arg_key>key</arg_key><arg_value>raw value</arg_value> …, </tool_call>."""
    yield from skip_space(source)
    name = yield from tool_name(source, writer)
    properties = properties_of(writer, name)
    yield from skip_space(source)
    before = "{"
    while (yield from one_of(source, ("<arg_key>", "</tool_call>"))) == "<arg_key>":
        key: list[str] = []
        yield from copy_until(source, ("</arg_key>",), key.append)
        yield from expect(source, "</arg_key>")
        yield from skip_space(source)
        yield from expect(source, "<arg_value>")
        if before == "{":
            writer.begin(name)
        label = "".join(key).strip()
        writer.write(f'{before}"{quoted_text(label)}": ')
        before = ", "
        yield from raw_value(source, properties.get(label), ("</arg_value>",), writer.write)
        yield from expect(source, "</arg_value>")
        yield from skip_space(source)
    if before == "{":
        writer.begin(name)
    writer.write("{}" if before == "{" else "}")


def function_tag(source: Source, writer: CallWriter) -> Scan[None]:
    """Behind <function=: name>, then {…} or <parameter=key>raw value</parameter> …, then </function>."""
    name = yield from tool_name(source, writer)
    yield from expect(source, ">")
    yield from skip_space(source)
    if (yield from peek(source)) == "{":
        yield from named_arguments(source, writer, name)
        yield from closing(source, writer, "</function>")
    else:
        yield from _parameters(source, writer, name)
    yield from closing(source, writer, "</tool_call>")


def wrapped_function_tag(source: Source, writer: CallWriter) -> Scan[None]:
    """Behind <tool_call>: a function tag."""
    yield from skip_space(source)
    yield from expect(source, "<function=")
    yield from function_tag(source, writer)


def _parameters(source: Source, writer: CallWriter, name: str) -> Scan[None]:
    """A value on lines of its own ends at a newline and a tag, another at a tag; </parameter> may be missing."""
    properties = properties_of(writer, name)
    before = "{"
    while (yield from one_of(source, ("<parameter=", "</function>"))) == "<parameter=":
        key: list[str] = []
        yield from copy_until(source, (">",), key.append)
        yield from expect(source, ">")
        if before == "{":
            writer.begin(name)
        label = "".join(key)
        writer.write(f'{before}"{quoted_text(label)}": ')
        before = ", "
        line = (yield from peek(source)) == "\n" and (yield from literal(source, "\n"))
        stops = ["</parameter>", "</function>", "<parameter="]
        if line:
            stops = ["\n" + stop for stop in stops]
        stop = yield from raw_value(source, properties.get(label), stops, writer.write)
        if stop == stops[0]:
            yield from expect(source, stop)
        yield from skip_space(source)
    if before == "{":
        writer.begin(name)
    writer.write("{}" if before == "{" else "}")


def gemma_call(source: Source, writer: CallWriter, *, quote: str, close: str) -> Scan[None]:
    """call:name{key:value,…}: keys without quotes, strings between two `quote`s, the rest as in JSON."""
    yield from expect(source, "call:")
    name = yield from tool_name(source, writer)
    if (yield from peek(source)) != "{":
        raise MalformedError
    writer.begin(name)
    yield from _gemma_object(source, writer.write, quote)
    yield from closing(source, writer, close)


def _gemma_object(source: Source, write: Emit, quote: str) -> Scan[None]:
    """Works like json_value: a stack of closers and what is expected next."""
    closers: list[str] = []
    expected = "value"
    while True:
        yield from skip_space(source)
        char = yield from peek(source)
        if closers and char == closers[-1] and expected in ("first key", "first value", "comma"):
            source.take(1)
            write(closers.pop())
            expected = "comma"
        elif expected in ("value", "first value") and char in "{[":
            if len(closers) == MAX_DEPTH:
                raise MalformedError
            write(source.take(1))
            closers.append("}" if char == "{" else "]")
            expected = "first key" if char == "{" else "first value"
        elif expected in ("value", "first value"):
            yield from _gemma_scalar(source, write, quote)
            expected = "comma"
        elif expected in ("key", "first key"):
            write(f'"{quoted_text((yield from _gemma_key(source, quote)))}":')
            yield from skip_space(source)
            yield from expect(source, ":")
            expected = "value"
        elif char == ",":
            write(source.take(1))
            expected = "key" if closers[-1] == "}" else "value"
        else:
            raise MalformedError
        if not closers:
            return


def _gemma_key(source: Source, quote: str) -> Scan[str]:
    pieces: list[str] = []
    if (yield from peek(source)) == quote[0] and (yield from literal(source, quote)):
        yield from copy_until(source, (quote,), pieces.append)
        yield from expect(source, quote)
        return "".join(pieces)
    return (yield from _bare(source))


def _gemma_scalar(source: Source, write: Emit, quote: str) -> Scan[None]:
    if (yield from peek(source)) == quote[0] and (yield from literal(source, quote)):
        write('"')
        yield from copy_until(source, (quote,), lambda text: write(quoted_text(text)))
        yield from expect(source, quote)
        write('"')
        return
    text = yield from _bare(source)
    write(text if is_scalar(text) else f'"{quoted_text(text)}"')


def _bare(source: Source) -> Scan[str]:
    pieces = []
    while (yield from any_left(source)) and (piece := source.take_run(_BARE)):
        pieces.append(piece)
    text = "".join(pieces).strip()
    if not text:
        raise MalformedError
    return text
