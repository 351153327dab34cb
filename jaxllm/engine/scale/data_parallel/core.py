"""One engine whose requests run in several batches side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

import msgspec

from jaxllm.compat import under_own_settings
from jaxllm.engine.core.handle import RanStep, StepKind
from jaxllm.engine.core.loop import EngineCore
from jaxllm.engine.core.registry import Features
from jaxllm.engine.core.sizes import StepSizes
from jaxllm.engine.messages import EngineRequest, EngineStats, NewWeights, PauseMode, ReadsWeights, TokenDelta
from jaxllm.engine.scale.data_parallel.ranks import Ranks
from jaxllm.engine.scale.routing import Replica, ReplicaRouter, together
from jaxllm.models.registry import LiveModel

OF_THE_DEVICE = ("compiles_foreseen", "compiles_unforeseen", "compiles_pending", "compile_seconds")
"""Statistics of what all ranks share."""


class DataParallelCore:
    """As an EngineCore, which each batch has one of: its rank. They share the devices, and meet in `Ranks`.

    A request goes where its prefix is, or else to the rank with the least to do, and stays there. Ranks with nothing to
    do take no turn; the others take theirs at once, each in a thread of its own.
    """

    def __init__(self, cores: Sequence[EngineCore], ranks: Ranks):
        self._cores = cores
        self._ranks = ranks
        sizes = cores[0].sizes
        rooms = {"num_pages": sizes.num_pages - 1, "page_size": sizes.page_size}
        step = sizes.max_num_batched_tokens
        replicas = [Replica(rank, **rooms, step_tokens=step) for rank in range(len(cores))]
        self._router = ReplicaRouter(replicas)
        self._pool = ThreadPoolExecutor(len(cores), "rank")

    @property
    def model(self) -> LiveModel | None:
        """See EngineCore: there for those who take it apart."""
        return self._cores[0].model

    @property
    def weight_version(self) -> str:
        """What the weights that steps run with are called."""
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
            found = [future.exception() for future in others]
        for error in found:
            if error is not None:
                raise error
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
        """Those of the first rank."""
        return self._cores[0].last_steps

    @property
    def sizes(self) -> StepSizes:
        """Those of every rank."""
        return self._cores[0].sizes

    def stats(self) -> EngineStats:
        """Of all ranks together."""
        each = [core.stats() for core in self._cores]
        shared = {name: getattr(each[0], name) for name in OF_THE_DEVICE}
        return msgspec.structs.replace(together(EngineStats(), each), **shared)

    @property
    def features(self) -> Features:
        """Those of the first rank."""
        return self._cores[0].features

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

    @property
    def weights(self) -> ReadsWeights:
        return self._cores[0].weights

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
