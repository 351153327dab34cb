"""JSON schemas as llguidance takes them: without keywords that forbid nothing.

Keywords have their meaning in JSON Schema 2020-12 and draft 7.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any
from urllib.parse import quote, unquote

from jaxllm.errors import JaxLLMError

ENFORCED_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
)
"""Of strings. Other formats are annotations, as the standard has them by default."""
MOST_COUNTED = 2**31
"""No answer has as many characters, items or properties: a larger limit forbids nothing."""

_ONE = (
    "items", "additionalItems", "contains", "unevaluatedItems", "additionalProperties", "unevaluatedProperties",
    "propertyNames", "not", "if", "then", "else", "contentSchema",
)  # fmt: skip
"""Keywords whose value is a schema."""
_LISTED = ("items", "prefixItems", "allOf", "anyOf", "oneOf")
_NAMED = ("properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions")
_MAXIMA, _MINIMA = ("maxLength", "maxItems", "maxProperties"), ("minLength", "minItems", "minProperties", "minContains")
_OF_OTHER_TYPES = {
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "items", "prefixItems",
    "additionalItems", "unevaluatedItems", "contains", "minContains", "maxContains", "minItems", "maxItems",
    "uniqueItems", "properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames",
    "required", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies",
}  # fmt: skip
"""Keywords that say nothing about a string."""
_SAY_SOMETHING = _OF_OTHER_TYPES | {
    "$ref", "$dynamicRef", "$recursiveRef", "type", "enum", "const", "not", "if", "then", "else", "allOf", "anyOf",
    "oneOf", "minLength", "maxLength", "pattern", "format",
}  # fmt: skip
"""Keywords that may forbid a value; the others are annotations."""


def plain(schema: Any) -> Any:
    """The schema as an object, without keywords that forbid nothing, and with others said as llguidance takes them.

    With `"x-guidance": {"lenient": true}` in it, what cannot be enforced exactly is left out.
    Raises UnenforceableError: a bound, or a number among the values, that llguidance would round; `false`.
    """
    if schema is True:
        return {}
    if schema is False:
        raise UnenforceableError("the schema is false, which allows no value")
    if not isinstance(schema, dict):
        return schema
    lenient = is_lenient(schema)
    root, nodes = _copied(schema)
    for node in reversed(nodes):  # what is inside first: whether it forbids anything decides about what is around it
        _prune(node)
        _write_for_llguidance(node, root, lenient)
        check_numbers(node, lenient=lenient)
    return root


def is_lenient(schema: dict[str, Any]) -> bool:
    options = schema.get("x-guidance")
    return isinstance(options, dict) and options.get("lenient") is True


def _copied(schema: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    nodes: list[dict[str, Any]] = []

    def copy(value: Any) -> Any:
        if isinstance(value, dict):
            value = dict(value)
            nodes.append(value)
        return value

    root = copy(schema)
    for node in nodes:  # there are more and more
        for key in dict.fromkeys((*_ONE, *_LISTED, *_NAMED)):
            value = node.get(key)
            if key in _LISTED and isinstance(value, list):
                node[key] = [copy(inner) for inner in value]
            elif key in _NAMED and isinstance(value, dict):
                node[key] = {name: copy(inner) for name, inner in value.items()}
            elif key in _ONE and isinstance(value, dict):
                node[key] = copy(value)
    return root, nodes


def _prune(node: dict[str, Any]) -> None:
    for key in (*_MAXIMA, *_MINIMA):
        if isinstance(node.get(key), float) and node[key].is_integer():
            node[key] = int(node[key])
    needless = ["if", "then", "else"] if _has_idle_condition(node) else []
    needless += [key for key, is_needless in _NEEDLESS.items() if key in node and is_needless(node[key], node)]
    if "contains" not in node or "contains" in needless:
        needless += ["minContains", "maxContains"]
    for key in needless:
        node.pop(key, None)


_LOOKS_AROUND = re.compile(r"(?<!\\)\(\?<?[=!]")


def _write_for_llguidance(node: dict[str, Any], root: dict[str, Any], lenient: bool) -> None:
    """Say the same in keywords that llguidance knows; much of it is as zod and pydantic write it."""
    pattern, form, reference = (node.get(key) for key in ("pattern", "format", "$ref"))
    if isinstance(pattern, str) and _LOOKS_AROUND.search(pattern) and (lenient or form in ENFORCED_FORMATS):
        del node["pattern"]
    elif isinstance(pattern, str) and form == "time":
        del node["format"]  # of the standard, with an offset; zod's pattern has none
    if isinstance(reference, str):
        node["$ref"] = quote(reference, safe="#/%~!$&'()*+,;=:@?")
    if isinstance(node.get("oneOf"), list) and "anyOf" not in node and _are_disjoint(node["oneOf"], root):
        node["anyOf"] = node.pop("oneOf")
    _list_names(node)


def _list_names(node: dict[str, Any]) -> None:
    """`propertyNames` as properties, or as a pattern of them.

    Worked example: {"propertyNames": {"enum": ["a"]}, "additionalProperties": S} becomes
    {"properties": {"a": S}, "additionalProperties": false}.
    """
    names, own = node.get("propertyNames"), node.get("properties", {})
    if not isinstance(names, dict) or not isinstance(own, dict) or "patternProperties" in node:
        return
    others, said = node.get("additionalProperties", True), names.keys() & _SAY_SOMETHING - {"type"}
    listed = names.get("enum", [names.get("const")])
    if said in ({"enum"}, {"const"}) and isinstance(listed, list) and all(isinstance(name, str) for name in listed):
        node["properties"] = {name: own.get(name, others) for name in listed}
    elif said == {"pattern"} and not own:
        node["patternProperties"] = {names["pattern"]: others}
    else:
        return
    del node["propertyNames"]
    node["additionalProperties"] = False


def followed_members(members: list[Any], root: dict[str, Any]) -> list[Any]:
    """The schemas, or what they refer to where they do nothing else."""
    return [pointed(m["$ref"], root) if isinstance(m, dict) and m.keys() == {"$ref"} else m for m in members]


def pointed(reference: Any, root: Any) -> Any:
    """The part of a document that a JSON pointer such as #/$defs/day means; None where it means none."""
    if not isinstance(reference, str) or not f"{reference}/".startswith("#/"):
        return None
    found = root
    for part in reference.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            found = found.get(key) if isinstance(found, dict) else None
    return found


def _are_disjoint(members: list[Any], root: dict[str, Any]) -> bool:
    """No value is of two of the schemas, because their types differ, or a string that all objects require does."""
    found = followed_members(members, root)
    if not all(isinstance(member, dict) and "type" in member for member in found):
        return False
    types = [{"number" if t == "integer" else t for t in as_list(member["type"])} for member in found]
    objects = [member for member, own in zip(found, types, strict=True) if "object" in own]
    kinds = [kind for own in types for kind in own if kind != "object" or len(objects) == 1]
    return len(set(kinds)) == len(kinds) and (len(objects) < 2 or differ(objects))


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def differ(objects: list[Any]) -> bool:
    """Whether all are schemas of objects, and a string that all require has other values in each."""
    if not all(isinstance(m, dict) and "required" in m and "properties" in m for m in objects):
        return False
    for name in objects[0]["required"]:
        found = [m["properties"].get(name) if name in m["required"] else None for m in objects]
        each = [[own["const"]] if "const" in own else own.get("enum", []) for own in found if isinstance(own, dict)]
        values = [value for own in each for value in own]
        are_strings = len(each) == len(found) and all(each) and all(isinstance(value, str) for value in values)
        if are_strings and len(set(values)) == len(values):
            return True
    return False


def _has_idle_condition(node: dict[str, Any]) -> bool:
    condition = node.get("if")
    then_forbids = not _allows_none(condition) and not _allows_all(node.get("then", True))
    else_forbids = not _allows_all(condition) and not _allows_all(node.get("else", True))
    return "if" not in node or not (then_forbids or else_forbids)


def _allows_all(schema: Any) -> bool:
    return schema is True or (isinstance(schema, dict) and schema.keys().isdisjoint(_SAY_SOMETHING))


def _allows_none(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return schema is False
    return schema.get("enum") == [] or ("not" in schema and _allows_all(schema["not"]))


def _allows_all_strings(schema: Any) -> bool:
    """Worked example: zod writes a record's names as `{"type": "string"}`, and names are strings."""
    if not isinstance(schema, dict):
        return schema is True
    return "string" in as_list(schema.get("type", "string")) and schema.keys() & _SAY_SOMETHING <= _OF_OTHER_TYPES | {
        "type"
    }


def _are_required(names: Any, node: dict[str, Any]) -> bool:
    return isinstance(names, list) and all(name in as_list(node.get("required")) for name in names)


def _requires_nothing_more(dependencies: Any, node: dict[str, Any]) -> bool:
    """Whatever properties there are, the others that they ask for are required in any case."""
    if not isinstance(dependencies, dict):
        return False
    return all(_allows_all(value) or _are_required(value, node) for value in dependencies.values())


def _is_zero(value: Any, _: dict[str, Any]) -> bool:
    return type(value) is int and value == 0


_NEEDLESS: dict[str, Callable[[Any, dict[str, Any]], bool]] = {
    "uniqueItems": lambda value, _: value is False,
    "contains": lambda _, node: _is_zero(node.get("minContains"), node) and "maxContains" not in node,
    "propertyNames": lambda value, _: _allows_all_strings(value),
    "dependentRequired": _requires_nothing_more,
    "dependentSchemas": _requires_nothing_more,
    "dependencies": _requires_nothing_more,
    "unevaluatedItems": lambda value, node: _allows_all(value) or isinstance(node.get("items"), (dict, bool)),
    "unevaluatedProperties": lambda value, node: _allows_all(value) or "additionalProperties" in node,
    "not": lambda value, _: _allows_none(value),
    "format": lambda value, _: isinstance(value, str) and value not in ENFORCED_FORMATS,
    "$dynamicAnchor": lambda *_: True,
    "$recursiveAnchor": lambda *_: True,
    **dict.fromkeys(("minLength", "minItems", "minProperties"), _is_zero),
    **dict.fromkeys(_MAXIMA, lambda value, _: _is_integer(value) and value >= MOST_COUNTED),
}
"""Of each keyword, whether it forbids nothing at this value in this schema."""


_SAFE = 2**53
"""All integers up to it, and not the next one, are 64-bit floats."""
_MOST_DIGITS = 10**18
"""llguidance makes no range of numbers that begins at this one or beyond."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_WHOLE = {"integer", "null", "boolean", "string", "array", "object"}
"""Types of which integers are the only numbers."""


class UnenforceableError(JaxLLMError):
    """A constraint that is well-formed, and that no grammar of llguidance's holds an answer to."""


def check_numbers(node: dict[str, Any], *, lenient: bool = False) -> None:
    """Give the schema's own bounds to llguidance as inclusive ones; those it would round are left out if `lenient`.

    Raises UnenforceableError: it names the keyword and the value.
    """
    types = as_list(node.get("type"))
    is_whole = "integer" in types and all(isinstance(name, str) and name in _WHOLE for name in types)
    if is_whole:
        for inclusive, exclusive, step in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
            _include(node, inclusive, exclusive, step)
    for key in (*_BOUNDS, "multipleOf"):
        value: Any = node.get(key)
        excludes = key.startswith("exclusive") or node.get(f"exclusive{key.capitalize()}") is True
        if type(value) in (int, float) and not _is_exact(key, value, is_whole, excludes):
            if not lenient:
                problem = f"which would be rounded; it is exact from {-_SAFE} to {_SAFE}"
                raise UnenforceableError(f"{key} is {value}, {problem}")
            del node[key]
    for key in ("const", "enum"):
        for value in _integers(node.get(key)):
            if not -(2**63) <= value < 2**64:
                raise UnenforceableError(f"{key} has {value}; integers must be from {-(2**63)} to {2**64 - 1}")


def _include(node: dict[str, Any], inclusive: str, exclusive: str, step: int) -> None:
    """Worked example: of integers `exclusiveMaximum: 10`, or draft 4's `maximum: 10` with it, becomes `maximum: 9`."""
    bound: Any = node.get(exclusive)
    other: Any = node.get(inclusive)
    excluded, others = (other, []) if bound is True else (bound, [] if other is None else [other])
    if not _is_integer(excluded) or not all(map(_is_integer, others)):
        return
    stricter = max if step > 0 else min
    nearest = stricter([excluded + step, *others])
    if _is_exact(inclusive, nearest, True):
        node[inclusive] = nearest
        del node[exclusive]


def _is_integer(value: Any) -> bool:
    return type(value) is int


def _is_exact(key: str, value: float, is_whole: bool, excludes: bool = False) -> bool:
    counts_on = is_whole and excludes
    if abs(value) <= _SAFE - counts_on:
        return True
    if key == "multipleOf" or counts_on or (isinstance(value, float) and not value.is_integer()):
        return False  # the latter is infinite: 1e999
    if is_whole:
        value = int(value)
        least, most = (1 - _MOST_DIGITS, 2**63 - 1) if key == "maximum" else (1 - 2**63 + 1023, _MOST_DIGITS - 1)
        return least <= value <= most and value in (int(float(value)), 2**63 - 1)
    return abs(value) < _MOST_DIGITS and Decimal(repr(float(value))) == value


def _integers(value: Any) -> list[int]:
    todo = [value]
    for value in todo:  # there are more and more
        todo += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value for value in todo if type(value) is int]
