"""JSON values as bytes that are unpacked in short calls, between which other threads run."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from itertools import chain
from typing import Any

from msgspec.msgpack import Ext, decode, encode

SLICE = 64 * 1024
"""Bytes, which a call unpacks in less than a millisecond."""
_TEXT, _LIST, _INTEGERS, _OBJECT = range(4)
_LIST_OF_ONE, _OBJECT_OF_ONE = b"\x91", b"\x81"


class Integers(list[int]):
    """A long list of nothing but integers, so that a validator need not look at each of them again."""


def pack(value: Any) -> bytes:
    """MessagePack, in which whatever is larger than SLICE is an extension made of parts that are not."""
    if len(packed := encode(value)) <= SLICE:
        return packed
    del packed  # else each level of a deep value would hold all that is below it
    match value:
        case str():
            return encode(Ext(_TEXT, value.encode()))
        case list():
            kind = _INTEGERS if set(map(type, value)) == {int} else _LIST
            return encode(Ext(kind, encode(list(_parts(value)))))
        case dict():
            return encode(Ext(_OBJECT, encode(list(_parts(value)))))
    raise TypeError(f"no JSON value is a {type(value)}")


def unpack(packed: bytes | memoryview) -> Any:
    """The value that was packed; long lists of integers are `Integers`."""
    return decode(packed, ext_hook=_extended)


def _parts(values: list[Any] | dict[str, Any]) -> Iterator[bytes]:
    """Lists, or objects, that make `values` together: each is small, or has one entry alone."""
    if len(packed := encode(values)) <= SLICE:
        yield packed
        return
    del packed
    middle = len(values) // 2
    match values:
        case [alone]:
            yield _LIST_OF_ONE + pack(alone)
        case list():
            yield from chain(_parts(values[:middle]), _parts(values[middle:]))
        case dict() if middle:
            items = list(values.items())
            yield from chain(_parts(dict(items[:middle])), _parts(dict(items[middle:])))
        case dict():
            ((key, alone),) = values.items()
            yield _OBJECT_OF_ONE + pack(key) + pack(alone)


def _extended(kind: int, content: memoryview) -> Any:
    if kind == _TEXT:
        decoder = codecs.getincrementaldecoder("utf-8")()
        return "".join(decoder.decode(content[at : at + SLICE]) for at in range(0, len(content), SLICE))
    parts = map(unpack, decode(content, type=list[memoryview]))
    if kind == _OBJECT:
        fields: dict[str, Any] = {}
        for part in parts:
            fields |= part
        return fields
    values: list[Any] = Integers() if kind == _INTEGERS else []
    for part in parts:
        values += part
    return values
