"""What the fields of a file must be, as data: whoever reads a file checks it against a table of these."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxllm.errors import CheckpointError

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 60
_LONGEST = 200

MAX_SIZE = 2**48
"""Of a tensor, in elements or bytes."""
MAX_RANK = 8


class Kind(NamedTuple):
    """Values that a field may have, and how an error describes them."""

    accepted: str
    fits: Callable[[Any], bool]


Kinds = dict[str, Kind]


def whole(low: int, high: int) -> Kind:
    """An integer of this range; true and false are none."""
    return Kind(f"an integer from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


def real(low: float, high: float) -> Kind:
    """A number of this range, NaN excluded."""
    return Kind(
        f"a number from {low:g} to {high:g}", lambda value: type(value) in (int, float) and low <= value <= high
    )


def one_of(*names: str) -> Kind:
    """One of these strings."""
    return Kind(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


def many(kind: Kind, most: int = 2**20) -> Kind:
    """A list of up to `most` such values."""
    return Kind(
        f"a list of up to {most} entries, each {kind.accepted}",
        lambda value: isinstance(value, list) and len(value) <= most and all(map(kind.fits, value)),
    )


def several(kind: Kind, count: int) -> Kind:
    """A list of `count` such values."""
    return Kind(
        f"a list of {count} entries, each {kind.accepted}",
        lambda value: isinstance(value, list) and len(value) == count and all(map(kind.fits, value)),
    )


def either(*kinds: Kind) -> Kind:
    """What any of them takes."""
    return Kind(" or ".join(kind.accepted for kind in kinds), lambda value: any(kind.fits(value) for kind in kinds))


FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a string", lambda value: isinstance(value, str))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
NULL = Kind("null", lambda value: value is None)


def check_fields(given: Mapping[str, Any], kinds: Kinds, inside: str = "") -> None:
    """Look at the fields of `given` that `kinds` knows; `inside` goes before their names.

    Raises:
        CheckpointError: one is not of its kind; the message names it, its value and what would be accepted.
    """
    for name, kind in kinds.items():
        if name in given and not kind.fits(given[name]):
            raise CheckpointError(f"{inside}{name} is {shown(given[name])}; accepted is {kind.accepted}")


def is_storable(shape: Sequence[int]) -> bool:
    """Whether NumPy takes an array of this shape; one with a 0 in it may say anything of its other axes."""
    return len(shape) <= MAX_RANK and math.prod(max(size, 1) for size in shape) <= MAX_SIZE


def shown(value: Any) -> str:
    """`repr`, on one line and never long."""
    text = _SHOWN.repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
