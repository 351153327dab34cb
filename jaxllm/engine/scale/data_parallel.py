"""One engine whose requests run in several batches side by side."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np

from jaxllm.compat import under_own_settings
from jaxllm.engine.core.device import MOST_RECENT, Device
from jaxllm.engine.core.feature import Feature
from jaxllm.engine.core.handle import RanStep, StepKind
from jaxllm.engine.core.keys import Key, Kind, Variant
from jaxllm.engine.core.loop import EngineCore
from jaxllm.engine.core.registry import Features
from jaxllm.engine.core.sizes import StepSizes
from jaxllm.engine.messages import EngineRequest, EngineStats, NewWeights, PauseMode, TokenDelta
from jaxllm.engine.scale.routing import Replica, ReplicaRouter, together

OF_THE_DEVICE = ("compiles_foreseen", "compiles_unforeseen", "compiles_pending", "compile_seconds")


class DataParallelCore:
    """As an EngineCore, which each batch has one of: its rank. They share the devices, and meet in `Ranks`.

    A request goes where its prefix is, or else to the rank with the least to do, and stays there. Ranks with nothing to
    do take no turn; the others take theirs at once, each in a thread of its own.
    """

    def __init__(self, cores: Sequence[EngineCore], ranks: Ranks):
        self._cores, self._ranks = cores, ranks
        first, sizes = cores[0], cores[0].sizes
        self.model, self.sizes, self.features, self.weights = first.model, sizes, first.features, first.weights
        rooms = {"num_pages": sizes.num_pages - 1, "page_size": sizes.page_size}
        step = sizes.max_num_batched_tokens
        self._router = ReplicaRouter([Replica(rank, **rooms, step_tokens=step) for rank in range(len(cores))])
        self._pool = ThreadPoolExecutor(len(cores), "rank")

    @property
    def weight_version(self) -> str:
        return self._cores[0].weight_version

    @weight_version.setter
    def weight_version(self, version: str) -> None:
        for core in self._cores:
            core.weight_version = version

    @property
    def on_begin(self) -> Callable[[list[str]], None]:
        """Called with the requests that get their place, before their first step, by several threads."""
        return self._cores[0].on_begin

    @on_begin.setter
    def on_begin(self, told: Callable[[list[str]], None]) -> None:
        for core in self._cores:
            core.on_begin = told

    def when_prepared(self, wake: Callable[[], None]) -> None:
        for core in self._cores:
            core.when_prepared(wake)

    @property
    def has_work(self) -> bool:
        return any(core.has_work for core in self._cores)

    @property
    def load(self) -> tuple[int, int]:
        running, waiting = zip(*(core.load for core in self._cores), strict=True)
        return sum(running), sum(waiting)

    def add(self, message: EngineRequest) -> None:
        chosen = self._router.choose(message)
        self._router.begin(message, chosen)
        self._cores[chosen.number].add(message)

    def abort(self, request_ids: Sequence[str]) -> None:
        for rank, core in enumerate(self._cores):
            if mine := self._router.of(rank, request_ids):
                core.abort(mine)
        self._router.forget(request_ids)

    def hurry(self, request_ids: Sequence[str]) -> None:
        for core in self._cores:
            core.hurry(request_ids)

    def turn(self) -> list[TokenDelta]:
        """One turn of each rank that has work, side by side; raises what one of them does, once all have ended."""
        busy = [rank for rank, core in enumerate(self._cores) if core.has_work]
        if not busy:
            return []
        self._ranks.begin(busy)
        others = [self._pool.submit(under_own_settings(self._turn), rank) for rank in busy[1:]]
        try:
            deltas = self._turn(busy[0])
        finally:
            wait(others)
        deltas = [*deltas, *(delta for future in others for delta in future.result())]
        self._router.note(deltas)
        return deltas

    def _turn(self, rank: int) -> list[TokenDelta]:
        try:
            return self._cores[rank].turn()
        finally:
            self._ranks.end(rank)

    @property
    def last_steps(self) -> dict[StepKind, RanStep]:
        return self._cores[0].last_steps

    def stats(self) -> EngineStats:
        each = [core.stats() for core in self._cores]
        shared = {name: getattr(each[0], name) for name in OF_THE_DEVICE}
        return msgspec.structs.replace(together(EngineStats(), each), **shared)

    @property
    def is_paused(self) -> bool:
        return self._cores[0].is_paused

    def pause(self, mode: PauseMode) -> None:
        for core in self._cores:
            core.pause(mode)

    def resume(self) -> None:
        for core in self._cores:
            core.resume()

    def reset_prefix_cache(self) -> None:
        for core in self._cores:
            core.reset_prefix_cache()

    def update_weights(self, new: NewWeights, version: str) -> None:
        """See EngineCore: all ranks run with them from now on."""
        first, *others = self._cores
        first.update_weights(new, version)
        for core in others:
            core.weight_version = version
            core.reset_prefix_cache()

    def keep_weights(self, file: BinaryIO) -> None:
        self._cores[0].keep_weights(file)

    def close(self) -> None:
        for core in self._cores:
            core.close()
        self._pool.shutdown(wait=False)


Core = EngineCore | DataParallelCore
"""What a loop turns over."""


Covering = Callable[[Kind, int, Variant], Key]
"""The step of a kind for so many rows or tokens that does all that a variant does; see `Device.covering`."""

BATCHES: tuple[Kind, ...] = ("backbone", "head", "decode")
"""Steps with a batch: those of one kind are joined, whatever their sizes."""


class WantedStep(NamedTuple):
    key: Key
    vectors: tuple[np.ndarray, ...]

    @property
    def order(self) -> int:
        """How late in a turn such a step comes: the earliest runs first, and 0 comes before a batch is packed."""
        return {"put": 0, "backbone": 1, "head": 3, "decode": 4}.get(self.key.kind, 2)


class Joiner:
    """Joins the steps of `sizes` that several batches ask for.

    Worked example: batch 0 asks for `decode-4` and batch 1 for `decode-8-sampled`. Both run `decode-8-sampled`, where
    the last four rows of batch 0 are padding, as they are in any step that is larger than it need be. A batch that asks
    for nothing has padding alone.
    """

    def __init__(self, sizes: StepSizes, covering: Covering, features: Features):
        self._sizes, self._features, self._covering = sizes, features, covering
        self._nobody = sizes.max_num_seqs

    def choose(self, asked: dict[int, WantedStep]) -> list[int]:
        """Which of the batches that ask for a step are served first, all by the same one."""
        first = min(asked, key=lambda batch: (asked[batch].order, batch))
        return [batch for batch, one in asked.items() if self._can_join(asked[first].key, one.key)]

    def _can_join(self, key: Key, other: Key) -> bool:
        if key == other:
            return True
        rare = self._features.is_rare(key) or self._features.is_rare(other)
        return key.kind == other.kind and key.kind in BATCHES and not rare

    def join(self, asked: Sequence[WantedStep | None]) -> WantedStep:
        """The step for all batches, of which those with None ask for nothing; its vectors lie one after the other."""
        some = [one for one in asked if one is not None]
        key = some[0].key
        if any(one.key != key for one in some):
            variant: Variant = frozenset().union(*(one.key.variant for one in some))
            key = self._covering(key.kind, max(one.key.size for one in some), variant)
        given = [self._fitted(one, key) if one is not None else None for one in asked]
        nothing = self._idle(key, next(vectors for vectors in given if vectors is not None))
        return WantedStep(key, tuple(map(np.concatenate, zip(*(vectors or nothing for vectors in given), strict=True))))

    def _fitted(self, asked: WantedStep, key: Key) -> tuple[np.ndarray, ...]:
        """What a batch sends, laid out as a larger step of the same kind takes it."""
        if asked.key == key:
            return asked.vectors
        vector = np.zeros(self._features.packing(key, self._sizes).size, np.int32)
        (vector,) = self._idle(key, (vector,))
        new = self._features.packing(key, self._sizes).views(vector)
        for name, field in self._features.packing(asked.key, self._sizes).views(asked.vectors[0]).items():
            new[name][tuple(map(slice, field.shape))] = field
            if name == "query_start":
                new[name][len(field) :] = field[-1]
        return (vector,)

    def _idle(self, key: Key, like: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        """What a batch sends that has nothing to do in a step; `like` is what another sends."""
        vectors = tuple(map(np.zeros_like, like))
        if key.kind in BATCHES:
            fields = self._features.packing(key, self._sizes).views(vectors[0])
            fields["slot"][:] = self._nobody
            if "new_pages" in fields:
                fields["new_pages"][:, 0] = self._nobody
            if "num_steps" in fields:
                fields["num_steps"][...] = 1
            for feature in self._features.inside(key.kind, key.variant, Feature.padding):
                feature.padding(key, fields)
        elif key.kind == "put":
            vectors[0][0] = self._nobody
        return vectors


class Ranks:
    """Runs the steps of `count` batches, each of which has a thread and a rank: its place in every joined step.

    A batch that asks for a step waits until each of the others that act has asked for one too, or has ended its turn.
    Then the thread that came last runs one step for all that can be joined. No thread waits for the devices here.
    Before it packs its requests, a batch says whether all of them decode. If another has prompts to compute, all run
    the same two steps, a backbone and a head, instead of a decode besides.
    """

    def __init__(self, device: Device, sizes: StepSizes, count: int):
        self.count, self._device = count, device
        self._joiner = Joiner(sizes, device.covering, device.features)
        self._changed = threading.Condition()
        self._acting: set[int] = set()
        self._asked: dict[int, WantedStep] = {}
        self._said: dict[int, bool] = {}
        self._found: dict[int, Any] = {}

    def begin(self, ranks: list[int]) -> None:
        with self._changed:
            self._acting.update(ranks)

    def end(self, rank: int) -> None:
        """A rank has ended its turn: the others wait for it no longer."""
        with self._changed:
            self._acting.discard(rank)
            self._run_what_is_due()

    def run(self, rank: int, key: Key, vectors: tuple[Any, ...]) -> Any:
        """Enqueue a step for a rank, together with those of others; see `Device.run`."""
        with self._changed:
            self._asked[rank] = WantedStep(key, tuple(map(np.asarray, vectors)))
            found = self._wait(rank)
        if isinstance(found, BaseException):
            raise found
        return found

    def all_decode(self, rank: int, decodes: bool) -> bool:
        """Whether a rank's next step is a decode, like those of all others; see `Device.all_decode`."""
        with self._changed:
            self._said[rank] = decodes
            found: bool = self._wait(rank)
        return found

    def _wait(self, rank: int) -> Any:
        self._run_what_is_due()
        while rank not in self._found:
            self._changed.wait()
        return self._found.pop(rank)

    def _run_what_is_due(self) -> None:
        while (waiting := self._asked.keys() | self._said.keys()) and self._acting <= waiting:
            if self._said and all(one.order > 0 for one in self._asked.values()):
                self._found |= dict.fromkeys(self._said, all(self._said.values()) and not self._asked)
                self._said.clear()
            else:
                served = self._joiner.choose(self._asked)
                asked = {rank: self._asked.pop(rank) for rank in served}
                self._found |= dict.fromkeys(served) | self._run(asked)
            self._changed.notify_all()

    def _run(self, asked: dict[int, WantedStep]) -> dict[int, Any]:
        try:
            step = self._joiner.join([asked.get(rank) for rank in range(self.count)])
            found = self._device.run(step.key, *step.vectors)
        except BaseException as error:
            return dict.fromkeys(asked, error)  # every turn that takes part ends with it
        return {} if found is None else {rank: found[rank] for rank in asked}


class RankDevice(Device):
    """The Device as the batch of one rank sees it: with caches, slots and hidden states of its own."""

    def __init__(self, whole: Device, ranks: Ranks, rank: int):
        # What it has is that of the whole, with which it shares it.
        self._whole, self._ranks, self._rank = whole, ranks, rank
        self._executables, self._parts = whole._executables, whole._parts
        self.most_rows, self.num_parts, self.features = whole.most_rows, whole.num_parts, whole.features
        self.recent = deque(maxlen=MOST_RECENT)

    def run(self, key: Key, *vectors: Any) -> Any:
        self.recent.append(key)
        return self._ranks.run(self._rank, key, vectors)

    def all_decode(self, decodes: bool) -> bool:
        return self._ranks.all_decode(self._rank, decodes)

    def compile(self, key: Key) -> None:
        self._whole.compile(key)

    def close(self) -> None:
        self._whole.close()
