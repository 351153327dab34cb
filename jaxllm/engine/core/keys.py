"""Names of the executables: which step function, which features are compiled into it, padded to which size."""

from __future__ import annotations

import re
from functools import cache
from typing import Literal, NamedTuple

Kind = Literal[
    "decode", "verify", "backbone", "head", "encode", "read", "put", "copy_out", "copy_in", "layers", "took",
]  # fmt: skip
"""The work of an executable:

- decode: one or several tokens of each sequence, forward and sampling; verify: the same, with tokens tried ahead;
- backbone: forward alone, whose hidden states stay on the device; head: sampling from some rows of these;
- encode: an encoder's forward;
- read: something else is read from hidden states; put: a request's slot is told something;
- copy_out, copy_in: rows of the caches go to the host, or come from there;
- layers: a decode or backbone up to the end of a stage before the last; took: that stage is told sampled tokens.
"""

Variant = frozenset[str]
"""The additions to the plainest step of its kind: "sampled", which is everything that the sampler can do
beyond argmax, and features by their names. A feature of which there may be more or less says how much: "captures16"."""

PLAIN: Variant = frozenset()
SAMPLED: Variant = frozenset({"sampled"})
SAMPLING: tuple[Kind, ...] = ("decode", "verify", "head")
"""Steps that choose tokens."""


class Uses(NamedTuple):
    """The parts of the state on the devices that a step takes and gives back: weights, caches, slots, hidden states,
    features' parts.
    """

    takes: tuple[str, ...]
    """Its first arguments; what the host sends follows."""
    gives: tuple[str, ...] = ()
    """The arguments that it gives back changed; each is donated."""
    output: bool = True
    """A result for the host follows those."""


USES: dict[Kind, Uses] = {
    "decode": Uses(("weights", "caches", "slots"), ("caches", "slots")),
    "verify": Uses(("weights", "caches", "slots"), ("caches", "slots")),
    "backbone": Uses(("weights", "caches", "slots", "hidden"), ("caches", "slots", "hidden"), output=False),
    "head": Uses(("weights", "slots", "hidden"), ("slots",)),
    "encode": Uses(("weights", "slots", "hidden"), ("hidden",), output=False),
    "read": Uses(("weights", "hidden")),
    "put": Uses(("slots",), ("slots",), output=False),
    "copy_out": Uses(("caches",)),
    "copy_in": Uses(("caches",), ("caches",), output=False),
    "layers": Uses(("weights", "caches", "slots"), ("caches", "slots")),
    "took": Uses(("slots",), ("slots",), output=False),
}
"""Features may add to this: see `Features.uses`."""


class Key(NamedTuple):
    """One executable. Prints as `put-admit`, `backbone-64` or `head-8-sampled+grammar`."""

    kind: Kind
    size: int = 0
    variant: Variant = PLAIN

    def __str__(self) -> str:
        words = "+".join(sorted(self.variant, key=lambda word: (word != "sampled", word)))
        return "-".join(str(part) for part in (self.kind, self.size or "", words) if str(part))


@cache
def split_word(word: str) -> tuple[str, int]:
    """A word of a Variant as its name, and how much of it there is room for: 1 where that is not said."""
    match = re.fullmatch(r"(\D+)(\d*)", word)
    assert match is not None, "a word of a Variant is a name, or a name and a number"
    return match[1], int(match[2] or 1)


@cache
def room(variant: Variant, name: str) -> int:
    """The room that a variant has for a feature; 0 if it does not have it."""
    return dict(map(split_word, variant)).get(name, 0)


@cache
def covers(variant: Variant, other: Variant) -> bool:
    """The one can do all that the other does."""
    return all(room(variant, name) >= needed for name, needed in map(split_word, other))
