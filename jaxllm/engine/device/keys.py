"""Names of the executables: which step function, which variant of it, padded to which size."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

Kind = Literal[
    "decode", "verify", "backbone", "head", "score", "score_all", "pool", "token_logits", "admit", "adjust", "remember"
]
"""The methods of StepFunctions."""


class Uses(NamedTuple):
    """What a step function has to do with what lives on the devices: weights, caches, slots and hidden states."""

    takes: tuple[str, ...]
    """Its first arguments; what the host sends follows."""
    gives: tuple[str, ...] = ()
    """Those of them that it gives back changed; each is donated."""
    output: bool = True
    """Whether something for the host follows those."""


_READOUT = Uses(("weights", "hidden"))

USES: dict[Kind, Uses] = {
    "decode": Uses(("weights", "caches", "slots"), ("caches", "slots")),
    "verify": Uses(("weights", "caches", "slots"), ("caches", "slots")),
    "backbone": Uses(("weights", "caches", "slots", "hidden"), ("caches", "slots", "hidden"), output=False),
    "head": Uses(("weights", "slots", "hidden"), ("slots",)),
    "score": _READOUT,
    "score_all": _READOUT,
    "token_logits": _READOUT,
    "pool": Uses(("hidden",)),
    "admit": Uses(("slots",), ("slots",), output=False),
    "adjust": Uses(("slots",), ("slots",), output=False),
    "remember": Uses(("slots",), ("slots",), output=False),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """What a step function is compiled to do besides the least it can; each field is one such ability."""

    sampled: bool = False
    """Everything that a request may ask of the sampler; argmax alone without it."""
    masked: bool = False
    """A mask of allowed tokens, which a grammar fills; the sampler applies it."""

    def __post_init__(self) -> None:
        if self.masked and not self.sampled:
            raise ValueError("a Variant that is masked must be sampled too: argmax reads no mask")

    def covers(self, other: Variant) -> bool:
        """Whether this can do all that `other` does."""
        return all(getattr(self, name) or not getattr(other, name) for name in _ABILITIES)

    def __str__(self) -> str:
        return "+".join(name for name in _ABILITIES if getattr(self, name))


_ABILITIES = tuple(field.name for field in fields(Variant))

PLAIN = Variant()
SAMPLED = Variant(sampled=True)
MASKED = Variant(sampled=True, masked=True)

VARIANTS: dict[Kind, tuple[Variant, ...]] = {
    "decode": (PLAIN, SAMPLED),
    "verify": (PLAIN, SAMPLED),
    "backbone": (PLAIN,),
    "head": (PLAIN, SAMPLED, MASKED),
}
"""Those that are compiled of each phase, cheapest first."""


class Key(NamedTuple):
    """One executable. Prints as `pool`, `backbone-64` or `head-8-sampled+masked`."""

    kind: Kind
    size: int = 0
    variant: Variant = PLAIN

    def __str__(self) -> str:
        return "-".join(str(part) for part in (self.kind, self.size or "", self.variant) if str(part))
