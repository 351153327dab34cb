"""One model of the server, whether it is loaded or not: its settings, its state, and who holds it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

from jaxllm.config import ModelConfig
from jaxllm.engine.messages import EngineInfo, EngineStats
from jaxllm.machine import return_freed_memory
from jaxllm.progress import watched_by
from jaxllm.serving.past_stats import added, counted
from jaxllm.serving.request_metrics import RequestMetrics
from jaxllm.serving.served_model import ServedModel

if TYPE_CHECKING:
    from jaxllm.engine.front.async_llm import AsyncLLM

ModelState = Literal["unloaded", "loading", "loaded", "failed"]
StartEngine = Callable[[ModelConfig, threading.Event], "AsyncLLM"]
"""Starts a model's engine, and gives up where the event is set meanwhile."""


class Stage(NamedTuple):
    """How far a load is; both numbers are 0 where nothing is counted."""

    doing: str
    done: int = 0
    total: int = 0


class LoadableModel:
    """A model that can be loaded and unloaded. What it was found to be and what it has counted outlives its engine.

    Attributes:
        served: what runs its requests while it is loaded.
        stage: how far a load is, while there is one.
        error: why the last load failed, if it did.
        awaited: whether the server is not ready before this model is: one that was loaded at the start.
        info, has_chat_template, metrics: of the last load; None before the first.
        leases: who holds it; while anybody does it is not unloaded.
        last_used: when a lease last began or ended, on the monotonic clock.
    """

    def __init__(
        self,
        config: ModelConfig,
        start: StartEngine,
        *,
        preload: bool = False,
        pinned: bool = False,
        hidden: bool = False,
        ttl: float | None = None,
    ):
        """For the last four see CatalogEntry."""
        self.config = config
        self.names = config.names
        self.pinned = pinned
        self.hidden = hidden
        self.ttl = ttl
        self._start = start
        self._given_up = threading.Event()
        self.served: ServedModel | None = None
        self.stage: Stage | None = None
        self.error: str | None = None
        self.awaited = preload
        self.info: EngineInfo | None = None
        self.has_chat_template: bool | None = None
        self.metrics: RequestMetrics | None = None
        self.leases: set[Lease] = set()
        self.last_used = 0.0
        self._past = EngineStats()

    @classmethod
    def loaded(cls, served: ServedModel) -> LoadableModel:
        """A model that was loaded by its owner, who keeps its engine, and stays loaded."""

        def start(config: ModelConfig, given_up: threading.Event) -> AsyncLLM:
            raise AssertionError("a pinned model is not unloaded")

        model = cls(served.config, start, preload=True, pinned=True)
        model._keep(served)
        return model

    @property
    def name(self) -> str:
        """The name that metrics and notices use."""
        return self.names[0]

    @property
    def state(self) -> ModelState:
        if self.served is not None:
            return "loaded"
        if self.stage is not None:
            return "loading"
        return "unloaded" if self.error is None else "failed"

    @property
    def is_idle(self) -> bool:
        """Whether it may be unloaded to make room."""
        return self.served is not None and not self.leases and not self.pinned

    @property
    def is_dead(self) -> bool:
        """Whether it is loaded and its engine has stopped."""
        return self.served is not None and self.served.engine.is_dead

    def stats(self) -> EngineStats:
        """The newest statistics; counters go on from one engine to the next."""
        return self._past if self.served is None else added(self._past, self.served.engine.stats())

    def load(self) -> None:
        """Start its engine; blocks until that can run requests. Raises whatever keeps it from starting."""
        try:
            with watched_by(self._note):
                engine = self._start(self.config, self._given_up)
            try:
                served = ServedModel(self.config, engine, self.metrics)
            except BaseException:
                engine.shutdown()
                raise
        except BaseException as error:
            self.error = str(error) or type(error).__name__
            raise
        else:
            self.error = None
            self._keep(served)
            return_freed_memory()
        finally:
            self.stage = None

    def give_up(self) -> None:
        """End a load under way, which then raises EngineDeadError, and any later one."""
        self._given_up.set()

    def detach(self) -> ServedModel:
        """From now on it is unloaded; whoever calls this shuts down the engine of what it returns."""
        assert self.served is not None and not self.leases
        served, self._past = self.served, counted(self.stats())
        self.served, self.awaited = None, False
        return served

    def _note(self, doing: str, done: int, total: int) -> None:
        self.stage = Stage(doing, done, total)

    def _keep(self, served: ServedModel) -> None:
        self.info, self.metrics = served.engine.info, served.metrics
        self.has_chat_template = served.has_chat_template
        self.last_used = time.monotonic()
        self.served = served


class Lease:
    """One request's hold on its model, which stays in place until the request has sent its last byte.

    `name` is what the client calls the model. A context manager that releases the model at its end.
    """

    def __init__(self, name: str, of: LoadableModel):
        self.name = name
        self._of = of
        of.leases.add(self)
        of.last_used = time.monotonic()

    @property
    def model(self) -> ServedModel:
        """The model itself, which is loaded by the time that a request gets its lease."""
        assert self._of.served is not None, f"{self._of.name} is not loaded"
        return self._of.served

    def again(self) -> Lease:
        """A second lease of the model, for work that goes on after the request has ended."""
        return Lease(self.name, self._of)

    def release(self) -> None:
        """Give the model back; does nothing from the second call on."""
        if self in self._of.leases:
            self._of.leases.remove(self)
            self._of.last_used = time.monotonic()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
