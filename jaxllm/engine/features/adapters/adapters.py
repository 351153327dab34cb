"""LoRA adapters: what is added to the weights for some requests of a step, another one for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxllm.engine.core.device_state import StateShapes
from jaxllm.engine.core.feature import Built, Errand, Feature, Plan, Surroundings, Traced, TracedStep
from jaxllm.engine.core.keys import SAMPLED, Key, Kind
from jaxllm.engine.core.packing import SETTING_INTS
from jaxllm.engine.core.pages import FoundPrefix
from jaxllm.engine.core.request import Request
from jaxllm.engine.core.sizes import Buckets, StepSizes
from jaxllm.engine.core.slots import Slots
from jaxllm.engine.core.step import StepFunctions
from jaxllm.engine.features.adapters.reading import AdapterRows
from jaxllm.engine.features.adapters.store import AdapterPlaces, AdapterStore, check_adapters
from jaxllm.engine.messages import EngineRequest, EngineStats
from jaxllm.models.registry import AdaptedModel
from jaxllm.pallas_kernels import StepMetadata
from jaxllm.requests.steering import AdapterUse

PUT_TABLES, PUT_SCALES = Key("put", 0, frozenset({"adapters"})), Key("put", 0, frozenset({"scales"}))


@dataclass
class _Asked:
    """What a request asks for, and what has become of it."""

    uses: tuple[AdapterUse, ...]
    rows: tuple[AdapterRows, ...] = ()
    """What each of its adapters adds to the model, in host memory."""
    places: list[int] = field(default_factory=list)
    """Where each of them is on the devices while the request runs."""

    @property
    def ids(self) -> list[int]:
        """What its adapters are known by."""
        return [use.id for use in self.uses]


class AdaptersFeature(Feature):
    """Tables of the adapters that are on the devices are a part of their own; a slot has how much of each is added."""

    name = "adapters"
    on: tuple[Kind, ...] = ("decode", "verify", "backbone")
    has_part = True
    words = ("scales",)

    def __init__(self, adapted: AdaptedModel | None, places: int, decodes: Sequence[Kind] = ("decode",)):
        """`adapted` is the model with tables; None, and no `places`, where an engine runs without adapters."""
        self._decodes = decodes
        if adapted is None:
            self.on = ()
        self._adapted = adapted
        self.places = AdapterPlaces(places)
        self.store: AdapterStore | None = None
        """Where they are read, in the process that has requests."""
        self._entering: list[tuple[AdapterRows, int]] = []

    # ------------------------------------------------------------ the start

    def plan(self, buckets: Buckets) -> Plan:
        if self._adapted is None:
            return Plan()
        largest = [Key("backbone", buckets.prefill[-1], frozenset({self.name}))]
        largest += [Key(kind, buckets.decode[-1], SAMPLED | {self.name}) for kind in self._decodes]
        return Plan(soon=[PUT_TABLES, PUT_SCALES, *largest])

    def slot(self, sizes: StepSizes) -> dict[str, tuple[tuple[int, ...], Any]]:
        return {"scales": ((self.places.count,), jnp.float32)} if self.places.count else {}

    def part(self, state: StateShapes) -> Any:
        tables = () if self._adapted is None else self._adapted.tables
        return tuple(state.sharded(table.shape, table.dtype, table.axes) for table in tables)

    def uses(self, key: Key, uses: Any) -> Any:
        return uses if key == PUT_SCALES else super().uses(key, uses)

    def build(self, key: Key, maker: StepFunctions) -> Built:
        if key == PUT_SCALES:
            return super().build(key, maker)
        tables = maker.state.part(self)

        def step(parts: dict[str, Any], place: Any, *rows: Any) -> tuple[Any, ...]:
            return (tuple(t.at[place[0]].set(row) for t, row in zip(parts[self.name], rows, strict=True)),)

        return Built(step, [maker.state.ints(1), *map(maker.state.row_of, tables)])

    def attach(self, around: Surroundings) -> None:
        self._device = around.device
        self.places = AdapterPlaces(self.places.count)
        self._entering = []

    # ------------------------------------------------------------ a request

    def prepare(self, request: Request, asked: EngineRequest) -> _Asked | None:
        if not asked.adapters:
            return None
        check_adapters(asked.adapters, self.places.count)
        return _Asked(asked.adapters)

    def needs(self, request: Request, extra: _Asked) -> Iterable[Key]:
        return [PUT_TABLES, PUT_SCALES]

    def salt(self, extra: _Asked) -> Any:
        return tuple((use.id, use.scale) for use in extra.uses)

    def job(self, request: Request, extra: _Asked) -> Errand | None:
        store = self.store
        assert store is not None, "an engine with places reads adapters"
        known = [store.known(use) for use in extra.uses]
        extra.rows = tuple(rows for rows in known if rows is not None)
        return None if len(extra.rows) == len(extra.uses) else Errand(partial(self._read, store, extra))

    def _read(self, store: AdapterStore, extra: _Asked) -> None:
        extra.rows = tuple(store.read(use) for use in extra.uses)

    def fits(self, request: Request, extra: _Asked) -> bool:
        return self.places.fits(extra.ids)

    def place(self, request: Request, extra: _Asked, found: FoundPrefix) -> None:
        extra.places, entering = self.places.take(extra.ids)
        placed = zip(extra.ids, extra.rows, extra.places, strict=True)
        self._entering += [(rows, place) for adapter, rows, place in placed if adapter in entering]

    def release(self, request: Request, extra: _Asked) -> None:
        self.places.release(extra.ids)

    def check(self) -> None:
        self.places.check([])

    def stats(self, stats: EngineStats, running: Iterable[Request], waiting: Iterable[Request]) -> None:
        stats.running_adapters, stats.waiting_adapters = self._count(running), self._count(waiting)

    def _count(self, requests: Iterable[Request]) -> dict[str, int]:
        """How many requests use each adapter, by its name."""
        asked = (request.extras.get(self.name) for request in requests)
        return dict(Counter(use.name for one in asked if one is not None for use in one.uses))

    # ------------------------------------------------------------ a step

    def before_step(self) -> None:
        entering, self._entering = self._entering, []
        for rows, place in entering:
            self._device.run(PUT_TABLES, np.array([place], np.int32), *rows)

    def seat(self, request: Request, extra: _Asked) -> None:
        scales = np.zeros(self.places.count, np.float32)
        for use, place in zip(extra.uses, extra.places, strict=True):
            scales[place] = use.scale
        self._device.run(PUT_SCALES, np.array([request.slot], np.int32), scales)

    def traced(self, step: TracedStep) -> Traced:
        assert self._adapted is not None, "only an engine with adapters runs adapted steps"
        return _Adapting(self._adapted, step.parts[self.name], self.name, self.bit)


class _Adapting(Traced):
    def __init__(self, adapted: AdaptedModel, tables: Any, name: str, bit: int):
        self._adapted, self._tables, self._name, self._bit = adapted, tables, name, bit

    def model(self, model: Any, parameters: Any) -> Any:
        return self._adapted.merged(parameters, self._tables)

    def metadata(self, meta: StepMetadata, slots: Slots) -> StepMetadata:
        """How much each token's products take of each adapter."""
        assert meta.slots is not None, "an engine's steps have slots"
        slot = meta.slots[jnp.minimum(meta.seq_ids, len(meta.slots) - 1)]
        uses = SETTING_INTS.unpack(slots.setting_ints[slot])["uses"] & self._bit > 0
        scales = jnp.where((uses & meta.live)[:, None], slots.of[self._name]["scales"][slot], 0)
        return replace(meta, adapter_scales=scales)
