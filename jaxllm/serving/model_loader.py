"""Loads models when they are asked for, a few at a time, and unloads those that no request needs."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from jaxllm.config.values import format_bytes
from jaxllm.errors import EngineDeadError, JaxLLMError
from jaxllm.machine import return_freed_memory
from jaxllm.serving.http.api_error import APIError, unavailable
from jaxllm.serving.served_model import LoadableModel, ServedModel, Stage, shutting_down

logger = logging.getLogger(__name__)

AT_CAPACITY = "at_capacity"
FAILED = "model_failed"
WAITING = "Waiting for its turn"
LEASE_SECONDS = 0.02  # between two looks at models that must answer requests before they sleep or make room
POLL_SECONDS = 0.5  # between two looks for idle models


class ModelLoader:
    """At most `most` of `models`, and at most `memory` bytes of them, are loaded; one load or unload goes on at a time.

    Models have their turns in the order in which they were asked for. Those that must make room for the next one answer
    what they have begun, and later requests for them wait for another turn. For `min_seconds` after it was loaded a
    busy model makes room for none. An engine is planned before another is unloaded for it, so that none gives way to
    one that cannot start. All methods are called on the server's event loop, but for `drain`, which a signal handler
    may call. Limits that are None do not hold.
    """

    def __init__(self, models: Iterable[LoadableModel], most: int | None, memory: int | None, min_seconds: float):
        """`models` may come and go."""
        self._models = models
        self._most = math.inf if most is None else most
        self._memory = memory
        self._min_seconds = min_seconds
        self._changing = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jaxllm-load")
        """The same for all loads: what one thread has freed another of glibc's heaps would not use again."""
        self._turns: dict[LoadableModel, asyncio.Task[APIError | None]] = {}
        """The models that requests wait for, in order: not loaded, loading, or about to make room for others."""
        self._placed: LoadableModel | None = None  # the one that is loading, once there is room for it
        self._sweeper: asyncio.Task[None] | None = None
        self._draining = False

    async def load(self, model: LoadableModel, *, yields: bool = False) -> None:
        """Returns when a request may run on the model; one that `yields` waits for no busy model.

        Raises APIError 503: too many requests wait for the model, or it yields and others are busy; the load failed, or
        the server is stopping.
        """
        if self.may_run(model):
            return
        limit = model.config.max_num_waiting
        if sum(call.waits for call in model.calls) > max(limit, 1):
            raise _at_capacity(f"{limit} requests wait for {model.name} already, and max_num_waiting is {limit}")
        if yields and model not in self._turns and (busy := [*self._in_the_way(model), *self._turns]):
            names = ", ".join(one.name for one in dict.fromkeys(busy))
            raise _at_capacity(f"{names} must answer requests first, and {self._limit(model)}")
        if (error := await asyncio.shield(self.begin(model))) is not None:
            raise error

    def may_run(self, model: LoadableModel) -> bool:
        """True if the model is awake, and need not make room for another."""
        return model.is_awake and not self._makes_room(model)

    def begin(self, model: LoadableModel) -> asyncio.Task[APIError | None]:
        """Load a model in the background: a task of what kept it from loading. Raises as `load`."""
        task = self._turns.get(model)
        if task is None:
            if self._draining:
                raise shutting_down()
            self._check_pinned(model)
            if not model.is_awake:
                model.stage = Stage(WAITING)
            task = self._turns[model] = asyncio.create_task(self._take_turn(model), name=f"load {model.name}")
        return task

    async def unload(self, model: LoadableModel) -> None:
        """Shut a model's engine down, if it is loaded. Raises APIError 409 if it is loading, pinned or in use."""
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
                raise APIError(400, "only an engine in a process of its own (engine_process) can sleep")
            message = (
                f"model {model.name!r} was put to sleep before the answer was complete; the next request wakes it up"
            )
            with model.falling_asleep():
                while model.is_in_use:
                    if not wait:
                        for request in list(model.served.running):
                            request.abort(unavailable(message, code="model_asleep"))
                    await asyncio.sleep(LEASE_SECONDS)
                try:
                    await self._in_thread(partial(model.served.engine.sleep, level))
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
        for model in list(self._turns):
            model.give_up()

    async def close(self) -> None:
        """Wait until nothing is being loaded or unloaded any more."""
        self.drain()
        await asyncio.gather(*self._turns.values())
        async with self._changing:
            if self._sweeper is not None:
                self._sweeper.cancel()
        self._thread.shutdown(wait=False)

    async def _take_turn(self, model: LoadableModel) -> APIError | None:
        """Wait until requests for the model may run; they do by the time that this ends, or its error is theirs."""
        try:
            while not self.may_run(model):
                if self._draining:
                    return shutting_down()
                if self._next is model and not self._in_the_way(model):
                    await self._load(model)
                    break
                if model.stage is None and not model.is_awake:
                    model.stage = Stage(WAITING)
                await asyncio.sleep(LEASE_SECONDS)
            for call in model.calls:
                call.waits = False
        except APIError as error:
            return error
        except Exception as error:
            if self._draining:
                return shutting_down()
            logger.error("model %s: %s", model.name, error, exc_info=not isinstance(error, JaxLLMError))
            return unavailable(f"model {model.name!r} could not be loaded: {model.error}", code=FAILED)
        finally:
            model.stage = None
            del self._turns[model]
        return None

    async def _load(self, model: LoadableModel) -> None:
        async with self._changing:
            if self._draining:
                raise shutting_down()
            began = time.monotonic()
            model.stage = Stage("Starting the engine's process")
            try:
                await self._in_thread(partial(model.load, partial(self._make_room, model, asyncio.get_running_loop())))
            finally:
                self._placed = None
            assert model.served is not None
            model.served.draining = self._draining
        logger.info("model %s was loaded in %.1f s", model.name, time.monotonic() - began)

    def _make_room(self, model: LoadableModel, loop: asyncio.AbstractEventLoop, _: int | None) -> None:
        """In the thread that loads, when the model has been planned: unload what must go. Raises as `_take_place`."""
        evicted = asyncio.run_coroutine_threadsafe(self._take_place(model), loop).result()
        while evicted:
            _shut_down(evicted)

    async def _take_place(self, model: LoadableModel) -> list[ServedModel]:
        """The engines that must go for a model, once all have answered what they have begun. Raises APIError 503."""
        self._check_pinned(model)
        while self._in_the_way(model):
            await asyncio.sleep(LEASE_SECONDS)
            if self._draining:
                raise shutting_down()
        going, self._placed = self._going(model), model
        for one in going:
            logger.info("model %s is unloaded to make room for %s", one.name, model.name)
        return [one.detach() for one in going]

    @property
    def _next(self) -> LoadableModel | None:
        return next((one for one in self._turns if not one.is_awake and one is not self._placed), None)

    def _makes_room(self, model: LoadableModel) -> bool:
        if (following := self._next) is None:
            return False
        stays = model.is_in_use and time.monotonic() < model.loaded_at + self._min_seconds
        return not stays and model in self._going(following)

    def _in_the_way(self, model: LoadableModel) -> list[LoadableModel]:
        return [one for one in self._going(model) if one.is_in_use or one is self._placed]

    def _going(self, model: LoadableModel) -> list[LoadableModel]:
        """The models that must go for another: first unused ones, the longest unused, then the longest loaded."""
        others = self._others(model)
        may_go = [one for one in others if one is self._placed or (self._takes_room(one) and not one.pinned)]
        may_go.sort(
            key=lambda one: (one is self._placed, one.is_in_use, one.loaded_at if one.is_in_use else one.last_used)
        )
        going: list[LoadableModel] = []
        while may_go and not self._fits(model, [one for one in others if one not in going]):
            going.append(may_go.pop(0))
        return going

    def _others(self, model: LoadableModel) -> list[LoadableModel]:
        return [one for one in self._models if one is not model and (one.served is not None or one is self._placed)]

    def _fits(self, model: LoadableModel, others: Sequence[LoadableModel]) -> bool:
        if sum(one.served is None or one.is_awake for one in others) >= self._most:
            return False
        planned = model.planned_bytes or 0
        return self._memory is None or sum(one.held_bytes for one in others) + planned <= self._memory

    def _takes_room(self, model: LoadableModel) -> bool:
        """True if unloading the model makes room; asleep it may have given back everything."""
        return model.is_awake or (self._memory is not None and model.held_bytes > 0)

    def _check_pinned(self, model: LoadableModel) -> None:
        """Raises 503 where all others could go but those that stay, and there would still be no room."""
        pinned = [one for one in self._others(model) if one.pinned]
        if not self._fits(model, pinned):
            names = ", ".join(one.name for one in pinned)
            message = f"{names} stay loaded (pinned) and leave no room for {model.name}: {self._limit(model)}"
            raise unavailable(message, code=FAILED)

    def _limit(self, model: LoadableModel) -> str:
        if self._memory is None or model.planned_bytes is None:
            return f"max_loaded_models is {self._most}"
        return f"it takes {format_bytes(model.planned_bytes)}, and model_memory is {format_bytes(self._memory)}"

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
                    if model.is_idle and time.monotonic() - model.last_used >= model.keep_alive:
                        await self._unload(model)


def _shut_down(held: list[ServedModel]) -> None:
    """Stop the engine of the last one in the list, and forget it in this thread: freeing a tokenizer takes a while."""
    held.pop().engine.shutdown()
    return_freed_memory()


def _check_unused(model: LoadableModel) -> None:
    if model.stage is not None:
        raise _busy(model, "is loading", "be unloaded")
    if model.served is not None and not model.is_idle:
        raise _busy(model, "is pinned" if model.pinned else f"is busy with {len(model.calls)} requests", "be unloaded")


def _busy(model: LoadableModel, reason: str, what: str) -> APIError:
    return APIError(409, f"model {model.name!r} {reason}: it cannot {what} now", param="model", code="model_busy")


def _at_capacity(reason: str) -> APIError:
    return unavailable(f"at capacity: {reason}; retry later", code=AT_CAPACITY)
