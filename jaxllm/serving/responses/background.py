"""Responses that run without anybody waiting for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress

from sqlalchemy.exc import SQLAlchemyError

from jaxllm.errors import StorageFullError
from jaxllm.serving.responses.objects import STOPPED, Response
from jaxllm.serving.responses.run import ResponseRun
from jaxllm.serving.responses.stores import LEASE_SECONDS, ResponseStore
from jaxllm.serving.served_model import stopped

logger = logging.getLogger(__name__)

STOPPING_SECONDS = 3.0
"""How long aborted runs get to be stored when the server stops."""


class BackgroundRun:
    """One response running as a task of its own; any number of streams may follow it."""

    def __init__(self, run: ResponseRun, stack: AsyncExitStack):
        self.run = run
        self._changed = asyncio.Event()
        self.task = asyncio.create_task(self._drive(stack))

    async def follow(self, starting_after: int, keep_alive: float) -> AsyncIterator[list[bytes]]:
        """The events after number `starting_after`, up to the last; an empty list after so many seconds of silence."""
        position = starting_after + 1
        while True:
            changed = self._changed
            events = self.run.sent[position:]
            if events:
                position += len(events)
                yield events
            elif self.task.done():
                return
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(keep_alive):
                        await changed.wait()
                        continue
                yield []

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})

    async def _drive(self, stack: AsyncExitStack) -> None:
        try:
            async with stack:
                async for _ in self.run.events():
                    self._tell()
        except Exception:
            logger.exception("%s could not be stored", self.run.response.id)
        finally:
            asyncio.get_running_loop().call_soon(self._tell)  # when this task is done

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class BackgroundRuns:
    """The responses that run in the background of this server, by their ids."""

    def __init__(self, store: ResponseStore):
        self._store = store
        self._active: dict[str, BackgroundRun] = {}
        self._renewing: asyncio.Task[None] | None = None

    async def start(self, run: ResponseRun) -> BackgroundRun:
        """Store the response and let it run. Raises what the engine says at once, such as QueueFullError."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(run.replies.call.again())
            await stack.enter_async_context(run)
            await run.begin_stored()
            active = BackgroundRun(run, stack.pop_all())
        response_id = run.response.id
        self._active[response_id] = active
        active.task.add_done_callback(lambda _: self._active.pop(response_id, None))
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew())
        return active

    def get(self, response_id: str, owner: str | None) -> BackgroundRun | None:
        """One that runs here and is the owner's."""
        active = self._active.get(response_id)
        return None if active is None or active.run.replies.call.tenant.name != owner else active

    async def cancel(self, response_id: str) -> Response:
        """Stop the response wherever it runs, whoever owns it. Raises 404 for an unknown id."""
        response = await self._store.end(response_id, "cancelled")
        await self._stop(response_id)
        return response

    async def delete(self, response_id: str, owner: str | None) -> None:
        """Stop and forget the response. Raises 404 for one that is not there, or not the owner's."""
        await self._store.delete(response_id, owner)
        await self._stop(response_id)

    async def close(self) -> None:
        """End every run as failed and wait until that is stored."""
        for active in self._active.values():
            active.run.abort(stopped())
        tasks = {active.task for active in self._active.values()}
        if tasks:
            await asyncio.wait(tasks, timeout=STOPPING_SECONDS)
        for response_id, active in list(self._active.items()):
            await active.stop()
            await self._store.end(response_id, "failed", STOPPED)
        if self._renewing is not None:
            self._renewing.cancel()

    async def _stop(self, response_id: str) -> None:
        active = self._active.get(response_id)
        if active is not None:
            await active.stop()

    async def _renew(self) -> None:
        """Say that the runs are alive, and stop those that another server was asked to cancel or delete."""
        while self._active:
            await asyncio.sleep(LEASE_SECONDS / 3)
            try:
                ended = await self._store.renew(list(self._active))
            except (SQLAlchemyError, StorageFullError):
                logger.exception("the leases of background responses could not be renewed")
                continue
            for response_id in ended:
                await self._stop(response_id)
