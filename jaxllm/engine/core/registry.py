"""The features of an engine, or of one core, asked together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.engine.core.feature import EVERYTHING, Course, Feature, Fields
from jaxllm.engine.core.keys import PLAIN, SAMPLING, USES, Key, Kind, Uses, Variant, covers, room
from jaxllm.engine.core.packing import Packing, core_fields

if TYPE_CHECKING:
    from jaxllm.engine.core.handle import SampledRow
    from jaxllm.engine.core.request import Chunk, Request
    from jaxllm.engine.core.sizes import StepSizes
    from jaxllm.engine.messages import EngineRequest

Hook = Callable[..., Any]
"""A method of Feature, by which the registry finds the features that override it."""


class Features:
    """The features of an engine, or of one core, in the order in which they are asked."""

    def __init__(self, features: Iterable[Feature] = ()):
        self._by_name = {feature.name: feature for feature in features}
        assert len(self._by_name) < 32, "each has a bit of an int32"
        for index, feature in enumerate(self):
            feature.bit = 1 << index
        self._variants: dict[tuple[Kind, Variant], tuple[Variant, ...]] = {}
        self._packings: dict[Key, Packing] = {}
        self._uses: dict[Key, Uses] = {}
        self._having: dict[Hook, list[Feature]] = {}

    def __iter__(self) -> Iterator[Feature]:
        return iter(self._by_name.values())

    def __getitem__(self, name: str) -> Feature:
        return self._by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def having(self, hook: Hook) -> Sequence[Feature]:
        """The features that override `hook`."""
        if hook not in self._having:
            self._having[hook] = [f for f in self if getattr(type(f), hook.__name__) is not hook]
        return self._having[hook]

    def of(self, request: Request, hook: Hook | None = None) -> list[tuple[Feature, Any]]:
        """The features that a request uses, and that override `hook` if one is named, each with what the request
        brought.
        """
        extras = request.extras
        return [(f, extras[f.name]) for f in (self if hook is None else self.having(hook)) if f.name in extras]

    def prepare(self, request: Request, message: EngineRequest) -> None:
        """Have the features that `message` asks for note in `request.extras` what it brings for them."""
        params = message.sampling_params if message.samples else None
        for feature in self.having(Feature.prepare):
            values = [getattr(of, name, None) for name in feature.asked_by for of in (message, params)]
            if not feature.asked_by or any(v is not None and v is not False and v != () for v in values):
                extra = feature.prepare(request, message)
                if extra is not None:
                    request.extras[feature.name] = extra

    def named(self, variant: Variant) -> list[Feature]:
        """The features of a variant."""
        return [f for f in self if room(variant, f.name) or not variant.isdisjoint(f.words)]

    def inside(self, kind: Kind, variant: Variant, hook: Hook | None = None) -> list[Feature]:
        """The features that have a hand in a step, and override `hook` if one is named."""
        there = [f for f in (self if hook is None else self.having(hook)) if kind in f.on]
        sampled = "sampled" in variant
        return [f for f in there if f.always or (sampled if f.in_sampler else room(variant, f.name))]

    def uses(self, key: Key) -> Uses:
        """The parts of the state that a step takes and gives back."""
        if key not in self._uses:
            found, named = USES[key.kind], self.named(key.variant)
            always = [feature for feature in self if feature.always and key.kind in feature.on]
            for feature in reversed([*named, *always]):
                found = feature.uses(key, found)
            self._uses[key] = found._replace(output=found.output or any(feature.gives for feature in named))
        return self._uses[key]

    def is_rare(self, key: Key) -> bool:
        """Nothing with this name is compiled before it is asked for."""
        return any(feature.rare for feature in self.named(key.variant))

    @property
    def decodes(self) -> tuple[Kind, ...]:
        """The kinds of steps that decode."""
        return ("decode", "verify") if any("verify" in feature.words for feature in self) else ("decode",)

    def builder(self, word: str) -> Feature:
        """The feature whose steps are called by this word: its name, or its word for one of several."""
        return self._by_name.get(word) or next(f for f in self if word in f.words)

    def wanted(
        self, kind: Kind, chunks: Sequence[Chunk | SampledRow], sampled: bool = False, late: bool = False
    ) -> Variant:
        """The variant that chunks, or rows of a head, need of a step of this kind, which is `late` or not."""
        words = ["sampled"] if sampled else []
        for name in {name for chunk in chunks for name in chunk.request.extras}:
            feature = self._by_name[name]
            if kind not in feature.on or feature.in_sampler or feature.always or (feature.late and not late):
                continue
            if not feature.rooms:
                words.append(name)
            elif needed := feature.needed(chunks):  # type: ignore[arg-type]
                words.append(f"{name}{needed}")
        return frozenset(words)

    def variants(self, kind: Kind, wanted: Variant = PLAIN) -> tuple[Variant, ...]:
        """The variants that can do what is wanted of a step, cheapest first, with no rare feature but those wanted."""
        if (kind, wanted) not in self._variants:
            self._variants[kind, wanted] = tuple(v for v in self._every(kind, wanted) if covers(v, wanted))
        return self._variants[kind, wanted]

    def _every(self, kind: Kind, wanted: Variant) -> Iterator[Variant]:
        names = ["sampled"] if kind in SAMPLING else []
        names += [f.name for f in self if kind in f.on and not (f.rare or f.in_sampler or f.always)]
        rare = [f for f in self if f.rare and room(wanted, f.name)]
        rooms = [[f"{f.name}{size}" for size in f.rooms] or [f.name] for f in rare]
        for flags in product((False, True), repeat=len(names)):
            chosen = frozenset(name for name, there in zip(reversed(names), flags, strict=True) if there)
            for words in product(*rooms):
                variant = chosen | frozenset(words)
                if "sampled" in variant or not any(feature.samples for feature in self.named(variant)):
                    yield variant

    def packing(self, key: Key, sizes: StepSizes) -> Packing:
        """The layout of the int32 vector of a step with a batch."""
        if key not in self._packings:
            fields = core_fields(key, sizes)
            for feature in self.inside(key.kind, key.variant, Feature.fields):
                fields |= feature.fields(key, sizes)
            self._packings[key] = Packing(**fields)
        return self._packings[key]

    def pack(self, key: Key, x: Fields, chunks: Sequence[Chunk]) -> list[np.ndarray]:
        """Have the features of a step fill their fields; returns what else is sent."""
        for feature in self.inside(key.kind, key.variant, Feature.padding):
            if feature.late:
                feature.padding(key, x)  # what is late comes when it is known
        return [v for f in self.inside(key.kind, key.variant, Feature.pack) for v in f.pack(key, x, chunks)]

    def apart(self, request: Request, tokens: range) -> bool:
        """These tokens of a request need a backbone by itself."""
        return any(feature.apart(request, extra, tokens) for feature, extra in self.of(request, Feature.apart))

    def certain(self, request: Request) -> int:
        """The number of tokens of a request that may be sampled before some feature must see them."""
        return min((f.certain(request, extra) for f, extra in self.of(request, Feature.certain)), default=EVERYTHING)

    def read_history(self, request: Request) -> bool:
        """A request's slot must hold the whole of its tokens."""
        return any(feature.reads_history for feature, _ in self.of(request))

    def course(self, request: Request) -> Course | None:
        """The text that a request's tokens must follow."""
        found = (feature.course(request, extra) for feature, extra in self.of(request, Feature.course))
        return next((course for course in found if course is not None), None)

    def is_late(self, request: Request) -> bool:
        """The last token of it that is being sampled may be one that a feature fills in late."""
        return self.course(request) is not None or any(
            feature.late and request.num_inflight > feature.certain(request, extra)
            for feature, extra in self.of(request, Feature.certain)
        )

    def keys(self, request: Request, start: int, stop: int) -> list[int]:
        """The numbers by which a page of the request's tokens from `start` to `stop` is found by others."""
        found = [feature.keys(request, extra, start, stop) for feature, extra in self.of(request, Feature.keys)]
        return found[0] if found else request.token_ids[start:stop]

    def first_read(self, request: Request) -> int:
        """The first token whose hidden state is needed: only those before it may come from the prefix cache."""
        found = [f.first_read(request, extra) for f, extra in self.of(request, Feature.first_read)]
        return min([len(request.token_ids) - 1, *found])
