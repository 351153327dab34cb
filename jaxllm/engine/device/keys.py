"""Names of the executables: which step function, which variant of it, padded to which size."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

Kind = Literal[
    "decode", "verify", "backbone", "head", "score", "score_given", "score_all", "pool", "token_logits", "unembed",
    "admit", "adjust", "remember", "recall", "encode", "adapt", "steer", "process", "read_pages", "write_pages",
    "read_states", "write_states", "decode_layers", "backbone_layers", "took",
]  # fmt: skip
"""The methods of StepFunctions. The last three are of the stages before a model's last."""


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
    "process": Uses(("processing",), ("processing",), output=False),
    "read_pages": Uses(("caches",)),
    "write_pages": Uses(("caches",), ("caches",), output=False),
    "read_states": Uses(("caches",)),
    "write_states": Uses(("caches",), ("caches",), output=False),
    "decode_layers": Uses(("weights", "caches", "slots"), ("caches", "slots")),
    "backbone_layers": Uses(("weights", "caches", "slots"), ("caches", "slots")),
    "took": Uses(("slots",), ("slots",), output=False),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """What a step function is compiled to do besides the least it can; each field is one such ability."""

    sampled: bool = False
    """Everything that a request may ask of the sampler; argmax alone without it."""
    masked: bool = False
    """A mask of allowed tokens, which a grammar fills; the sampler applies it."""
    processed: bool = False
    """Logits pass the caller's own functions for some requests; see `engine.device.processing`."""
    adapted: bool = False
    """Products add what adapters give."""
    steered: bool = False
    """The residual stream is steered for some requests; see `models.layers.steering`."""
    patched: int = 0
    """How many rows of layers' outputs it may be given others for; see `models.layers.patching`."""
    recorded: int = 0
    """How many activations it gives besides; see `models.layers.taps`."""

    def __post_init__(self) -> None:
        if (self.masked or self.processed) and not self.sampled:
            raise ValueError("a Variant that is masked or processed must be sampled too: argmax reads raw logits")

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
PROCESSED = Variant(sampled=True, processed=True)
ADAPTED = Variant(adapted=True)
SAMPLED_ADAPTED = Variant(sampled=True, adapted=True)
MASKED_ADAPTED = Variant(sampled=True, masked=True, adapted=True)

VARIANTS: dict[Kind, tuple[Variant, ...]] = {
    "decode": (PLAIN, SAMPLED, ADAPTED, SAMPLED_ADAPTED),
    "verify": (PLAIN, SAMPLED, MASKED, ADAPTED, SAMPLED_ADAPTED, MASKED_ADAPTED),
    "backbone": (PLAIN, ADAPTED),
    "encode": (PLAIN,),
    "head": (PLAIN, SAMPLED, MASKED),
    "read_pages": (PLAIN,),
    "write_pages": (PLAIN,),
    "read_states": (PLAIN,),
    "write_states": (PLAIN,),
}
"""Those that are compiled of each phase, cheapest first; adapted ones only where an engine has adapters."""

RECORDED = (1, 4, 16, 64, 256, 1024)
"""How many activations a backbone may give; each that does is compiled on demand. The most are those of all points of
all layers, which requests of one step may want together."""

PATCHED = (4, 32, 256, 2048, 16384, 131072, 1048576)
"""How many patches a backbone has room for; each that has any is compiled on demand."""


def variants(kind: Kind, wanted: Variant) -> tuple[Variant, ...]:
    """Those that can do what is wanted of a phase, cheapest first. One that processes, steers, patches or records
    serves nobody else.
    """
    found = VARIANTS[kind]
    if wanted.processed:
        found = tuple(replace(variant, processed=True) for variant in found if variant.sampled)
    if wanted.steered:
        found = tuple(replace(variant, steered=True) for variant in found)
    if wanted.patched:
        found = tuple(replace(variant, patched=count) for count in PATCHED for variant in found)
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
        variant = self.variant
        rare = variant.processed or variant.steered or variant.patched > 0 or variant.recorded > 0
        return rare or self.kind in ("unembed", "steer", "process")

    @property
    def is_saved(self) -> bool:
        """Whether another start finds the same under this name: not where a caller's own functions are in it, or their
        number.
        """
        return not self.variant.processed and self.kind != "process"

    @property
    def uses(self) -> Uses:
        """What the step has to do with what lives on the devices: behind the weights it may take adapters, what steers
        requests, and what says which logits processors they use.
        """
        found = USES[self.kind]
        if self.variant.recorded:
            found = found._replace(output=True)
        variant = self.variant
        further = {"adapters": variant.adapted, "steering": variant.steered, "processing": variant.processed}
        return found._replace(takes=(found.takes[0], *(name for name in further if further[name]), *found.takes[1:]))

    def __str__(self) -> str:
        return "-".join(str(part) for part in (self.kind, self.size or "", self.variant) if str(part))
