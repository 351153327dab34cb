"""Scanner of MiniMax M3's calls: arguments as elements that may hold others, each tag behind a mark of its own."""

from __future__ import annotations

import json
from typing import Any

from jaxllm.serving.parsing.calls import closing, tool_name
from jaxllm.serving.parsing.source import (
    MalformedError,
    Scan,
    Source,
    any_left,
    copy_until,
    expect,
    next_of,
    one_of,
    skip_space,
    text_until,
)
from jaxllm.serving.parsing.values import followed, json_from_raw, properties_of, value_types
from jaxllm.serving.parsing.writer import CallWriter

MAX_NESTING = 64
"""Of elements, each level of which takes some of Python's stack."""
MARK = "]<]minimax[>["
CALLS, CALLS_END = f"{MARK}<tool_call>", f"{MARK}</tool_call>"
INVOKE, INVOKE_END = f'{MARK}<invoke name="', f"{MARK}</invoke>"
_TEXT = "$text"
"""The key of text that stands beside elements."""

_Element = str | list[tuple[str, Any]]
"""An element's text, or the names and values of those in it."""


def element_calls(source: Source, writer: CallWriter, *, inside: bool = False) -> Scan[None]:
    """Calls one after the other, and the end of the section. `inside` is behind the first INVOKE.

    A call is given when it is complete: an element that comes again makes an array of the first.
    """
    if not inside:
        yield from skip_space(source)
        yield from expect(source, INVOKE)
    while True:
        name = yield from tool_name(source, writer)
        yield from expect(source, '">')
        found: list[tuple[str, Any]] = []
        yield from skip_space(source)
        while (yield from one_of(source, (INVOKE_END, f"{MARK}<"))) != INVOKE_END:
            found.append((yield from _element(source, 1)))
            yield from skip_space(source)
        writer.begin(name)
        root = writer.schemas[name]
        writer.write(json.dumps(_object(found, root, root), ensure_ascii=False))
        yield from skip_space(source)
        if not ((yield from any_left(source)) and (yield from next_of(source, (INVOKE,)))):
            break
        source.take(len(INVOKE))
    yield from closing(source, writer, CALLS_END)


def _element(source: Source, depth: int) -> Scan[tuple[str, _Element]]:
    """The element whose name comes next."""
    name = yield from text_until(source, ">")
    if depth > MAX_NESTING or not name.strip() or name.startswith("/"):
        raise MalformedError
    text: list[str] = []
    inner: list[tuple[str, Any]] = []
    close = f"{MARK}</{name}>"
    while True:
        yield from copy_until(source, (MARK,), text.append)
        if (yield from one_of(source, (close, f"{MARK}<"))) == close:
            break
        inner.append((yield from _element(source, depth + 1)))
    whole = "".join(text)
    if not inner:
        return name, whole
    if whole.strip():
        inner.append((_TEXT, whole))
    return name, inner


def _value(element: _Element, schema: Any, root: Any) -> Any:
    types = value_types(schema, root)
    if not isinstance(element, str):
        if "array" in types:
            items = _of_kind(schema, root, "array").get("items")
            return [_value(inner, items, root) for _, inner in element]
        return _object(element, _of_kind(schema, root, "object"), root)
    if types and "string" not in types and not element.strip():
        return [] if "array" in types else {} if "object" in types else element
    return json.loads(json_from_raw(element, types))


def _object(elements: list[tuple[str, Any]], schema: Any, root: Any) -> dict[str, Any]:
    properties = properties_of(schema, root)
    values: dict[str, list[Any]] = {}
    for name, element in elements:
        values.setdefault(name, []).append(_value(element, properties.get(name), root))
    return {name: found[0] if len(found) == 1 else found for name, found in values.items()}


def _of_kind(schema: Any, root: Any, kind: str) -> dict[str, Any]:
    """The schema itself, or the first of those that it joins, that describes values of this kind."""
    whole = followed(schema, root)
    options = [option for union in ("anyOf", "oneOf") for option in whole.get(union) or ()]
    return next((followed(option, root) for option in options if kind in value_types(option, root)), whole)
