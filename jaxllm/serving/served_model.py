"""One model of the server, loaded or not: its settings, its state, and the calls that hold it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from jaxllm.chat.prompt import ChatModel
from jaxllm.config import EngineConfig, ModelConfig
from jaxllm.engine.messages import EngineInfo, EngineStats, MemoryRoom
from jaxllm.engine.scale.routing import added, counted
from jaxllm.errors import CheckpointError, ConfigError, EngineDeadError, InvalidRequestError, ModelNotFoundError, reason
from jaxllm.machine import return_freed_memory
from jaxllm.progress import tell, watched_by
from jaxllm.serving.access.keys import Tenant
from jaxllm.serving.adapters import ModelAdapters, check_adapter
from jaxllm.serving.http.api_error import APIError, unavailable
from jaxllm.serving.request_metrics import RequestMetrics
from jaxllm.weights.source import resolve_adapter

if TYPE_CHECKING:
    from jaxllm.engine.doors.async_llm import AsyncLLM  # imports JAX, for which a wrong command line need not wait

OF_THE_MACHINE = frozenset(
    {"download_dir", "compile_cache_dir", "compile_cache_max", "weight_cache_max", "engine_process", "max_num_waiting"}
)
"""Settings of the engine that say where and when it runs, not what it answers."""


class Running(Protocol):
    """A request under way."""

    def abort(self, error: APIError) -> None:
        """End it now; its client gets the error."""


def stopped() -> APIError:
    return unavailable("the server stopped before the answer was complete", code="shutting_down")


def shutting_down() -> APIError:
    return unavailable("the server is shutting down", code="shutting_down")


class ServedModel(ChatModel):
    """A model that conversations are held with over HTTP; it goes on with earlier `metrics` of the model.

    Metrics use the first of its `names`. No request joins `running` once it is `draining`. Raises ConfigError when
    config.chat_template cannot be read; see ChatModel.
    """

    def __init__(self, config: ModelConfig, engine: AsyncLLM, metrics: RequestMetrics | None = None):
        super().__init__(
            engine,
            chat_template=read_chat_template(config),
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
            content_format=config.chat_template_content_format,
            variables=config.default_chat_template_kwargs,
        )
        self.engine: AsyncLLM
        self.config = config
        self.names = config.names
        self.system_fingerprint = system_fingerprint(config, engine.info.max_model_len, self.chat_template)
        self.metrics = metrics or RequestMetrics(self.names[0], engine.info.max_model_len)
        self.running: set[Running] = set()
        self.draining = False

    def check_accepting(self, *, goes_on: bool = False) -> None:
        """Raises 503 when no request can start here. One that only `goes_on` may while the server is stopping."""
        if self.engine.is_dead:
            raise EngineDeadError(f"the engine has stopped; no request to {self.names[0]} can be answered")
        if self.draining and not goes_on:
            raise shutting_down()


def read_chat_template(config: ModelConfig) -> str | None:
    """The text of config.chat_template, if one is set. Raises ConfigError when it cannot be read."""
    path = config.chat_template
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template is {str(path)!r}, which cannot be read: {reason(error)}") from None


def engine_settings(config: EngineConfig) -> dict[str, Any]:
    """The settings that may change an answer, as JSON has them."""
    return config.model_dump(mode="json", include=set(EngineConfig.model_fields) - OF_THE_MACHINE)


def system_fingerprint(config: ModelConfig, max_model_len: int, chat_template: str | None) -> str:
    """A name that stays the same, over restarts too, as long as all of these do."""
    template = [chat_template, config.default_chat_template_kwargs, config.chat_template_content_format]
    described = [version("jaxllm"), engine_settings(config), max_model_len, template]
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    return f"fp_{digest[:12]}"


ModelState = Literal["unloaded", "loading", "loaded", "sleeping", "failed"]
StartEngine = Callable[[ModelConfig, threading.Event, MemoryRoom], "AsyncLLM"]
"""Starts a model's engine once there is room for it, and gives up where the event is set meanwhile."""
MakeRoom = Callable[[int | None], None]
"""Called with the bytes that an engine will take, if they are known; returns when they are free. Raises APIError."""


class Holder(Protocol):
    """A client's call, which holds a model; it `waits` until its turn has come and the model is loaded."""

    tenant: Tenant
    waits: bool


class Stage(msgspec.Struct, frozen=True):
    """The progress of a load: its present step in words, and a count of that, 0 of 0 where nothing is counted."""

    doing: str
    done: int = 0
    total: int = 0
    status: str = "loading"

    def __str__(self) -> str:
        return f"{self.doing} ({self.done} of {self.total})" if self.total else self.doing


class LoadableModel:
    """A model that can be loaded and unloaded. Its description and its counters outlive its engine.

    Attributes:
        name: its name in metrics and notices.
        served: runs its requests while it is loaded; an engine that is asleep is woken first.
        on_change: called, in any thread, when its state or its stage has changed.
        error: why the last load failed, if it did, in words for clients.
        awaited: True if the server is not ready before the model is loaded.
        info, has_chat_template, metrics: of the last load; None before the first.
        planned_bytes: of each device, or of the host, for its last engine or the one that is starting, where known.
        keep_alive: seconds without a request after which it is unloaded; infinity is never.
        calls: those that hold it; while there are any it is not unloaded.
        last_used, loaded_at: when a call last began or ended, and its last load ended, on the monotonic clock.
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
        """See CatalogEntry; `budget` is the most bytes that an engine may take."""
        self.config = config
        self.names = config.names
        self.name = self.names[0]
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
        self.calls: set[Holder] = set()
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
        return self.served is not None and not self._falls_asleep and not self.served.engine.is_asleep

    @property
    def is_in_use(self) -> bool:
        """True if a request runs on it, and does not only wait."""
        return any(not call.waits for call in self.calls)

    @property
    def held_bytes(self) -> int:
        """Its share of the planned memory: of its devices, and asleep of a CPU's."""
        if self.served is None:
            return 0
        if self.is_awake:
            return self.planned_bytes or 0
        engine = self.served.engine
        return engine.kept_bytes if engine.info.platform == "cpu" else 0

    @property
    def is_idle(self) -> bool:
        return self.served is not None and not self.calls and not self.pinned

    @property
    def is_dead(self) -> bool:
        return self.served is not None and self.served.engine.is_dead

    def stats(self) -> EngineStats:
        """The newest statistics; counters go on from one engine to the next."""
        return self._past if self.served is None else added(self._past, self.served.engine.stats())

    def load(self, make_room: MakeRoom | None = None) -> None:
        """Start its engine, or wake it up; blocks until that can run requests. Raises whatever keeps it from it."""

        def ask(nbytes: int | None) -> None:
            self.planned_bytes = nbytes
            if make_room is not None:
                make_room(nbytes)

        def note(doing: str, done: int, total: int) -> None:
            self.stage = Stage(doing, done, total)

        try:
            with watched_by(note):
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
        for adapter in self.adapters:
            tell(f"Loading adapter {adapter.name}", 0, 0)
            try:
                found = self.adapters.found_at(adapter, str(resolve_adapter(adapter.path)))
                asyncio.run(check_adapter(engine, found))
            except (ModelNotFoundError, InvalidRequestError) as error:
                raise ConfigError(f"lora_modules: {error}") from None

    def _keep(self, served: ServedModel) -> None:
        self.info, self.metrics = served.engine.info, served.metrics
        self.has_chat_template = served.has_chat_template
        self.last_used = self.loaded_at = time.monotonic()
        self.keep_alive = self._ttl
        self.served = served


def _told_to_clients(error: BaseException) -> str:
    """Why a model could not be loaded. The error itself has paths in it, and is for the log alone."""
    reason = "its engine did not start"
    if isinstance(error, CheckpointError):
        reason = "its files are damaged, or not of a kind that is served"
    elif isinstance(error, ConfigError):
        reason = "its settings cannot be honoured with this model on this machine"
    return f"{reason}; the server's log has the details"
