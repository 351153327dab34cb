"""Raw text of arguments: its JSON by the tool's schema, and what a schema asks of it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from jaxllm.chat.events import CallWriter
from jaxllm.chat.source import Emit, Scan, Source, quoted_text
from jaxllm.requests.schema import pointed
from jaxllm.requests.structured_outputs import ascii_classes

MAX_PARTS = 200
"""How many schemas are followed to see what one value is."""
_KINDS = {
    str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array", dict: "object",
}  # fmt: skip


def followed(schema: Any, root: Any, seen: set[int] | None = None) -> dict[str, Any]:
    """A schema with its `$ref`s, looked up in `root`, and `allOf` put into it; the first that says something wins.

    {} where the schema is no object or refers to nothing. References in `seen` are not followed again.
    """
    seen = set() if seen is None else seen
    if not isinstance(schema, dict) or id(schema) in seen or len(seen) == MAX_PARTS:
        return {}
    seen.add(id(schema))
    whole = schema.get("allOf")
    others = [pointed(schema["$ref"], root)] if "$ref" in schema else []
    others += whole if isinstance(whole, list) else []
    merged = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
    for other in others:
        for key, value in followed(other, root, seen).items():
            merged.setdefault(key, value)
    return merged


def value_types(schema: Any, root: Any, seen: set[int] | None = None) -> set[str]:
    """The JSON types that a property's schema allows; empty when it doesn't say. `root` is the whole schema."""
    seen = set() if seen is None else seen
    schema = followed(schema, root, seen)
    stated = schema.get("type", [])
    types = {stated} if isinstance(stated, str) else {kind for kind in stated if isinstance(kind, str)}
    types &= set(_KINDS.values())
    for union in ("anyOf", "oneOf"):
        options = schema.get(union)
        if isinstance(options, list):
            types |= {kind for option in options for kind in value_types(option, root, seen)}
    if not types:
        values = schema["enum"] if isinstance(schema.get("enum"), list) else []
        values = values or [schema[key] for key in ("const",) if key in schema]
        types = {_KINDS[type(value)] for value in values if type(value) in _KINDS}
    if "number" in types:
        types.add("integer")
    return types


def json_from_raw(raw: str, types: set[str]) -> str:
    """The JSON text of a value written raw, which is a string unless JSON says otherwise and `types` allow that."""
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


def raw_value(
    source: Source, types: set[str], stops: Sequence[str], write: Emit, last: Sequence[str] = ()
) -> Scan[str]:
    """Text up to one of `stops`, or of `last` at its end, as JSON; a string is streamed. The stop, not consumed."""
    if types == {"string"}:
        write('"')
        stop = yield from source.copy_until(stops, lambda text: write(quoted_text(text)), last)
        write('"')
    else:
        pieces: list[str] = []
        stop = yield from source.copy_until(stops, pieces.append, last)
        write(json_from_raw("".join(pieces), types))
    return stop


def raw_argument(
    source: Source, writer: CallWriter, key: str, types: set[str], stops: Sequence[str], last: Sequence[str] = ()
) -> Scan[None]:
    """The argument `key`: a raw value, and the first of `stops`, which may be missing where another one comes."""
    writer.key(key)
    if (yield from raw_value(source, types, stops, writer.write, last)) == stops[0]:
        yield from source.expect(stops[0])
        writer.claim()


def properties_of(schema: Any, root: Any) -> dict[str, Any]:
    properties = followed(schema, root).get("properties")
    return properties if isinstance(properties, dict) else {}


def parameter_types(writer: CallWriter, tool: str, name: str) -> set[str]:
    root = writer.schemas[tool]
    return value_types(properties_of(root, root).get(name), root)


_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
"""Of a regular expression: an escaped character, a class, or one character."""
_UNKNOWN = re.compile(r"\\[bBAZzpPkG1-9]|\(\?(?!:)")
"""Assertions, back references and Unicode's classes, which grammars do not know or know otherwise."""


def text_limits(schema: Any, strict: bool) -> list[str]:
    """Regular expressions of llguidance's that all match a string; others are left out unless `strict`."""
    if not isinstance(schema, dict):
        return []
    limits = []
    least, most = (schema.get(name) for name in ("minLength", "maxLength"))
    least = least if isinstance(least, int) else 0
    if least or isinstance(most, int):
        limits.append(f"(?s:.{{{least},{most if isinstance(most, int) else ''}}})")
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and (strict or _is_plain(pattern)):
        limits.append(whole_text(pattern).replace("\n", r"\n"))
    return limits


def whole_text(pattern: str) -> str:
    """A pattern that may match anywhere as one of a whole text: "^a|b" is `(?:(?:a)(?s:.*))|(?:(?s:.*)(?:b))`."""
    anchored = []
    for alternative in _alternatives(pattern):
        starts, ends = alternative[:1] == ["^"], alternative[-1:] == ["$"]
        inner = "".join(alternative[starts : len(alternative) - ends])
        escaped = ascii_classes(inner).replace("\\/", "/").replace("/", "\\/")
        anchored.append(("" if starts else "(?s:.*)") + f"(?:{escaped})" + ("" if ends else "(?s:.*)"))
    return "|".join(f"(?:{alternative})" for alternative in anchored)


def _alternatives(pattern: str) -> list[list[str]]:
    found: list[list[str]] = [[]]
    depth = 0
    for piece in _PIECE.findall(pattern):
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and depth == 0:
            found.append([])
        else:
            found[-1].append(piece)
    return found


def _is_plain(pattern: str) -> bool:
    """Whether grammars can have it: a regular expression without assertions but at the ends of its alternatives."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    inside = [piece for found in _alternatives(pattern) for piece in found[found[:1] == ["^"] :]]
    ends = sum(found[-1:] == ["$"] for found in _alternatives(pattern))
    return not _UNKNOWN.search(pattern) and "^" not in inside and inside.count("$") == ends
