"""A front door's hold on an engine loop that runs in a thread of the same process."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING

from jaxllm.engine.front.messages import EngineClient, EngineInfo, EngineRequest, EngineStats, TokenDelta
from jaxllm.errors import EngineDeadError

if TYPE_CHECKING:
    from jaxllm.engine.core import EngineCore

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.5
"""How often a loop with nothing to do looks whether it should stop."""


class Inbox:
    """What front doors say to the loop: requests to add, ids to abort."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[EngineRequest | list[str] | Exception | None] = queue.SimpleQueue()

    def put(self, item: EngineRequest | list[str] | Exception | None) -> None:
        """A request, ids to abort, None to wake the loop, or what is to end it."""
        self._items.put(item)

    def drain(self, core: EngineCore, wait: bool) -> None:
        """Hand everything to `core`; with `wait`, block a moment for the first. Raises what is to end the loop."""
        try:
            item = self._items.get(block=wait, timeout=IDLE_SECONDS if wait else None)
            while True:
                if isinstance(item, EngineRequest):
                    core.add(item)
                elif isinstance(item, Exception):
                    raise item
                elif item is not None:
                    core.abort(item)
                item = self._items.get_nowait()
        except queue.Empty:
            return


class ThreadClient:
    """The engine loop in a daemon thread."""

    def __init__(self, core: EngineCore, info: EngineInfo):
        self.info = info
        self._core = core
        self._inbox = Inbox()
        core.on_prepared = lambda: self._inbox.put(None)
        self._outbox: queue.SimpleQueue[list[TokenDelta] | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._dead: str | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def add(self, request: EngineRequest) -> None:
        self._check_alive()
        self._inbox.put(request)

    def abort(self, request_ids: list[str]) -> None:
        self._inbox.put(request_ids)

    def outputs(self, timeout: float | None = None) -> list[TokenDelta]:
        try:
            deltas = self._outbox.get(timeout=timeout)
        except queue.Empty:
            return []
        if deltas is None:
            self._outbox.put(None)  # every later caller learns it too
            self._check_alive()
            return []
        return deltas

    def stats(self) -> EngineStats:
        return self._core.stats()

    def shutdown(self) -> None:
        self._dead = self._dead or "the engine was shut down"
        self._stopping.set()
        self._inbox.put(None)
        if self._thread is not threading.current_thread():  # whose garbage collection may have led here
            self._thread.join()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._inbox.drain(self._core, wait=not self._core.has_work)
                if self._core.has_work:
                    deltas = self._core.turn()
                    if deltas:
                        self._outbox.put(deltas)
        except Exception as error:
            logger.exception("the engine loop died")
            self._dead = f"the engine loop died: {type(error).__name__}: {error}"
        finally:
            self._core.close()
            self._outbox.put(None)


__all__ = ["EngineClient", "Inbox", "ThreadClient"]
