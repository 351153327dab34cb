"""Stored objects that have been kept for long enough are deleted while the server runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from sqlalchemy.exc import SQLAlchemyError

from jaxllm.errors import StorageFullError
from jaxllm.serving.store.database import Database

logger = logging.getLogger(__name__)

LOOK_SECONDS = 600.0
"""How often it is looked for what is old."""
AT_ONCE = 100
"""Objects that one transaction deletes, and for which others who write may have to wait."""
PAUSE_SECONDS = 0.05
"""Between two transactions, for those others."""

DeleteBefore = Callable[[int, int], Awaitable[int]]
"""Deletes objects of one kind that are older than a time, at most so many; how many there were."""


async def delete_old(deleters: Mapping[str, DeleteBefore], time_of: int) -> dict[str, int]:
    """Delete all that is older than a time in seconds since 1970; how many of each kind there were."""
    deleted = dict.fromkeys(deleters, 0)
    for kind, delete_before in deleters.items():
        while count := await delete_before(time_of, AT_ONCE):
            deleted[kind] += count
            await asyncio.sleep(PAUSE_SECONDS)
    return deleted


class Retention:
    """Deletes what is older than `seconds`, from `start` to `close`; nothing where that is None."""

    def __init__(self, database: Database, deleters: Mapping[str, DeleteBefore], seconds: float | None):
        self._database = database
        self._deleters = deleters
        self._seconds = seconds
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._seconds is not None:
            self._task = asyncio.create_task(self._run(self._seconds), name="delete old objects")

    async def close(self) -> None:
        """A transaction under way is rolled back."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self, seconds: float) -> None:
        while True:
            if self._database.exists:
                await self._look(int(time.time() - seconds))
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self, time_of: int) -> None:
        try:
            deleted = await delete_old(self._deleters, time_of)
        except (SQLAlchemyError, OSError, StorageFullError):
            logger.exception("old objects could not be deleted; the next attempt is in %g seconds", LOOK_SECONDS)
            return
        if any(deleted.values()):
            logger.info("deleted as too old: %s", ", ".join(f"{count} {kind}" for kind, count in deleted.items()))
