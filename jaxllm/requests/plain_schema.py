"""JSON schemas without keywords that forbid nothing, which llguidance would refuse for their names alone.

The meaning of each keyword is that of JSON Schema 2020-12 and draft 7. A schema may have some that llguidance cannot
enforce, at a value at which there is nothing to enforce: `uniqueItems: false`, `dependentRequired: {}`, `not: false`.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

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
    """The schema as an object without what forbids nothing, and with integers' bounds as llguidance takes them exactly.

    With `"x-guidance": {"lenient": true}` in it, as a tool's schema has that is not strict, numbers that cannot be
    enforced exactly are left out as well.

    Raises:
        UnenforceableError: a bound, or a number among the values, that llguidance would round.
    """
    if isinstance(schema, bool):
        return {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        return schema
    options = schema.get("x-guidance")
    lenient = isinstance(options, dict) and options.get("lenient") is True
    root, nodes = _copied(schema)
    for node in reversed(nodes):  # what is inside first: whether it forbids anything decides about what is around it
        _prune(node)
        check_numbers(node, lenient=lenient)
    return root


def _copied(schema: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A copy of the schema, and all schemas in it that are objects, each before those inside it."""
    nodes: list[dict[str, Any]] = []

    def copy(value: Any) -> Any:
        if isinstance(value, dict):
            value = dict(value)
            nodes.append(value)
        return value

    root, at = copy(schema), 0
    while at < len(nodes):
        node = nodes[at]
        for key in _ONE:
            if key in node:
                node[key] = copy(node[key])
        for key in _LISTED:
            if isinstance(node.get(key), list):
                node[key] = [copy(value) for value in node[key]]
        for key in _NAMED:
            if isinstance(node.get(key), dict):
                node[key] = {name: copy(value) for name, value in node[key].items()}
        at += 1
    return root, nodes


def _prune(node: dict[str, Any]) -> None:
    """Leave out the node's own keywords that forbid nothing."""
    for key in (*_MAXIMA, *_MINIMA):
        if isinstance(node.get(key), float) and node[key].is_integer():
            node[key] = int(node[key])
    _prune_conditions(node)
    needless = [key for key, is_needless in _NEEDLESS.items() if key in node and is_needless(node[key], node)]
    for key in needless:
        del node[key]
    if "contains" not in node:
        _drop(node, "minContains", "maxContains")


def _prune_conditions(node: dict[str, Any]) -> None:
    condition = node.get("if")
    then_forbids = not _allows_none(condition) and not _allows_all(node.get("then", True))
    else_forbids = not _allows_all(condition) and not _allows_all(node.get("else", True))
    if "if" not in node or not (then_forbids or else_forbids):
        _drop(node, "if", "then", "else")


def _drop(node: dict[str, Any], *keys: str) -> None:
    for key in keys:
        node.pop(key, None)


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
    types = schema.get("type", "string")
    is_any_string = types == "string" or (isinstance(types, list) and "string" in types)
    return is_any_string and schema.keys() & _SAY_SOMETHING <= _OF_OTHER_TYPES | {"type"}


def _are_required(names: Any, node: dict[str, Any]) -> bool:
    required = node.get("required")
    required = required if isinstance(required, list) else []
    return isinstance(names, list) and all(name in required for name in names)


def _requires_nothing_more(dependencies: Any, node: dict[str, Any]) -> bool:
    """Whatever properties there are, the others that they ask for are required in any case."""
    if not isinstance(dependencies, dict):
        return False
    return all(_allows_all(value) or _are_required(value, node) for value in dependencies.values())


def _is_zero(value: Any, _: dict[str, Any]) -> bool:
    return type(value) is int and value == 0


def _is_beyond_answers(value: Any, _: dict[str, Any]) -> bool:
    return type(value) is int and value >= MOST_COUNTED


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
    **dict.fromkeys(_MAXIMA, _is_beyond_answers),
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
    """Give the schema's own bounds to llguidance as it takes them exactly; what it would round is refused.

    Integers' exclusive bounds become inclusive ones, since it counts to the next integer in floats. With `lenient`
    bounds that would be rounded are left out.

    Raises:
        UnenforceableError: it names the keyword and the value.
    """
    is_whole = _has_only_integers(node.get("type"))
    if is_whole:
        for inclusive, exclusive, step in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
            _include(node, inclusive, exclusive, step)
    for key in (*_BOUNDS, "multipleOf"):
        value: Any = node.get(key)
        excludes = key.startswith("exclusive") or node.get(f"exclusive{key.capitalize()}") is True
        if _is_number(value) and not _is_exact(key, value, is_whole, excludes):
            if not lenient:
                raise _refusal(key, value)
            del node[key]
    for key in ("const", "enum"):
        for value in _integers(node.get(key)):
            if not -(2**63) <= value < 2**64:
                raise UnenforceableError(f"{key} has {value}; integers must be from {-(2**63)} to {2**64 - 1}")


def _has_only_integers(types: Any) -> bool:
    named = types if isinstance(types, list) else [types]
    return "integer" in named and all(isinstance(name, str) and name in _WHOLE for name in named)


def _include(node: dict[str, Any], inclusive: str, exclusive: str, step: int) -> None:
    """Worked example: `exclusiveMaximum: 10` becomes `maximum: 9`, of integers; so does draft 4's `maximum: 10,
    exclusiveMaximum: true`.
    """
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


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


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


def _refusal(key: str, value: float) -> UnenforceableError:
    return UnenforceableError(f"{key} is {value}, which would be rounded; it is exact from {-_SAFE} to {_SAFE}")


def _integers(value: Any) -> list[int]:
    """All integers inside a JSON value."""
    found, todo = [], [value]
    while todo:
        value = todo.pop()
        if type(value) is int:
            found.append(value)
        elif isinstance(value, (list, dict)):
            todo += value.values() if isinstance(value, dict) else value
    return found
