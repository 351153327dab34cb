"""Reads pprof's format off the wire, by the numbers of its fields in profile.proto, with no help of protobuf."""

from __future__ import annotations

import gzip
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple


class Line(NamedTuple):
    function: str
    file: str
    line: int


@dataclass
class Sample:
    stack: list[Line]
    """Innermost first."""
    values: dict[str, int]
    """By "type/unit"."""
    labels: dict[str, str]


@dataclass
class Profile:
    samples: list[Sample]
    shown: str
    """The type that a reader shows first."""
    seconds: float
    began: float
    period: tuple[str, int]

    def total(self, function: str, kind: str) -> int:
        """Of all stacks with a function in them."""
        return sum(
            sample.values[kind] for sample in self.samples if any(function in line.function for line in sample.stack)
        )


def decode(data: bytes) -> Profile:
    top = _fields(gzip.decompress(data))
    texts = [text.decode() for text in top[6]]
    assert texts[0] == "", "the first text must be empty"
    kinds = [_kind(raw, texts) for raw in top[1]]
    functions = {}
    for raw in top[5]:
        found = _fields(raw)
        functions[_one(found, 1)] = (texts[_one(found, 2)], texts[_one(found, 4)])
    places = {}
    for raw in top[4]:
        found = _fields(raw)
        line = _fields(found[4][0]) if found[4] else _fields(b"")
        places[_one(found, 1)] = Line(*functions.get(_one(line, 1), ("", "")), _one(line, 2))
    assert 0 not in functions and 0 not in places, "0 means that there is none"
    samples = []
    for raw in top[2]:
        found = _fields(raw)
        labels = {texts[_one(label, 1)]: texts[_one(label, 2)] for label in map(_fields, found[3])}
        values = dict(zip(kinds, _packed(found[2]), strict=True))
        samples.append(Sample([places[at] for at in _packed(found[1])], values, labels))
    shown = texts[_one(top, 14)]
    period = (_kind(top[11][0], texts), _one(top, 12)) if top[11] else ("", 0)
    return Profile(samples, shown, _one(top, 10) / 1e9, _one(top, 9) / 1e9, period)


def _kind(raw: bytes, texts: list[str]) -> str:
    found = _fields(raw)
    return f"{texts[_one(found, 1)]}/{texts[_one(found, 2)]}"


def _one(found: dict, number: int) -> int:
    return found[number][-1] if found[number] else 0


def _packed(values: list) -> list[int]:
    numbers = []
    for value in values:
        if isinstance(value, int):
            numbers.append(value)
            continue
        at = 0
        while at < len(value):
            number, at = _varint(value, at)
            numbers.append(number)
    return numbers


def _fields(data: bytes) -> dict:
    found, at = defaultdict(list), 0
    while at < len(data):
        tag, at = _varint(data, at)
        if tag & 7 == 0:
            value, at = _varint(data, at)
        else:
            assert tag & 7 == 2, "profile.proto has numbers and what is as long as it says"
            length, at = _varint(data, at)
            value, at = data[at : at + length], at + length
        found[tag >> 3].append(value)
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at
