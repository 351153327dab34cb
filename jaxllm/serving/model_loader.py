"""Loads models when they are asked for, a few at a time, and unloads those that no request needs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from jaxllm.errors import JaxLLMError
from jaxllm.machine import return_freed_memory
from jaxllm.serving.http.api_error import APIError, unavailable
from jaxllm.serving.loadable import LoadableModel, Stage
from jaxllm.serving.served_model import ServedModel

logger = logging.getLogger(__name__)

AT_CAPACITY = "at_capacity"
FAILED = "model_failed"
POLL_SECONDS = 0.5
"""How often idle models are looked for."""


class ModelLoader:
    """At most `most` of `models` are loaded at a time; one load or unload goes on at a time.

    Everything is called on the server's event loop, but for `drain`, which a signal handler may call.
    """

    def __init__(self, models: Sequence[LoadableModel], most: int):
        self._models = models
        self._most = most
        self._changing = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jaxllm-load")
        """The same for all loads: what one thread has freed another of glibc's heaps would not use again."""
        self._loads: dict[LoadableModel, asyncio.Task[APIError | None]] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self._draining = False

    async def load(self, model: LoadableModel) -> None:
        """Returns when the model is loaded; all who ask meanwhile wait for one load, which goes on without them.

        Raises APIError 503: all models that may be loaded at once are busy, the load failed, or the server is stopping.
        """
        if model.served is None and (error := await asyncio.shield(self.begin(model))) is not None:
            raise error

    def begin(self, model: LoadableModel) -> asyncio.Task[APIError | None]:
        """Load a model in the background: a task of what kept it from loading. Raises as `load`."""
        task = self._loads.get(model)
        if task is None:
            if self._draining:
                raise _shutting_down()
            self._check_room(model)
            model.stage = Stage("Waiting for another model to be unloaded or loaded")
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

    def start(self) -> None:
        """Look for idle models from now on, where any has a ttl."""
        if any(model.ttl is not None for model in self._models):
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
                await self._make_room(model)
                if self._draining:
                    return _shutting_down()
                await self._in_thread(model.load)
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

    async def _make_room(self, model: LoadableModel) -> None:
        """Raises APIError 503 where no model can be unloaded for it."""
        self._check_room(model)
        while sum(other.served is not None for other in self._models) >= self._most:
            await self._unload(min((other for other in self._models if other.is_idle), key=lambda one: one.last_used))

    def _check_room(self, model: LoadableModel) -> None:
        taken = [one for one in self._models if one.served is not None or one in self._loads]
        busy = [one.name for one in taken if one is not model and not one.is_idle]
        if len(busy) >= self._most:
            message = (
                f"at capacity: {', '.join(busy)} must answer requests first, and max_loaded_models is {self._most}; "
                "retry later"
            )
            raise unavailable(message, code=AT_CAPACITY)

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
                    if model.is_idle and model.ttl is not None and time.monotonic() - model.last_used >= model.ttl:
                        await self._unload(model)


def _shut_down(held: list[ServedModel]) -> None:
    """Stop the engine of the one model in the list, and forget it in this thread: freeing a tokenizer takes a while."""
    held.pop().engine.shutdown()
    return_freed_memory()


def _check_unused(model: LoadableModel) -> None:
    reason = None
    if model.stage is not None:
        reason = "is loading"
    elif model.served is not None and not model.is_idle:
        reason = "is pinned" if model.pinned else f"is busy with {len(model.leases)} requests"
    if reason is not None:
        raise APIError(
            409, f"model {model.name!r} {reason}: it cannot be unloaded now", param="model", code="model_busy"
        )


def _shutting_down() -> APIError:
    return unavailable("the server is shutting down", code="shutting_down")
