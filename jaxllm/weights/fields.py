"""Tables of the values that a file's fields may have, against which every reader checks them."""

from __future__ import annotations

import itertools
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.errors import CheckpointError

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 60
_LONGEST = 200

MAX_SIZE, MAX_RANK = 2**48, 8  # the largest tensor, in elements or bytes, and the most axes


class FieldKind(NamedTuple):
    """Values that a field may have, and their description in errors."""

    accepted: str
    fits: Callable[[Any], bool]


FieldKinds = dict[str, FieldKind]


def whole(low: int, high: int) -> FieldKind:
    """An integer of this range; true and false are not integers."""
    return FieldKind(f"an integer from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


def real(low: float, high: float) -> FieldKind:
    """A number of this range, NaN excluded."""
    return FieldKind(
        f"a number from {low:g} to {high:g}", lambda value: type(value) in (int, float) and low <= value <= high
    )


def one_of(*names: str) -> FieldKind:
    return FieldKind(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


def many(kind: FieldKind, most: int = 2**20, least: int = 0) -> FieldKind:
    """A list of `least` to `most` such values."""
    return FieldKind(
        f"a list of {most if least == most else f'up to {most}'} entries, each {kind.accepted}",
        lambda value: isinstance(value, list) and least <= len(value) <= most and all(map(kind.fits, value)),
    )


def several(kind: FieldKind, count: int) -> FieldKind:
    return many(kind, count, count)


def either(*kinds: FieldKind) -> FieldKind:
    accepted = " or ".join(kind.accepted for kind in kinds)
    return FieldKind(accepted, lambda value: any(kind.fits(value) for kind in kinds))


FLAG = FieldKind("true or false", lambda value: isinstance(value, bool))
TEXT = FieldKind("a string", lambda value: isinstance(value, str))
OBJECT = FieldKind("an object", lambda value: isinstance(value, dict))
NULL = FieldKind("null", lambda value: value is None)


def check_fields(given: Mapping[str, Any], kinds: FieldKinds, inside: str = "") -> None:
    """Raises CheckpointError for a field of `given` that is not as `kinds` says; `inside` goes before its name."""
    for name, kind in kinds.items():
        if name in given and not kind.fits(given[name]):
            raise CheckpointError(f"{inside}{name} is {shown(given[name])}; accepted is {kind.accepted}")


def is_storable(shape: Sequence[int]) -> bool:
    """Whether NumPy takes an array of this shape, in which a 0 does not excuse the other axes."""
    return len(shape) <= MAX_RANK and math.prod(max(size, 1) for size in shape) <= MAX_SIZE


def check_apart(file: Path, places: Iterable[tuple[int, int, str]]) -> None:
    """Raises CheckpointError for tensors (offset, bytes, name) that share bytes: a small file could fill the memory."""
    stored = sorted(place for place in places if place[1])
    for (offset, nbytes, name), (begin, _, other) in itertools.pairwise(stored):
        if offset + nbytes > begin:
            raise CheckpointError(f"{file}: tensors {shown(name)} and {shown(other)} share bytes from {begin:,} on")


def shown(value: Any) -> str:
    """`repr`, on one line and never long."""
    text = _SHOWN.repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
