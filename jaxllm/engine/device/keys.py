"""Names of the executables: which step function, which variant of it, padded to which size."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

Kind = Literal[
    "decode", "verify", "backbone", "head", "score", "score_given", "score_all", "pool", "token_logits", "unembed",
    "admit", "adjust", "remember", "recall", "encode", "adapt", "steer", "read_pages", "write_pages",
]  # fmt: skip
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
    "score_given": _READOUT,
    "score_all": _READOUT,
    "token_logits": _READOUT,
    "pool": Uses(("hidden",)),
    "admit": Uses(("slots",), ("slots",), output=False),
    "adjust": Uses(("slots",), ("slots",), output=False),
    "remember": Uses(("slots",), ("slots",), output=False),
    "recall": Uses(("slots",), ("slots",), output=False),
    "encode": Uses(("weights", "hidden"), ("hidden",), output=False),
    "unembed": Uses(("weights",)),
    "adapt": Uses(("adapters",), ("adapters",), output=False),
    "steer": Uses(("steering",), ("steering",), output=False),
    "read_pages": Uses(("caches",)),
    "write_pages": Uses(("caches",), ("caches",), output=False),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """What a step function is compiled to do besides the least it can; each field is one such ability."""

    sampled: bool = False
    """Everything that a request may ask of the sampler; argmax alone without it."""
    masked: bool = False
    """A mask of allowed tokens, which a grammar fills; the sampler applies it."""
    adapted: bool = False
    """Products add what adapters give."""
    steered: bool = False
    """The residual stream is steered for some requests; see `models.layers.steering`."""
    recorded: int = 0
    """How many activations it gives besides; see `models.layers.taps`."""

    def __post_init__(self) -> None:
        if self.masked and not self.sampled:
            raise ValueError("a Variant that is masked must be sampled too: argmax reads no mask")

    def covers(self, other: Variant) -> bool:
        """Whether this can do all that `other` does."""
        return all(getattr(self, name) >= getattr(other, name) for name in _ABILITIES)

    def __str__(self) -> str:
        found = {name: getattr(self, name) for name in _ABILITIES}
        return "+".join(name if value is True else f"{name}{value}" for name, value in found.items() if value)


_ABILITIES = tuple(field.name for field in fields(Variant))

PLAIN = Variant()
SAMPLED = Variant(sampled=True)
MASKED = Variant(sampled=True, masked=True)
ADAPTED = Variant(adapted=True)
SAMPLED_ADAPTED = Variant(sampled=True, adapted=True)

VARIANTS: dict[Kind, tuple[Variant, ...]] = {
    "decode": (PLAIN, SAMPLED, ADAPTED, SAMPLED_ADAPTED),
    "verify": (PLAIN, SAMPLED, ADAPTED, SAMPLED_ADAPTED),
    "backbone": (PLAIN, ADAPTED),
    "encode": (PLAIN,),
    "head": (PLAIN, SAMPLED, MASKED),
    "read_pages": (PLAIN,),
    "write_pages": (PLAIN,),
}
"""Those that are compiled of each phase, cheapest first; adapted ones only where an engine has adapters."""

RECORDED = (1, 4, 16, 64, 256, 1024)
"""How many activations a backbone may give; each that does is compiled on demand. The most are those of all points of
all layers, which requests of one step may want together."""


def variants(kind: Kind, wanted: Variant) -> tuple[Variant, ...]:
    """Those that can do what is wanted of a phase, cheapest first. One that steers or records serves nobody else."""
    found = VARIANTS[kind]
    if wanted.steered:
        found = tuple(replace(variant, steered=True) for variant in found)
    if wanted.recorded:
        found = tuple(replace(variant, recorded=count) for count in RECORDED for variant in found)
    return tuple(variant for variant in found if variant.covers(wanted))


class Key(NamedTuple):
    """One executable. Prints as `pool`, `backbone-64` or `head-8-sampled+masked`."""

    kind: Kind
    size: int = 0
    variant: Variant = PLAIN

    @property
    def on_demand(self) -> bool:
        """Nobody plans it: it is compiled when somebody first asks for what few do."""
        return self.kind in ("unembed", "steer") or self.variant.steered or self.variant.recorded > 0

    @property
    def uses(self) -> Uses:
        """What the step has to do with what lives on the devices: behind the weights it may take adapters, and what
        steers requests.
        """
        found = USES[self.kind]
        if self.variant.recorded:
            found = found._replace(output=True)
        further = {"adapters": self.variant.adapted, "steering": self.variant.steered}
        return found._replace(takes=(found.takes[0], *(name for name in further if further[name]), *found.takes[1:]))

    def __str__(self) -> str:
        return "-".join(str(part) for part in (self.kind, self.size or "", self.variant) if str(part))
