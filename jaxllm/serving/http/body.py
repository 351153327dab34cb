"""JSON bodies: bounded before anything is built of them, and free of numbers that no field can hold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pydantic_core

from jaxllm.requests.sampling import INT64_MIN
from jaxllm.serving.http.api_error import APIError, dotted
from jaxllm.wording import shown

SMALL_BODY = 64 * 1024
"""Bytes up to which a body is taken as it is, whatever it holds."""
MAX_VALUES = 2**20
"""Elements and fields of one body: ids of eight contexts of 128 Ki tokens."""
MAX_STRUCTURE = 100_000
"""Objects, lists and named fields of one body, which cost most to build: twelve for each piece of the longest chat."""
UINT64_MAX = 2**64 - 1

_SHAPE = bytes.maketrans(b"123456789E", b"000000000e")
_SLICE = 64 * 1024
_LONGEST = 19
"""Digits from which on an integer may be beyond 64 bits."""


def check_structure(raw: bytes) -> bool:
    """Count what parsing would build, outside strings.

    Returns whether a number in it may be beyond 64 bits.
    Raises APIError 400 when it is more than MAX_VALUES or MAX_STRUCTURE.
    """
    values = structure = 0
    overflow, before = False, b""
    for outside in _outside_strings(raw):
        values += outside.count(b",")
        structure += outside.count(b"{") + outside.count(b"[") + outside.count(b":")
        if structure > MAX_STRUCTURE:
            raise _too_much("objects, lists and named fields", MAX_STRUCTURE)
        if values > MAX_VALUES:
            raise _too_much("values", MAX_VALUES)
        overflow = overflow or may_overflow(before + outside)
        before = outside[-_LONGEST:]
    return overflow


def parse_object(raw: bytes) -> dict[str, Any]:
    """Raises APIError 400 with line and column where the JSON is malformed, or no object."""
    try:
        value = pydantic_core.from_json(raw, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise APIError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise APIError(400, f"the body is {shown(value)}; it must be a JSON object", code="invalid_json")
    return value


def may_overflow(raw: bytes) -> bool:
    """Whether a number in it, or what looks like one in a text, may be beyond 64 bits.

    Worked example: 1.5E+400 becomes 0.0e000.
    """
    shape = raw.translate(_SHAPE, b"+")
    return any(large in shape for large in (b"0" * _LONGEST, b"0e00", b".e00"))


def check_numbers(value: Any) -> None:
    """Raises APIError 400 naming the first number that is neither a 64-bit integer nor a finite float."""
    open_values: list[tuple[tuple[str | int, ...], Any]] = [((), value)]
    while open_values:
        path, value = open_values.pop()
        match value:
            case dict():
                open_values += (((*path, name), part) for name, part in value.items())
            case list():
                open_values += (((*path, at), part) for at, part in enumerate(value))
            case bool() | str() | None:
                pass
            case int() if not INT64_MIN <= value <= UINT64_MAX:
                raise _wrong_number(path, value, "a 64-bit integer")
            case float() if not math.isfinite(value):
                raise _wrong_number(path, value, "a number that a 64-bit float can hold")


def _outside_strings(raw: bytes) -> Iterator[bytes]:
    """What of it is not in quotes, of one slice after the other: of all at once the pieces would take gigabytes."""
    start, in_string = 0, False
    while start < len(raw):
        end = min(start + _SLICE, len(raw))
        part = raw[start:end]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # an escape is not to be cut in two
            end += 1
            part = raw[start:end]
        pieces = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(pieces[in_string::2])
        in_string ^= len(pieces) % 2 == 0
        start = end


def _too_much(what: str, limit: int) -> APIError:
    return APIError(400, f"the body has more than {limit} {what}, the most it may have", code="body_too_complex")


def _wrong_number(path: tuple[str | int, ...], value: float, accepted: str) -> APIError:
    name = dotted(path)
    return APIError(400, f"{name} is {shown(value)}; it must be {accepted}", param=name or None)
