"""Runs the batches of a server in the background, and goes on with them after a restart."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection

from fastapi import FastAPI
from filelock import Timeout

from jaxllm.folders import in_home
from jaxllm.serving.access.keys import Tenant
from jaxllm.serving.batches.caller import Caller
from jaxllm.serving.batches.run import BatchRun, Stores, Suspended
from jaxllm.serving.batches.stores import CANCELLABLE, BatchRow, BatchStore, FileStore, files_of, new_batch_id
from jaxllm.serving.batches.types import BatchRequest
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.served_model import LoadableModel
from jaxllm.serving.state import ServerState
from jaxllm.serving.store.database import Database

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5


class Batches:
    """A task for each batch under way; `files` and `store` are for the routes too."""

    def __init__(self, app: FastAPI, state: ServerState, database: Database):
        self._state = state
        directory = in_home(state.config.data_dir)
        self.files = FileStore(database, files_of(state.config.data_dir))
        self.store = BatchStore(database)
        self._stores = Stores(database, self.store, self.files, directory / "batches")
        self._caller = Caller(app, state)
        self._closing = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def resume(self) -> None:
        """Go on with the unfinished batches of this directory that were made for a model served here."""
        if not self._stores.database.exists:
            return
        await self.files.delete_expired()
        for batch in await self.store.unfinished():
            if not self._stores.journal(batch.id).exists:
                continue  # another server's, which shares the database but not the directory
            settled = batch.status == "cancelling" or batch.expires_at <= time.time()
            if self._state.registry.serves(batch.served_model) or settled:
                self._start(batch.id)
            else:
                logger.warning("batch %s waits for a server of %r", batch.id, batch.served_model)

    async def create(self, request: BatchRequest, tenant: Tenant) -> BatchRow:
        """Its lines run in the tenant's name.

        Raises APIError when the input file is missing or was uploaded for something else, and StorageFullError.
        """
        self._state.check_accepting()
        try:
            file = await self.files.get(request.input_file_id, tenant.name)
            path = await self.files.path(request.input_file_id, tenant.name)
        except APIError as error:
            raise APIError(400, str(error), param="input_file_id", code="invalid_input_file") from None
        if file.purpose != "batch":
            message = f"input_file_id is {file.id!r}, uploaded with purpose {file.purpose!r}; it must be 'batch'"
            raise APIError(400, message, param="input_file_id", code="invalid_input_file")
        batch_id = new_batch_id()
        journal = self._stores.journal(batch_id)
        try:
            await asyncio.to_thread(journal.begin, path)
            batch = await self.store.add(batch_id, request, self._state.registry.default_name, tenant.name)
        except Exception:
            await asyncio.to_thread(journal.remove)
            raise
        self._start(batch.id)
        return batch

    async def cancel(self, batch_id: str, owner: str | None) -> BatchRow:
        """Running lines stop soon after; those already answered stay in the output. Raises 404, or 400 when ended."""
        await self.store.get(batch_id, owner)
        batch = await self.store.change(batch_id, CANCELLABLE, status="cancelling", cancelling_at=int(time.time()))
        if batch.status not in ("cancelling", "cancelled"):
            message = f"the batch cannot be cancelled: its status is {batch.status!r}"
            raise APIError(400, message, code="not_cancellable")
        if self._stores.journal(batch_id).exists:
            self._start(batch_id)
        return batch

    async def close(self) -> None:
        """Stop every batch where it is; what is unfinished is resumed at the next start."""
        self._closing.set()
        await asyncio.gather(*self._tasks.values())

    def _start(self, batch_id: str) -> None:
        if batch_id not in self._tasks and not self._closing.is_set():
            task = asyncio.create_task(self._run(batch_id), name=batch_id)
            self._tasks[batch_id] = task
            task.add_done_callback(lambda _: self._tasks.pop(batch_id))

    async def _run(self, batch_id: str) -> None:
        while (suspended := await self._advance(batch_id)) is not None:
            if not await self._return(suspended.models):
                logger.info("batch %s is suspended until the server starts again", batch_id)
                return

    async def _return(self, models: Collection[LoadableModel]) -> bool:
        """Wait for engines that died to be started again; False when the server ends instead."""
        while any(model.is_dead for model in models) and not self._closing.is_set():
            await asyncio.sleep(POLL_SECONDS)
        return not (self._closing.is_set() or self._state.registry.draining)

    async def _advance(self, batch_id: str) -> Suspended | None:
        """Run a batch; what it raised when it had to stop before its end and may go on."""
        journal = self._stores.journal(batch_id)
        run = BatchRun(batch_id, self._stores, self._caller, self._closing, self._draining)
        try:
            with journal.lock():
                await run.run()
        except Timeout:
            logger.info("batch %s runs in another server", batch_id)
        except Suspended as suspended:
            return suspended
        except Exception:
            logger.exception("batch %s is left as it is until the server starts again", batch_id)
        else:
            await asyncio.to_thread(journal.remove)
        return None

    def _draining(self) -> bool:
        return self._state.registry.draining
