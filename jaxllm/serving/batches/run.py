"""One batch on its way from validating to its end."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI
from filelock import Timeout

from jaxllm.errors import StorageFullError
from jaxllm.folders import in_home
from jaxllm.serving.access.keys import Tenant
from jaxllm.serving.batches import caller
from jaxllm.serving.batches.journal import Journal, Tally
from jaxllm.serving.batches.stores import CANCELLABLE, UNFINISHED, BatchRow, BatchStore, FileRow, FileStore, files_of
from jaxllm.serving.batches.types import BatchError, BatchRequest, LineError, LineResult
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.served_model import LoadableModel
from jaxllm.serving.state import ServerState
from jaxllm.serving.store.database import Database

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.5
"""The time between two looks at cancelling and expiry; results go to disk then, and counts to the database."""
ROOM_SECONDS = 5.0
"""The time for which a batch waits that finds the disk full."""
LINES_READ_AT_ONCE = 64
POLL_SECONDS = 0.5

EXPIRED = LineError("batch_expired", "This request could not be executed before the completion window expired.")
FAILED = LineError("server_error", "the server failed to run this request; its log has details")
MAX_CRASHES = 2
CRASHED = LineError("server_crashed", "the server or its engine crashed twice while it ran this request")


T = TypeVar("T")


class Suspended(Exception):
    """The server is stopping, or engines of `models` died. The batch goes on from its journal once they are back."""

    def __init__(self, models: Collection[LoadableModel] = ()):
        super().__init__(", ".join(model.name for model in models))
        self.models = models


class BatchRun:
    """Runs a batch whose journal's lock is held. Never cancelled: `closing` makes it stop by itself, within a tick."""

    def __init__(self, batches: Batches, batch_id: str):
        self._id = batch_id
        self._of = batches
        self._batches = batches.store
        self._journal = batches.journal(batch_id)
        self._tally = Tally()
        self._done: set[str] = set()
        self._crashes: Counter[str] = Counter()
        self._started: dict[str, LoadableModel] = {}
        """The lines of this run that have begun, by custom_id."""
        self._dead: set[LoadableModel] = set()
        """Models whose engines died under this run."""
        self._results: list[LineResult] = []
        self._recording = asyncio.Lock()
        self._waits_for_room = False

    async def run(self) -> None:
        """From wherever the batch stands to its end. Raises Suspended."""
        batch = await self._batches.row(self._id)
        if batch.status not in UNFINISHED:
            return
        try:
            await self._advance(batch)
        except Suspended:
            raise
        except Exception as error:
            logger.exception("batch %s failed", self._id)
            problem = BatchError(code="server_error", message=f"the server failed to run this batch: {error}")
            await self._end("failed", errors=[problem])

    async def _advance(self, batch: BatchRow) -> None:
        if batch.status == "validating":
            batch = await self._with_room(lambda: self._validate(batch))
            if batch.status == "failed":
                return
        progress = await asyncio.to_thread(self._journal.recover)
        self._done, self._tally, self._crashes = progress.done, progress.tally, progress.crashes
        if batch.status == "in_progress":
            logger.info("batch %s: %d of %d lines are done", self._id, len(self._done), batch.total)
            batch = await self._run_lines(batch)
        if batch.status == "cancelling":
            await self._end("cancelled")
        else:
            await self._end("completed" if batch.expired_at is None else "expired")

    async def _validate(self, batch: BatchRow) -> BatchRow:
        report = await asyncio.to_thread(caller.check_input, self._journal.input, batch.endpoint)
        status = "failed" if report.errors else "in_progress"
        values: dict[str, Any] = {"status": status, f"{status}_at": int(time.time()), "model": report.model}
        values |= {"errors": msgspec.to_builtins(report.errors)} if report.errors else {"total": report.total}
        return await self._batches.change(self._id, ("validating",), **values)

    async def _run_lines(self, batch: BatchRow) -> BatchRow:
        """Run what is not done. Returns the batch in finalizing, or in cancelling. Raises Suspended."""
        feeding = asyncio.create_task(self._feed(batch))
        closing = asyncio.create_task(self._of.closing.wait())
        try:
            while not feeding.done() and batch.status == "in_progress" and time.time() < batch.expires_at:
                await asyncio.wait({feeding, closing}, timeout=TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if self._of.closing.is_set() or self._of.draining:
                    raise Suspended
                batch = await self._record()
            finished = feeding.done()
            if finished:
                self._check(feeding)
        finally:
            feeding.cancel()
            closing.cancel()
            await asyncio.gather(feeding, closing, return_exceptions=True)
            batch = await self._record()
            if blameless := self._blameless():
                await self._with_room(lambda: asyncio.to_thread(self._journal.release, blameless))
        if batch.status == "cancelling":
            return batch
        now = int(time.time())
        if not finished:
            await self._expire_the_rest(batch)
        values = {"status": "finalizing", "finalizing_at": now, "expired_at": None if finished else now}
        return await self._with_room(lambda: self._batches.change(self._id, ("in_progress",), **values))

    async def _feed(self, batch: BatchRow) -> None:
        chunks = caller.read_lines(self._journal.input, batch.endpoint, self._done.copy(), LINES_READ_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            while (lines := await asyncio.to_thread(next, chunks, None)) is not None:
                for line in lines:
                    crashes = self._crashes[line.custom_id]
                    if crashes >= MAX_CRASHES:
                        self._results.append(caller.line_result(line, error=CRASHED))
                        continue
                    # what was running at a crash runs alone, so that the next crash meets the one that is to blame
                    wanted = caller.ALL_PLACES if crashes else line.num_sequences(batch.endpoint)
                    places = self._of.caller.places(line)
                    await places.take(wanted)
                    task = group.create_task(self._run_line(batch, line))
                    task.add_done_callback(partial(_give_back, places, wanted))

    async def _run_line(self, batch: BatchRow, line: caller.Line) -> None:
        model = self._started[line.custom_id] = self._of.caller.model_of(line)
        await self._with_room(lambda: _to_its_end(self._journal.start, line.custom_id))
        try:
            result = await self._with_room(lambda: self._of.caller.call(batch.endpoint, line, batch.owner))
        except (caller.Unavailable, Suspended):
            raise
        except Exception:
            logger.exception("batch %s, line %r", self._id, line.custom_id)
            result = caller.line_result(line, error=FAILED)
        if model.is_dead or self._of.draining:  # the answer may be one that was cut short
            raise caller.Unavailable(model)
        self._results.append(result)
        if self._crashes[line.custom_id]:  # on disk before anything else runs that may crash
            await asyncio.shield(self._record())

    def _check(self, feeding: asyncio.Task[None]) -> None:
        error = feeding.exception()
        if isinstance(error, ExceptionGroup):
            self._dead = {one.model for one in error.exceptions if isinstance(one, caller.Unavailable)}
            if self._dead:
                raise Suspended(self._dead)
        feeding.result()

    def _blameless(self) -> set[str]:
        """Lines without a result that no crash has stopped: the server is stopping, or another model's engine died."""
        stopping = self._of.closing.is_set() or self._of.draining
        unfinished = {name: model for name, model in self._started.items() if name not in self._done}
        return {name for name, model in unfinished.items() if stopping or not (model in self._dead or model.is_dead)}

    async def _expire_the_rest(self, batch: BatchRow) -> None:
        chunks = caller.read_lines(self._journal.input, batch.endpoint, self._done.copy(), LINES_READ_AT_ONCE)
        while (lines := await asyncio.to_thread(next, chunks, None)) is not None:
            self._results += [caller.line_result(line, error=EXPIRED) for line in lines]
            await self._record()

    async def _record(self) -> BatchRow:
        async with self._recording:
            results, self._results = self._results, []
            if not results:
                return await self._batches.row(self._id)
            await self._with_room(lambda: asyncio.to_thread(self._journal.append, results))
            for result in results:
                self._done.add(result.custom_id)
                self._tally.add(result)
            return await self._with_room(lambda: self._batches.change(self._id, **dataclasses.asdict(self._tally)))

    async def _with_room(self, write: Callable[[], Awaitable[T]]) -> T:
        """The result of `write`, called again until the disk has room. Raises Suspended when the server stops first."""
        while True:
            try:
                written = await write()
            except StorageFullError as error:
                if not self._waits_for_room:
                    logger.error("batch %s waits: %s. It tries again every %g s", self._id, error, ROOM_SECONDS)
                self._waits_for_room = True
            else:
                if self._waits_for_room:
                    logger.info("batch %s goes on", self._id)
                self._waits_for_room = False
                return written
            with suppress(TimeoutError):
                async with asyncio.timeout(ROOM_SECONDS):
                    await self._of.closing.wait()
                raise Suspended

    async def _end(self, status: str, errors: list[BatchError] | None = None) -> None:
        await self._with_room(lambda: self._try_to_end(status, errors))

    async def _try_to_end(self, status: str, errors: list[BatchError] | None) -> None:
        """Make files of the results and close the batch in one transaction, so that it may be tried again."""
        batch = await self._batches.row(self._id)
        files: dict[str, FileRow] = {}
        for column, path in (("output_file_id", self._journal.output), ("error_file_id", self._journal.errors)):
            if path.exists():
                files[column] = await self._of.files.adopt(batch, path)
        values = dataclasses.asdict(self._tally) | {column: row.id for column, row in files.items()}
        if errors is not None:
            values["errors"] = msgspec.to_builtins(errors)
        async with self._of.database.transaction() as session:
            session.add_all(files.values())
            values[f"{status}_at"] = int(time.time())
            batch = await self._batches.change_in(session, self._id, status=status, **values)
        logger.info("batch %s %s: %d of %d lines failed", self._id, status, batch.failed, batch.total)


def _give_back(places: caller.Places, count: int, _: asyncio.Task[None]) -> None:
    places.give(count)


async def _to_its_end(write: Callable[[str], None], custom_id: str) -> None:
    """Call `write` in a thread. A task that is cancelled meanwhile ends only after it: what comes next may undo it."""
    writing = asyncio.create_task(asyncio.to_thread(write, custom_id))
    try:
        await asyncio.shield(writing)
    finally:
        await writing


class Batches:
    """A task for each batch under way; `files` and `store` are for the routes too."""

    def __init__(self, app: FastAPI, state: ServerState, database: Database):
        self._state = state
        self.files = FileStore(database, files_of(state.config.data_dir))
        self.store = BatchStore(database)
        self.database = database
        self.caller = caller.Caller(app, state)
        self.closing = asyncio.Event()
        self._directory = in_home(state.config.data_dir) / "batches"
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def draining(self) -> bool:
        return self._state.registry.draining

    def journal(self, batch_id: str) -> Journal:
        return Journal(self._directory / batch_id)

    async def resume(self) -> None:
        """Go on with the unfinished batches of this directory that were made for a model served here."""
        if not self.database.exists:
            return
        await self.files.delete_expired()
        for batch in await self.store.unfinished():
            if not self.journal(batch.id).exists:
                continue  # another server's, which shares the database but not the directory
            settled = batch.status == "cancelling" or batch.expires_at <= time.time()
            if self._state.registry.serves(batch.served_model) or settled:
                self._start(batch.id)
            else:
                logger.warning("batch %s waits for a server of %r", batch.id, batch.served_model)

    async def create(self, request: BatchRequest, tenant: Tenant) -> BatchRow:
        """A batch that runs in the tenant's name. Raises APIError for a wrong input file, and StorageFullError."""
        self._state.check_accepting()
        try:
            file, path = await self.files.located(request.input_file_id, tenant.name)
        except APIError as error:
            raise APIError(400, str(error), param="input_file_id", code="invalid_input_file") from None
        if file.purpose != "batch":
            message = f"input_file_id is {file.id!r}, uploaded with purpose {file.purpose!r}; it must be 'batch'"
            raise APIError(400, message, param="input_file_id", code="invalid_input_file")
        batch_id = f"batch_{uuid.uuid4().hex}"
        journal = self.journal(batch_id)
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
        if self.journal(batch_id).exists:
            self._start(batch_id)
        return batch

    async def close(self) -> None:
        """Stop every batch where it is; what is unfinished is resumed at the next start."""
        self.closing.set()
        await asyncio.gather(*self._tasks.values())

    def _start(self, batch_id: str) -> None:
        if batch_id not in self._tasks and not self.closing.is_set():
            task = asyncio.create_task(self._run(batch_id), name=batch_id)
            self._tasks[batch_id] = task
            task.add_done_callback(lambda _: self._tasks.pop(batch_id))

    async def _run(self, batch_id: str) -> None:
        while (suspended := await self._advance(batch_id)) is not None:
            while any(model.is_dead for model in suspended.models) and not self.closing.is_set():
                await asyncio.sleep(POLL_SECONDS)
            if self.closing.is_set() or self.draining:
                logger.info("batch %s is suspended until the server starts again", batch_id)
                return

    async def _advance(self, batch_id: str) -> Suspended | None:
        journal = self.journal(batch_id)
        run = BatchRun(self, batch_id)
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
