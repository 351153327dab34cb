"""Mutations of JSON values, JSON texts and bytes; everything random comes from the generator that is passed in."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

Path = tuple[Any, ...]

JUNK: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**60, 2**63, 2**64, -(2**63),
    10**300, 0.0, -0.0, 0.5, 1e-300, 1e300, float("nan"), float("inf"), float("-inf"), "", " ", "0", "a", "null",
    "\x00", "\n", "\ud800", "😀" * 50, "x" * 100_000, "../config.json", "/etc/passwd", "..", "(", "(a+)+$",
    [], {}, [None], [[]], [0], [1, 2, 3], ["a"], [{}], {"": None}, {"a": {"a": []}}, [0] * 10_000,
)  # fmt: skip
"""Of other types, of no use, or too much."""


def paths(value: Any, at: Path = ()) -> Iterator[Path]:
    """Where something is in a JSON value."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*at, key)
        yield from paths(child, (*at, key))


def pick(rng: np.random.Generator, *options: Any) -> Any:
    """One of them, of the type it has: `rng.choice` makes floats of large integers."""
    return options[rng.integers(len(options))]


def mutate_json(rng: np.random.Generator, value: Any) -> Any:
    """A copy in which one to three places are something else, gone, doubled, or exchanged."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = list(paths(value))
        if not places:
            return value
        *above, key = pick(rng, *places)
        parent = value
        for step in above:
            parent = parent[step]
        match rng.choice(["junk", "junk", "number", "drop", "wrap", "exchange", "repeat"]):
            case "junk":
                parent[key] = copy.deepcopy(pick(rng, *JUNK))
            case "number":
                parent[key] = _number_near(rng, parent[key])
            case "drop":
                del parent[key]
            case "wrap":
                parent[key] = {"a": parent[key]} if rng.integers(2) else [parent[key]]
            case "exchange":
                other = pick(rng, *places)
                parent[key] = copy.deepcopy(_at(value, other))
            case "repeat" if isinstance(parent, list):
                parent.extend(copy.deepcopy(parent[: key + 1]))
            case _:
                parent[key] = [copy.deepcopy(parent[key])] * int(rng.integers(2, 50))
    return value


def json_bytes(rng: np.random.Generator, value: Any) -> bytes:
    """`value` as a file, which once in a while is no JSON, says a key twice, or is nested deeply."""
    text = json.dumps(value, ensure_ascii=True)
    match rng.choice(["whole"] * 16 + ["bytes", "twice", "deep", "digits"]):
        case "bytes":
            return mutate_bytes(rng, text.encode())
        case "twice" if isinstance(value, dict) and value:
            key = list(value)[rng.integers(len(value))]
            text = f"{text[:-1]}, {json.dumps(key)}: {json.dumps(pick(rng, *JUNK))}}}"
        case "deep":
            text = '{"a":' * 100_000 + "1" + "}" * 100_000
        case "digits":
            text = text.replace("1", "1" * 5_000, 1)
    return text.encode()


def mutate_bytes(rng: np.random.Generator, data: bytes) -> bytes:
    """Bits flipped, bytes overwritten, or the end cut off."""
    copied = bytearray(data)
    match rng.choice(["flip", "flip", "overwrite", "cut", "insert"]):
        case "flip":
            for _ in range(rng.integers(1, 5)):
                copied[rng.integers(len(copied))] ^= 1 << rng.integers(8)
        case "overwrite":
            at, size = rng.integers(len(copied)), rng.choice([1, 4, 8])
            copied[at : at + size] = _lying_integer(rng, int(size))
        case "cut":
            del copied[rng.integers(len(copied)) :]
        case "insert":
            copied[rng.integers(len(copied)) : 0] = rng.bytes(int(rng.integers(1, 20)))
    return bytes(copied)


def _lying_integer(rng: np.random.Generator, size: int) -> bytes:
    most = 2 ** (8 * size)
    value = [0, 1, most - 1, most // 2, most // 2 - 1, most // 16, int(rng.integers(256))][rng.integers(7)]
    return value.to_bytes(size, "little")


def _number_near(rng: np.random.Generator, value: Any) -> Any:
    """Another number of about the same size, which may well be accepted."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return not value
    return [value + 1, value - 1, value * 2, value // 2, -value, float(value), 0][rng.integers(7)]


def _at(value: Any, place: Path) -> Any:
    for step in place:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None  # an earlier mutation of the same value took it away
    return value
