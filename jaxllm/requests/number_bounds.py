"""Numbers of a JSON schema that llguidance would round: it reads bounds as 64-bit floats."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from jaxllm.errors import JaxLLMError

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
