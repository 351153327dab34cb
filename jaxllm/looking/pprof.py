"""Profiles in pprof's format, which `go tool pprof`, speedscope and others read.

https://github.com/google/pprof/blob/main/proto/profile.proto
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

_NUMBER, _BIG, _TEXT = "int64", "uint64", "string"
_MESSAGES: Mapping[str, Mapping[str, tuple[int, str, bool]]] = {
    "Profile": {
        "sample_type": (1, "ValueType", True),
        "sample": (2, "Sample", True),
        "location": (4, "Location", True),
        "function": (5, "Function", True),
        "string_table": (6, _TEXT, True),
        "time_nanos": (9, _NUMBER, False),
        "duration_nanos": (10, _NUMBER, False),
        "period_type": (11, "ValueType", False),
        "period": (12, _NUMBER, False),
        "default_sample_type": (14, _NUMBER, False),
    },
    "ValueType": {"type": (1, _NUMBER, False), "unit": (2, _NUMBER, False)},
    "Sample": {"location_id": (1, _BIG, True), "value": (2, _NUMBER, True), "label": (3, "Label", True)},
    "Label": {"key": (1, _NUMBER, False), "str": (2, _NUMBER, False)},
    "Location": {"id": (1, _BIG, False), "line": (4, "Line", True)},
    "Line": {"function_id": (1, _BIG, False), "line": (2, _NUMBER, False)},
    "Function": {
        "id": (1, _BIG, False),
        "name": (2, _NUMBER, False),
        "filename": (4, _NUMBER, False),
        "start_line": (5, _NUMBER, False),
    },
}
"""Message -> its fields that are written here: (number, kind, whether it is repeated)."""


class CodeLine(NamedTuple):
    """A line of code that runs, or that has asked for memory."""

    function: str
    file: str
    first_line: int
    line: int


class ValueKind(NamedTuple):
    """What a value counts, and in which unit: ("cpu", "nanoseconds")."""

    type: str
    unit: str


class Sample(NamedTuple):
    """Values of one stack, whose innermost place is the first; one value for each kind."""

    stack: Sequence[CodeLine]
    values: Sequence[int]
    labels: Mapping[str, str] = {}


def encode(
    kinds: Sequence[ValueKind],
    samples: Iterable[Sample],
    *,
    shown: ValueKind,
    began: float,
    seconds: float,
    period: tuple[ValueKind, int] | None = None,
) -> bytes:
    """A profile, compressed as pprof has it.

    Args:
        shown: the kind that a reader shows first.
        began: when it was taken, in seconds since the epoch, over so many `seconds`.
        period: how much of a kind lies between two samples.
    """
    profile = _message_class("Profile")()
    texts = _Table()
    texts.number("")
    for kind in kinds:
        profile.sample_type.add(type=texts.number(kind.type), unit=texts.number(kind.unit))
    functions, places = _Table(), _Table()
    for sample in samples:
        added = profile.sample.add(value=sample.values)
        added.location_id.extend(places.number(place) + 1 for place in sample.stack)
        for key, value in sample.labels.items():
            added.label.add(key=texts.number(key), str=texts.number(value))
    for number, place in enumerate(places, 1):
        function = functions.number(place[:3]) + 1
        profile.location.add(id=number).line.add(function_id=function, line=place.line)
    for number, (name, file, first_line) in enumerate(functions, 1):
        profile.function.add(id=number, name=texts.number(name), filename=texts.number(file), start_line=first_line)
    profile.time_nanos, profile.duration_nanos = int(began * 1e9), int(seconds * 1e9)
    profile.default_sample_type = texts.number(shown.type)
    if period is not None:
        profile.period_type.type, profile.period_type.unit = map(texts.number, period[0])
        profile.period = period[1]
    profile.string_table.extend(texts)
    return gzip.compress(profile.SerializeToString())


class _Table(dict[Any, int]):
    """Values in the order in which they were first asked for."""

    def number(self, value: Any) -> int:
        return self.setdefault(value, len(self))


@cache
def _message_class(name: str) -> Any:
    """protobuf's class of a message, made of the table above."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    kinds = {_NUMBER: field.TYPE_INT64, _BIG: field.TYPE_UINT64, _TEXT: field.TYPE_STRING}
    file = descriptor_pb2.FileDescriptorProto(name="profile.proto", package="perftools.profiles", syntax="proto3")
    for message, members in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for member, (number, kind, repeated) in members.items():
            label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            added = described.field.add(name=member, number=number, label=label)
            if kind in kinds:
                added.type = kinds[kind]
            else:
                added.type, added.type_name = field.TYPE_MESSAGE, f".perftools.profiles.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"perftools.profiles.{name}"))
