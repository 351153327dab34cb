"""Loads models when they are asked for, a few at a time, and unloads those that no request needs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from jaxllm.errors import EngineDeadError, JaxLLMError
from jaxllm.machine import return_freed_memory
from jaxllm.serving.http.api_error import APIError, unavailable
from jaxllm.serving.loadable import LoadableModel, Stage
from jaxllm.serving.served_model import ServedModel
from jaxllm.setting_values import format_bytes

logger = logging.getLogger(__name__)

AT_CAPACITY = "at_capacity"
FAILED = "model_failed"
WAITING = "Waiting for another load or unload to end"
STARTING = "Starting the engine's process"
LEASE_SECONDS = 0.02
"""How often a model that is to sleep is looked at, until its requests have ended."""
POLL_SECONDS = 0.5
"""How often idle models are looked for."""


class ModelLoader:
    """At most `most` of `models`, and at most `memory` bytes of them, are loaded; one load or unload goes on at a time.

    An engine is planned before another is unloaded for it, so that none gives way to one that cannot start.
    Everything is called on the server's event loop, but for `drain`, which a signal handler may call.
    """

    def __init__(self, models: Sequence[LoadableModel], most: int | None = None, memory: int | None = None):
        """None is any number."""
        self._models = models
        self._most = len(models) if most is None else most
        self._memory = memory
        self._changing = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jaxllm-load")
        """The same for all loads: what one thread has freed another of glibc's heaps would not use again."""
        self._loads: dict[LoadableModel, asyncio.Task[APIError | None]] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self._draining = False

    async def load(self, model: LoadableModel) -> None:
        """Returns when the model is loaded and awake; all who ask meanwhile wait for one load, which outlives them.

        Raises APIError 503: all models that may be loaded at once are busy, the load failed, or the server is stopping.
        """
        if not model.is_awake and (error := await asyncio.shield(self.begin(model))) is not None:
            raise error

    def begin(self, model: LoadableModel) -> asyncio.Task[APIError | None]:
        """Load a model in the background: a task of what kept it from loading. Raises as `load`."""
        task = self._loads.get(model)
        if task is None:
            if self._draining:
                raise _shutting_down()
            self._check_room(model, model.planned_bytes)
            model.stage = Stage(WAITING if self._changing.locked() else STARTING)
            task = self._loads[model] = asyncio.create_task(self._load(model), name=f"load {model.name}")
        return task

    async def unload(self, model: LoadableModel) -> None:
        """Shut a model's engine down; does nothing where it is not loaded.

        Raises APIError 409: it is loading, pinned, or some request holds it.
        """
        _check_unused(model)
        async with self._changing:
            _check_unused(model)
            if model.served is not None:
                await self._unload(model)

    async def sleep(self, model: LoadableModel, level: int, *, wait: bool) -> None:
        """Give back what a model's engine has of the devices; does nothing where it is not awake.

        Its requests are aborted, or with `wait` they end first; those that come meanwhile wake it up again.

        Raises APIError: 409, it is loading; 400, its engine is one that cannot sleep; 500, that ended by itself.
        """
        if model.stage is not None:
            raise _busy(model, "is loading", "be put to sleep")
        async with self._changing:
            if model.served is None or not model.is_awake:
                return
            if not model.served.engine.can_sleep:
                message = "only an engine in a process of its own (engine_process) can sleep"
                raise APIError(400, message)
            with model.falling_asleep():
                while model.is_in_use:
                    if not wait:
                        for request in list(model.served.running):
                            request.abort(_asleep(model))
                    await asyncio.sleep(LEASE_SECONDS)
                try:
                    await self._in_thread(partial(model.sleep, level))
                except EngineDeadError as error:
                    raise APIError(500, f"model {model.name!r}: {error}", type="server_error", code=FAILED) from None
        logger.info("model %s sleeps at level %d", model.name, level)

    def start(self) -> None:
        """Look for idle models from now on, where any may be unloaded."""
        if not all(model.pinned for model in self._models):
            self._sweeper = asyncio.create_task(self._unload_idle(), name="unload idle models")

    def drain(self) -> None:
        """From now on no load begins, and what is loading is given up."""
        self._draining = True
        for model in list(self._loads):
            model.give_up()

    async def close(self) -> None:
        """Wait until nothing is being loaded or unloaded any more."""
        self.drain()
        await asyncio.gather(*self._loads.values())
        async with self._changing:
            if self._sweeper is not None:
                self._sweeper.cancel()
        self._thread.shutdown(wait=False)

    async def _load(self, model: LoadableModel) -> APIError | None:
        began = time.monotonic()
        try:
            async with self._changing:
                self._check_room(model, model.planned_bytes)
                if self._draining:
                    return _shutting_down()
                model.stage = Stage(STARTING)
                make_room = partial(self._make_room, model, asyncio.get_running_loop())
                await self._in_thread(partial(model.load, make_room))
                assert model.served is not None
                model.served.draining = self._draining
        except APIError as error:
            return error
        except Exception as error:
            if self._draining:
                return _shutting_down()
            logger.error("model %s: %s", model.name, error, exc_info=not isinstance(error, JaxLLMError))
            return unavailable(f"model {model.name!r} could not be loaded: {model.error}", code=FAILED)
        finally:
            model.stage = None
            del self._loads[model]
        logger.info("model %s was loaded in %.1f s", model.name, time.monotonic() - began)
        return None

    def _make_room(self, model: LoadableModel, loop: asyncio.AbstractEventLoop, nbytes: int | None) -> None:
        """In the thread that loads: unload what must go for a model that takes so much. Raises as `_take_place`."""
        evicted = asyncio.run_coroutine_threadsafe(self._take_place(model, nbytes), loop).result()
        while evicted:
            _shut_down(evicted)

    async def _take_place(self, model: LoadableModel, nbytes: int | None) -> list[ServedModel]:
        """The engines that must go for a model, taken from models that nobody uses, the longest unused first.

        Raises APIError 503 where too many are busy or pinned; all stay as they are then.
        """
        self._check_room(model, nbytes)
        loaded = [one for one in self._models if one is not model and one.served is not None]
        idle = sorted((one for one in loaded if self._takes_room(one) and one.is_idle), key=lambda one: one.last_used)
        going: list[LoadableModel] = []
        while not self._fits([one for one in loaded if one not in going], nbytes):
            going.append(idle.pop(0))
        evicted = []
        for one in going:
            logger.info("model %s is unloaded to make room for %s", one.name, model.name)
            evicted.append(one.detach())
        return evicted

    def _fits(self, others: Sequence[LoadableModel], nbytes: int | None) -> bool:
        """Whether a model that takes so many bytes may be loaded beside those."""
        if sum(one.served is None or one.is_awake for one in others) >= self._most:
            return False
        return self._memory is None or sum(one.held_bytes for one in others) + (nbytes or 0) <= self._memory

    def _takes_room(self, model: LoadableModel) -> bool:
        """Whether there is more of it once the model is unloaded; asleep it may have given back all."""
        return model.is_awake or (self._memory is not None and model.held_bytes > 0)

    def _check_room(self, model: LoadableModel, nbytes: int | None) -> None:
        """Raises where all that are idle could go, and there would still be no room: see `_take_place`."""
        taken = [one for one in self._models if one is not model and (one.served is not None or one in self._loads)]
        if not self._fits(pinned := [one for one in taken if one.pinned], nbytes):
            names = ", ".join(one.name for one in pinned)
            message = f"{names} stay loaded (pinned) and leave no room for {model.name}: {self._limit(nbytes)}"
            raise unavailable(message, code=FAILED)
        if not self._fits(busy := [one for one in taken if not one.is_idle], nbytes):
            names = ", ".join(one.name for one in busy)
            message = f"at capacity: {names} must answer requests first, and {self._limit(nbytes)}; retry later"
            raise unavailable(message, code=AT_CAPACITY)

    def _limit(self, nbytes: int | None) -> str:
        """What is full, in words."""
        if self._memory is None or nbytes is None:
            return f"max_loaded_models is {self._most}"
        return f"it takes {format_bytes(nbytes)}, and model_memory is {format_bytes(self._memory)}"

    async def _unload(self, model: LoadableModel) -> None:
        await self._in_thread(partial(_shut_down, [model.detach()]))
        logger.info("model %s was unloaded", model.name)

    async def _in_thread(self, function: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def _unload_idle(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            async with self._changing:
                for model in self._models:
                    if model.is_left_alone:
                        await self._unload(model)


def _shut_down(held: list[ServedModel]) -> None:
    """Stop the engine of the last one in the list, and forget it in this thread: freeing a tokenizer takes a while."""
    held.pop().engine.shutdown()
    return_freed_memory()


def _check_unused(model: LoadableModel) -> None:
    if model.stage is not None:
        raise _busy(model, "is loading", "be unloaded")
    if model.served is not None and not model.is_idle:
        raise _busy(model, "is pinned" if model.pinned else f"is busy with {len(model.leases)} requests", "be unloaded")


def _busy(model: LoadableModel, reason: str, what: str) -> APIError:
    return APIError(409, f"model {model.name!r} {reason}: it cannot {what} now", param="model", code="model_busy")


def _asleep(model: LoadableModel) -> APIError:
    message = f"model {model.name!r} was put to sleep before the answer was complete; the next request wakes it up"
    return unavailable(message, code="model_asleep")


def _shutting_down() -> APIError:
    return unavailable("the server is shutting down", code="shutting_down")
