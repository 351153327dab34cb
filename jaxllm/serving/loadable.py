"""One model of the server, whether it is loaded or not: its settings, its state, and who holds it."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from jaxllm.config import ModelConfig
from jaxllm.engine.messages import EngineInfo, EngineStats, MemoryRoom
from jaxllm.engine.scale.routing import added, counted
from jaxllm.errors import CheckpointError, ConfigError, InvalidRequestError, ModelNotFoundError
from jaxllm.machine import return_freed_memory
from jaxllm.progress import tell, watched_by
from jaxllm.serving.access.keys import Tenant
from jaxllm.serving.adapters import ModelAdapters, check_adapter
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.request_metrics import RequestMetrics
from jaxllm.serving.served_model import ServedModel
from jaxllm.weights.source import resolve_adapter

if TYPE_CHECKING:
    from jaxllm.engine.doors.async_llm import AsyncLLM

ModelState = Literal["unloaded", "loading", "loaded", "sleeping", "failed"]
StartEngine = Callable[[ModelConfig, threading.Event, MemoryRoom], "AsyncLLM"]
"""Starts a model's engine once there is room for it, and gives up where the event is set meanwhile."""
MakeRoom = Callable[[int | None], None]
"""Called in the thread that loads with the bytes that an engine will take, or None where that is not known; returns
when they are free. Raises what keeps the model from being loaded: APIError where others do."""


class Caller(Protocol):
    """A client's call, which holds a model; it `waits` until its turn has come and the model is loaded."""

    tenant: Tenant
    waits: bool


class Stage(NamedTuple):
    """How far a load is; both numbers are 0 where nothing is counted."""

    doing: str
    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        return f"{self.doing} ({self.done} of {self.total})" if self.total else self.doing


def _room_for_all(nbytes: int | None) -> None:
    """Nobody has to make room."""


class LoadableModel:
    """A model that can be loaded and unloaded. What it was found to be and what it has counted outlives its engine.

    Attributes:
        adapters: those that requests may choose.
        served: what runs its requests while it is loaded; an engine that is asleep is woken first.
        stage: how far a load is, while there is one.
        on_change: called, in any thread, when its state or its stage has changed.
        error: why the last load failed, if it did, as clients are told it.
        awaited: whether the server is not ready before this model is: one that was loaded at the start.
        info, has_chat_template, metrics: of the last load; None before the first.
        planned_bytes: what its last engine, or the one that is starting, was planned to take of each device or of the
            host, where that is known.
        keep_alive: seconds without a request after which it is unloaded: what the last request that said something of
            it wanted, or else its own; infinity is never.
        calls: those that hold it; while there are any it is not unloaded.
        last_used: when a call last began or ended, on the monotonic clock.
        loaded_at: when its last load ended, on the same clock.
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
        budget: int | None = None,
    ):
        """For pinned to ttl see CatalogEntry; `budget` are the bytes that an engine may take."""
        self.config = config
        self.names = config.names
        self.adapters = ModelAdapters(self.name, config.lora_modules or ())
        self.pinned = pinned
        self.hidden = hidden
        self.keep_alive = self._ttl = math.inf if ttl is None else ttl
        self._budget = budget
        self._start = start
        self._given_up = threading.Event()
        self.served: ServedModel | None = None
        self.on_change: Callable[[], None] = lambda: None
        self._stage: Stage | None = None
        self.error: str | None = None
        self.awaited = preload
        self.info: EngineInfo | None = None
        self.has_chat_template: bool | None = None
        self.metrics: RequestMetrics | None = None
        self.planned_bytes: int | None = None
        self.calls: set[Caller] = set()
        self._falls_asleep = False
        self.last_used = self.loaded_at = 0.0
        self._past = EngineStats()

    @classmethod
    def loaded(cls, served: ServedModel) -> LoadableModel:
        """A model that was loaded by its owner, who keeps its engine, and stays loaded."""

        def start(config: ModelConfig, given_up: threading.Event, room: MemoryRoom) -> AsyncLLM:
            raise AssertionError("a pinned model is not unloaded")

        model = cls(served.config, start, preload=True, pinned=True)
        model._keep(served)
        return model

    @property
    def name(self) -> str:
        """The name that metrics and notices use."""
        return self.names[0]

    @property
    def stage(self) -> Stage | None:
        return self._stage

    @stage.setter
    def stage(self, stage: Stage | None) -> None:
        self._stage = stage
        self.on_change()

    @property
    def state(self) -> ModelState:
        if self.is_awake:
            return "loaded"
        if self.stage is not None:
            return "loading"
        if self.error is not None:
            return "failed"
        return "unloaded" if self.served is None else "sleeping"

    @property
    def is_awake(self) -> bool:
        """Whether it is loaded, and its engine there to run requests."""
        return self.served is not None and not self._falls_asleep and not self.served.engine.is_asleep

    @property
    def is_in_use(self) -> bool:
        """Whether a request runs on it; others may wait for their turn, or until it is loaded or woken up."""
        return any(not call.waits for call in self.calls)

    @property
    def held_bytes(self) -> int:
        """What it takes of the memory that is planned with: of its devices, and asleep of a CPU's."""
        if self.served is None:
            return 0
        if self.is_awake:
            return self.planned_bytes or 0
        engine = self.served.engine
        return engine.kept_bytes if engine.info.platform == "cpu" else 0

    @property
    def is_idle(self) -> bool:
        """Whether nobody asks for it, and it may be unloaded."""
        return self.served is not None and not self.calls and not self.pinned

    @property
    def is_left_alone(self) -> bool:
        """Whether it is to be unloaded because nobody has asked for it for long enough."""
        return self.is_idle and time.monotonic() - self.last_used >= self.keep_alive

    @property
    def is_dead(self) -> bool:
        """Whether it is loaded and its engine has stopped."""
        return self.served is not None and self.served.engine.is_dead

    def stats(self) -> EngineStats:
        """The newest statistics; counters go on from one engine to the next."""
        return self._past if self.served is None else added(self._past, self.served.engine.stats())

    def load(self, make_room: MakeRoom = _room_for_all) -> None:
        """Start its engine, or wake it up; blocks until that can run requests. Raises whatever keeps it from it."""

        def ask(nbytes: int | None) -> None:
            self.planned_bytes = nbytes
            make_room(nbytes)

        try:
            with watched_by(self._note):
                served = self._started(MemoryRoom(self._budget, ask))
        except APIError:
            raise  # there was no room for it: that is no failure of its own
        except BaseException as error:
            self.error = _told_to_clients(error)
            raise
        else:
            self.error = None
            self._keep(served)
            return_freed_memory()
        finally:
            self.stage = None

    def sleep(self, level: int) -> None:
        """Give back what its engine has of the devices; blocks until that is free. See AsyncLLM.sleep."""
        assert self.served is not None and not self.is_in_use
        self.served.engine.sleep(level)

    @contextmanager
    def falling_asleep(self) -> Iterator[None]:
        """Requests that come now wait, until it has gone to sleep inside and they have woken it up."""
        self._falls_asleep = True
        self.on_change()
        try:
            yield
        finally:
            self._falls_asleep = False
            self.on_change()

    def give_up(self) -> None:
        """End a load under way, which then raises EngineDeadError, and any later one."""
        self._given_up.set()

    def detach(self) -> ServedModel:
        """From now on it is unloaded; whoever calls this shuts down the engine of what it returns."""
        assert self.served is not None and not self.is_in_use
        served, self._past = self.served, counted(self.stats())
        self.served, self.awaited = None, False
        self.on_change()
        return served

    def _started(self, room: MemoryRoom) -> ServedModel:
        """It, with an engine that runs."""
        if self.served is not None:
            past = counted(self.stats())
            self.served.engine.wake_up(self._given_up, room)
            self._past = past
            return self.served
        engine = self._start(self.config, self._given_up, room)
        try:
            self._check_adapters(engine)
            return ServedModel(self.config, engine, self.metrics)
        except BaseException:
            engine.shutdown()
            raise

    def _check_adapters(self, engine: AsyncLLM) -> None:
        """Raises ConfigError for an adapter that is not there, or that the engine cannot use."""
        for adapter in self.adapters:
            tell(f"Loading adapter {adapter.name}", 0, 0)
            try:
                found = self.adapters.found_at(adapter, str(resolve_adapter(adapter.path)))
                asyncio.run(check_adapter(engine, found))
            except (ModelNotFoundError, InvalidRequestError) as error:
                raise ConfigError(f"lora_modules: {error}") from None

    def _note(self, doing: str, done: int, total: int) -> None:
        self.stage = Stage(doing, done, total)

    def _keep(self, served: ServedModel) -> None:
        self.info, self.metrics = served.engine.info, served.metrics
        self.has_chat_template = served.has_chat_template
        self.last_used = self.loaded_at = time.monotonic()
        self.keep_alive = self._ttl
        self.served = served


def _told_to_clients(error: BaseException) -> str:
    """Why a model could not be loaded. The error itself has paths in it, and is for the log alone."""
    match error:
        case CheckpointError():
            reason = "its files are damaged, or not of a kind that is served"
        case ConfigError():
            reason = "its settings cannot be honoured with this model on this machine"
        case _:
            reason = "its engine did not start"
    return f"{reason}; the server's log has the details"
