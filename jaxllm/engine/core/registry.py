"""The features of an engine, or of one core, asked together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.engine.core.feature import EVERYTHING, Course, Feature, Fields, Surroundings
from jaxllm.engine.core.keys import PLAIN, USES, Key, Kind, Uses, Variant, covers, room
from jaxllm.engine.core.packing import Packing, core_fields

if TYPE_CHECKING:
    from jaxllm.engine.core.handle import SampledRow
    from jaxllm.engine.core.request import Chunk, Request
    from jaxllm.engine.core.sizes import StepSizes


SAMPLING: tuple[Kind, ...] = ("decode", "verify", "head")
"""Steps that choose tokens."""


class Features:
    """Those of an engine, or of one core, in the order in which they are asked."""

    def __init__(self, features: Iterable[Feature] = ()):
        self._by_name = {feature.name: feature for feature in features}
        for index, feature in enumerate(self):
            feature.bit = 1 << index
        self._variants: dict[tuple[Kind, Variant], tuple[Variant, ...]] = {}
        self._packings: dict[Key, Packing] = {}

    def __iter__(self) -> Iterator[Feature]:
        return iter(self._by_name.values())

    def __getitem__(self, name: str) -> Feature:
        return self._by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def get(self, name: str) -> Feature | None:
        """The one with this name, if there is one."""
        return self._by_name.get(name)

    def attached(self, around: Surroundings) -> Features:
        """Those of one core."""
        return Features(feature.attached(around) for feature in self)

    def of(self, request: Request) -> list[tuple[Feature, Any]]:
        """The features that a request uses, each with what it brought for it."""
        return [(self._by_name[name], extra) for name, extra in request.extras.items()]

    def named(self, variant: Variant) -> list[Feature]:
        """Those of a variant."""
        return [f for f in self if room(variant, f.name) or not variant.isdisjoint(f.words)]

    def inside(self, kind: Kind, variant: Variant) -> list[Feature]:
        """Those that have a hand in a step."""
        sampled = "sampled" in variant
        there = ((f, f.always or (sampled if f.in_sampler else room(variant, f.name))) for f in self if kind in f.on)
        return [feature for feature, has_hand in there if has_hand]

    def uses(self, key: Key) -> Uses:
        """What a step has to do with what lives on the devices."""
        found, named = USES[key.kind], self.named(key.variant)
        always = [feature for feature in self if feature.always and key.kind in feature.on]
        for feature in reversed([*named, *always]):
            found = feature.uses(key, found)
        return found._replace(output=True) if any(feature.gives for feature in named) else found

    def is_rare(self, key: Key) -> bool:
        """Whether nothing with this name is compiled before it is asked for."""
        return any(feature.rare for feature in self.named(key.variant))

    @property
    def decodes(self) -> tuple[Kind, ...]:
        """The kinds of steps that decode."""
        return ("decode", *(kind for feature in self for kind in feature.kinds if kind == "verify"))

    def is_saved(self, key: Key) -> bool:
        """Whether another start finds the same under this name."""
        return all(feature.is_saved for feature in self.named(key.variant))

    def builder(self, word: str) -> Feature:
        """Whose steps are called by this word: a feature's name, or what it calls one of several."""
        return self._by_name.get(word) or next(f for f in self if word in f.words or word in f.kinds)

    def wanted(
        self, kind: Kind, chunks: Sequence[Chunk | SampledRow], sampled: bool = False, late: bool = False
    ) -> Variant:
        """What chunks, or rows of a head, need of a step of this kind, which is `late` or not."""
        names = {name for chunk in chunks for name in chunk.request.extras}
        words = ["sampled"] if sampled else []
        for name in names:
            feature = self._by_name[name]
            own = not feature.in_sampler and not feature.always
            has = kind in feature.on and own and (late or not feature.late)
            needed = feature.needed(chunks) if has else 0  # type: ignore[arg-type]
            if needed:
                words.append(f"{name}{needed}" if feature.rooms else name)
        return frozenset(words)

    def variants(self, kind: Kind, wanted: Variant = PLAIN) -> tuple[Variant, ...]:
        """Those that can do what is wanted of a step, cheapest first.

        Features that are rare are only in those that were asked for them.
        """
        found = self._variants.get((kind, wanted))
        if found is None:
            found = self._variants[kind, wanted] = tuple(v for v in self._every(kind, wanted) if covers(v, wanted))
        return found

    def _every(self, kind: Kind, wanted: Variant) -> Iterator[Variant]:
        planned = [f.name for f in self if kind in f.on and not (f.rare or f.in_sampler or f.always)]
        names = [*(["sampled"] if kind in SAMPLING else []), *planned]
        rare = [f for f in self if f.rare and room(wanted, f.name)]
        rooms = [[f"{f.name}{size}" for size in f.rooms] or [f.name] for f in rare]
        for flags in product((False, True), repeat=len(names)):
            chosen = frozenset(name for name, there in zip(reversed(names), flags, strict=True) if there)
            for words in product(*rooms):
                variant = chosen | frozenset(words)
                if "sampled" in variant or not any(feature.samples for feature in self.named(variant)):
                    yield variant

    def packing(self, key: Key, sizes: StepSizes) -> Packing:
        """How the int32 vector of a step with a batch is laid out."""
        found = self._packings.get(key)
        if found is None:
            fields = core_fields(key, sizes)
            for feature in self.inside(key.kind, key.variant):
                fields |= feature.fields(key, sizes)
            found = self._packings[key] = Packing(**fields)
        return found

    def pack(self, key: Key, x: Fields, chunks: Sequence[Chunk]) -> list[np.ndarray]:
        """Have the features of a step fill their fields; returns what else is sent."""
        found: list[np.ndarray] = []
        for feature in self.inside(key.kind, key.variant):
            if feature.late:
                feature.padding(key, x)  # what is late comes when it is known
            else:
                found += feature.pack(key, x, chunks)
        return found

    def apart(self, request: Request, tokens: range) -> bool:
        """Whether these tokens of a request need a backbone by itself."""
        return any(feature.apart(request, extra, tokens) for feature, extra in self.of(request))

    def certain(self, request: Request) -> int:
        """How many tokens of a request may be sampled before some feature must see them."""
        return min((feature.certain(request, extra) for feature, extra in self.of(request)), default=EVERYTHING)

    def read_history(self, request: Request) -> bool:
        """Whether a request's slot must hold the whole of its tokens."""
        return any(feature.reads_history for feature, _ in self.of(request))

    def course(self, request: Request) -> Course | None:
        """The text that a request's tokens must follow."""
        found = (feature.course(request, extra) for feature, extra in self.of(request) if feature.late)
        return next((course for course in found if course is not None), None)

    def is_late(self, request: Request) -> bool:
        """Whether the last token of it that is being sampled may be one that a feature fills in late."""
        late = ((feature, extra) for feature, extra in self.of(request) if feature.late)
        return any(
            feature.course(request, extra) is not None or request.num_inflight > feature.certain(request, extra)
            for feature, extra in late
        )

    def first_read(self, request: Request) -> int:
        """The first token whose hidden state is needed: only those before it may come from the prefix cache."""
        last = len(request.token_ids) - 1
        return min([last, *(feature.first_read(request, extra) for feature, extra in self.of(request))])
