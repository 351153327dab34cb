"""JSON text read in slices: a call that reads megabytes keeps every other thread waiting until it is done."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pydantic_core

SLICE = 64 * 1024
"""Bytes, which a call reads in less than a millisecond."""
MIN_RUN = 2 * SLICE
_NUMBERS = b"0123456789.,+-eE \t\r\n"


class Integers(list[int]):
    """A list of nothing but integers, so that a validator need not look at each of them again."""


def outside_strings(raw: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(start, end, what of it is not in quotes) of one slice after the other."""
    start, in_string = 0, False
    while start < len(raw):
        end = min(start + SLICE, len(raw))
        part = raw[start:end]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # an escape is not to be cut in two
            end += 1
            part = raw[start:end]
        pieces = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield start, end, b"".join(pieces[in_string::2])
        in_string ^= len(pieces) % 2 == 0
        start = end


def from_json(raw: bytes) -> Any:
    """The value of JSON text, in which long lists of integers are `Integers`. Raises ValueError where it is malformed.

    Worked example: of `{"a": [1,2,3,4]}` with a long run of numbers `2,3`, the values of that are read in slices, and
    then put in the place of a name that nobody can guess in `{"a": [1,"name",4]}`.
    """
    runs: dict[str, list[Any]] = {}
    pieces: list[bytes] = []
    done = 0
    for start, end in _runs_of_numbers(raw):
        name = secrets.token_hex(16)
        runs[name] = _numbers(raw, start, end)
        pieces += raw[done:start], b'"' + name.encode() + b'"'
        done = end
    if not runs:
        return _parse(raw)
    return _filled(_parse(b"".join([*pieces, raw[done:]])), runs)


def _parse(raw: bytes) -> Any:
    return pydantic_core.from_json(raw, allow_inf_nan=False, cache_strings="none")


def _runs_of_numbers(raw: bytes) -> Iterator[tuple[int, int]]:
    """Where long runs of numbers begin and end, with a comma on either side."""
    begin = stop = -1
    for start, end, outside in outside_strings(raw):
        if len(outside) == end - start and not outside.translate(None, _NUMBERS):
            begin, stop = (start if begin < 0 else begin), end
            continue
        yield from _run(raw, begin, stop)
        begin = -1
    yield from _run(raw, begin, stop)


def _run(raw: bytes, begin: int, stop: int) -> Iterator[tuple[int, int]]:
    if begin < 0 or stop - begin < MIN_RUN:
        return
    first, last = raw.find(b",", begin, stop), raw.rfind(b",", begin, stop)
    if first < last:
        yield first + 1, last


def _numbers(raw: bytes, start: int, end: int) -> list[Any]:
    found: list[Any] = []
    while start < end:
        cut = raw.find(b",", start + SLICE, end)
        cut = end if cut < 0 else cut
        try:
            values = _parse(b"[" + raw[start:cut] + b"]")
        except ValueError as error:
            raise ValueError(f"{error} of the list that goes on at byte {start}") from None
        if not values or cut == end - 1:
            raise ValueError(f"a value is missing in the list that goes on at byte {start}")
        found += values
        start = cut + 1
    return found


def _filled(value: Any, runs: dict[str, list[Any]]) -> Any:
    """`value` with the runs in the place of their names."""
    if isinstance(value, dict):
        return {name: _filled(part, runs) for name, part in value.items()}
    if not isinstance(value, list):
        return value
    if not any(isinstance(part, str) and part in runs for part in value):
        return [_filled(part, runs) for part in value]
    filled: list[Any] = []
    for part in value:
        if isinstance(part, str) and part in runs:
            filled += runs[part]
        else:
            filled.append(_filled(part, runs))
    return Integers(filled) if all(type(part) is int for part in filled) else filled
