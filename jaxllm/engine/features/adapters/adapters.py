"""LoRA adapters: what is added to the weights for some requests of a step, another one for each."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxllm.engine.core.device_state import StateShapes
from jaxllm.engine.core.feature import Built, Errand, Feature, Plan, Traced, TracedStep
from jaxllm.engine.core.keys import SAMPLED, Key, Kind
from jaxllm.engine.core.packing import SETTING_INTS
from jaxllm.engine.core.pages import FoundPrefix
from jaxllm.engine.core.request import Request
from jaxllm.engine.core.sizes import Buckets, StepSizes
from jaxllm.engine.core.slots import Slots
from jaxllm.engine.core.step import StepFunctions
from jaxllm.engine.features.adapters.reading import AdapterReader, AdapterRows
from jaxllm.engine.messages import EngineRequest, EngineStats
from jaxllm.errors import CheckpointError, InvalidRequestError
from jaxllm.models.registry import AdaptedModel
from jaxllm.pallas_kernels import StepMetadata
from jaxllm.requests.steering import AdapterUse

PUT_TABLES, PUT_SCALES = Key("put", 0, frozenset({"adapters"})), Key("put", 0, frozenset({"scales"}))


@dataclass
class _Asked:
    uses: tuple[AdapterUse, ...]
    rows: tuple[AdapterRows, ...] = ()
    places: list[int] = field(default_factory=list)
    entering: list[tuple[int, AdapterRows]] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [use.id for use in self.uses]


class NoAdaptersFeature(Feature):
    """Refuses them, in an engine that has no places for any."""

    name = "adapters"
    asked_by = ("adapters",)

    def prepare(self, request: Request, asked: EngineRequest) -> None:
        name = asked.adapters[0].name
        raise InvalidRequestError(f"adapter {name!r}: this engine runs without adapters; see enable_lora")


class AdaptersFeature(Feature):
    """Tables of the adapters that are on the devices are a part of their own; a slot has how much of each is added."""

    name = "adapters"
    asked_by = ("adapters",)
    on = ("decode", "verify", "backbone")
    has_part = True
    words = ("scales",)

    def __init__(self, adapted: AdaptedModel, places: int, decodes: Sequence[Kind] = ("decode",)):
        self._decodes, self._adapted = decodes, adapted
        self.places = AdapterPlaces(places)
        self.store: AdapterStore | None = None

    def plan(self, buckets: Buckets) -> Plan:
        largest = [Key("backbone", buckets.prefill[-1], frozenset({self.name}))]
        largest += [Key(kind, buckets.decode[-1], SAMPLED | {self.name}) for kind in self._decodes]
        return Plan(soon=[PUT_TABLES, PUT_SCALES, *largest])

    def slot(self, sizes: StepSizes) -> dict[str, tuple[tuple[int, ...], Any]]:
        return {"scales": ((self.places.count,), jnp.float32)}

    def part(self, state: StateShapes) -> Any:
        return tuple(state.sharded(table.shape, table.dtype, table.axes) for table in self._adapted.tables)

    def uses(self, key: Key, uses: Any) -> Any:
        return uses if key == PUT_SCALES else super().uses(key, uses)

    def build(self, key: Key, maker: StepFunctions) -> Built:
        if key == PUT_SCALES:
            return super().build(key, maker)
        tables = maker.state.part(self)

        def step(parts: dict[str, Any], place: Any, *rows: Any) -> tuple[Any, ...]:
            return (tuple(t.at[place[0]].set(row) for t, row in zip(parts[self.name], rows, strict=True)),)

        return Built(step, [maker.state.ints(1), *map(maker.state.row_of, tables)])

    def attach(self) -> None:
        self.places = AdapterPlaces(self.places.count)

    def prepare(self, request: Request, asked: EngineRequest) -> _Asked:
        uses, most = asked.adapters, self.places.count
        names, ids = [use.name for use in uses], [use.id for use in uses]
        if len(uses) > most:
            raise InvalidRequestError(
                f"{len(uses)} adapters are asked for at once; accepted are max_loras, which is {most}"
            )
        twice = next((use.name for use in uses if ids.count(use.id) > 1), None)
        if twice is not None:
            raise InvalidRequestError(f"the adapters are {', '.join(names)}: {twice!r} is among them twice")
        return _Asked(uses)

    def needs(self, request: Request, extra: _Asked) -> Iterable[Key]:
        return [PUT_TABLES, PUT_SCALES]

    def salt(self, extra: _Asked) -> Any:
        return tuple((use.id, use.scale) for use in extra.uses)

    def job(self, request: Request, extra: _Asked) -> Errand | None:
        store = self.store
        assert store is not None, "an engine with places reads adapters"
        extra.rows = tuple(rows for use in extra.uses if (rows := store.known(use)) is not None)
        return None if len(extra.rows) == len(extra.uses) else Errand(partial(self._read, store, extra))

    def _read(self, store: AdapterStore, extra: _Asked) -> None:
        extra.rows = tuple(map(store.read, extra.uses))

    def fits(self, request: Request, extra: _Asked) -> bool:
        return self.places.fits(extra.ids)

    def place(self, request: Request, extra: _Asked, found: FoundPrefix) -> None:
        extra.places, entering = self.places.take(extra.ids)
        placed = zip(extra.ids, extra.rows, extra.places, strict=True)
        extra.entering = [(place, rows) for adapter, rows, place in placed if adapter in entering]

    def release(self, request: Request, extra: _Asked) -> None:
        self.places.release(extra.ids)

    def check(self) -> None:
        self.places.check([])

    def stats(self, stats: EngineStats, running: Iterable[Request], waiting: Iterable[Request]) -> None:
        stats.running_adapters, stats.waiting_adapters = self._count(running), self._count(waiting)

    def _count(self, requests: Iterable[Request]) -> dict[str, int]:
        asked = (request.extras.get(self.name) for request in requests)
        return dict(Counter(use.name for one in asked if one is not None for use in one.uses))

    def seat(self, request: Request, extra: _Asked) -> None:
        for place, rows in extra.entering:
            self.around.device.run(PUT_TABLES, np.array([place], np.int32), *rows)
        scales = np.zeros(self.places.count, np.float32)
        for use, place in zip(extra.uses, extra.places, strict=True):
            scales[place] = use.scale
        self.around.device.run(PUT_SCALES, np.array([request.slot], np.int32), scales)

    def traced(self, step: TracedStep) -> Traced:
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


class AdapterStore:
    """Keeps the rows of the adapters used last. Any thread may ask for some."""

    def __init__(self, reader: AdapterReader, most: int):
        self._reader, self._most = reader, most
        self._rows: OrderedDict[int, AdapterRows] = OrderedDict()
        self._lock, self._reading = threading.Lock(), threading.Lock()

    def known(self, use: AdapterUse) -> AdapterRows | None:
        with self._lock:
            if use.id in self._rows:
                self._rows.move_to_end(use.id)
            return self._rows.get(use.id)

    def read(self, use: AdapterUse) -> AdapterRows:
        """The rows of an adapter, read now if need be. Raises InvalidRequestError: it does not fit this model."""
        with self._reading:  # two requests for one adapter read it once
            rows = self.known(use)
            if rows is None:
                try:
                    rows = self._reader.read(use.path)
                except CheckpointError as error:
                    raise InvalidRequestError(f"adapter {use.name!r}: {error}") from error
                with self._lock:
                    self._rows[use.id] = rows
                    while len(self._rows) > self._most:
                        self._rows.popitem(last=False)
        return rows


class AdapterPlaces:
    """Places in the tables of adapters, held by the requests that run; the others keep their adapter.

    When an adapter needs a place, it gets one that is empty, or that of the adapter that was unused for the longest.
    """

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._place_of: dict[int, int] = {}
        self._holders: Counter[int] = Counter()

    def fits(self, adapters: Sequence[int]) -> bool:
        """Whether all these adapters can be on the devices together with those that are held."""
        missing = sum(adapter not in self._place_of for adapter in adapters)
        idle = sum(adapter not in self._holders and adapter not in adapters for adapter in self._place_of)
        return missing <= len(self._free) + idle

    def take(self, adapters: Sequence[int]) -> tuple[list[int], list[int]]:
        """Hold a place for each of the adapters, which fit: their places, and those of them that have to be loaded."""
        entered = []
        for adapter in adapters:
            if adapter not in self._place_of:
                if not self._free:
                    idle = next(a for a in self._place_of if a not in self._holders and a not in adapters)
                    self._free.append(self._place_of.pop(idle))
                self._place_of[adapter] = self._free.pop()
                entered.append(adapter)
            self._holders[adapter] += 1
            self._place_of[adapter] = self._place_of.pop(adapter)  # the last used is the last
        return [self._place_of[adapter] for adapter in adapters], entered

    def release(self, adapters: Sequence[int]) -> None:
        self._holders -= Counter(adapters)  # which drops what is held no longer

    def check(self, held: Sequence[Sequence[int]]) -> None:
        """Assert that the places agree with the adapters `held` by all running requests."""
        counts = Counter(adapter for adapters in held for adapter in adapters)
        assert counts == self._holders, "holders of adapters do not match the running requests"
        assert sorted([*self._free, *self._place_of.values()]) == list(range(self.count)), "a place was lost"
        assert set(counts) <= set(self._place_of), "an adapter is held that has no place"
