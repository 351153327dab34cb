"""A front door's hold on an engine loop that runs in a thread of the same process."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from jaxllm.engine import messages
from jaxllm.errors import ConfigError, EngineDeadError
from jaxllm.threads import start_thread

if TYPE_CHECKING:
    from jaxllm.engine.scale.data_parallel import Core

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.5
"""Seconds after which a loop with nothing to do looks whether it should stop."""
END_SECONDS = 1.0
"""Seconds that a program's end, or that of the last reference, waits for the turn under way."""

T = TypeVar("T")


POLL_SECONDS = 0.01
"""Seconds after which an engine that is to pause is asked again whether something still runs."""

Ask = Callable[[Callable[["Core"], Any]], Any]
"""Has something done with a core between two turns of its loop, and gives what comes of it."""


class Question:
    """Something to do with a core between two turns, and a future of what comes of it."""

    def __init__(self, ask: Callable[[Core], Any]):
        self._ask = ask
        self.answer: Future[Any] = Future()

    def put_to(self, core: Core) -> None:
        """Its errors are raised to its asker, and in the loop only if the engine has died of them."""
        try:
            self.answer.set_result(self._ask(core))
        except EngineDeadError as error:
            self.answer.set_exception(error)
            raise
        except Exception as error:
            self.answer.set_exception(error)


def exchange_weights(source: messages.WeightSource, version: str, ask: Ask) -> None:
    """Read weights while the engine goes on, and exchange them between two steps; raises as `LLM.update_weights`."""
    new = ask(lambda core: core.weights).read(source)
    ask(lambda core: core.update_weights(new, version))


def carry_out(order: messages.Order, ask: Ask) -> None:
    """Returns when an order has been carried out. To be called on a thread that is not the loop's.

    Raises what keeps it from that.
    """
    match order:
        case messages.Pause(mode):
            ask(lambda core: core.pause(mode))
            while mode == "wait" and ask(lambda core: core.load[0]):
                time.sleep(POLL_SECONDS)
        case messages.Resume():
            ask(lambda core: core.resume())
        case messages.ResetPrefixCache():
            ask(lambda core: core.reset_prefix_cache())
        case messages.UpdateWeights(source, version):
            exchange_weights(source, version, ask)
        case messages.EndThinking(request_ids):
            ask(lambda core: core.hurry(request_ids))
        case messages.NameWeights(version):
            ask(lambda core: setattr(core, "weight_version", version))


InboxItem = messages.EngineRequest | list[str] | Question | Exception | None
"""A request, ids to abort, a question, what is to end the loop, or None to wake it."""


class Inbox:
    """The messages of front doors to the loop: requests to add, ids to abort, questions."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[InboxItem] = queue.SimpleQueue()

    def put(self, item: InboxItem) -> None:
        """The loop sees it between two turns."""
        self._items.put(item)

    def drain(self, core: Core, wait: bool) -> None:
        """Hand everything to `core`; with `wait`, block a moment for the first. Raises what is to end the loop."""
        try:
            item = self._items.get(block=wait, timeout=IDLE_SECONDS if wait else None)
            while True:
                if isinstance(item, messages.EngineRequest):
                    core.add(item)
                elif isinstance(item, Question):
                    item.put_to(core)
                elif isinstance(item, Exception):
                    raise item
                elif item is not None:
                    core.abort(item)
                item = self._items.get_nowait()
        except queue.Empty:
            return


class Loop:
    """Turns a core over in a thread of its own, which is all that holds the core: both go at `end`."""

    def __init__(self, core: Core):
        self.inbox = Inbox()
        self.outbox: queue.SimpleQueue[list[messages.TokenDelta] | None] = queue.SimpleQueue()
        self.dead: str | None = None
        """Why there will be no more turns."""
        self.last_turn = 0.0
        self._core: Core | None = core
        self._last_stats = messages.EngineStats()
        self._stopping = threading.Event()
        self._pid = os.getpid()
        core.when_prepared(functools.partial(self.inbox.put, None))
        atexit.register(self.end)
        self._thread = start_thread("engine", self._run)

    def stats(self) -> messages.EngineStats:
        """The newest statistics; the last ones, where the loop has ended."""
        core = self._core
        return self._last_stats if core is None else core.stats()

    def end(self, timeout: float | None = END_SECONDS) -> None:
        """Stop after the turn under way, waiting up to `timeout` seconds for it, and drop the core. Idempotent."""
        atexit.unregister(self.end)
        if os.getpid() != self._pid:
            return  # the thread is not in a process forked from its own, and locks may be held there for good
        self.dead = self.dead or "the engine was shut down"
        self._stopping.set()
        core = self._core
        if core is not None:
            core.close()  # a turn that waits for a compile ends with it
        del core
        self.inbox.put(None)
        if threading.current_thread() is not self._thread:  # garbage is collected on any thread
            self._thread.join(timeout)

    def _run(self) -> None:
        from jaxllm.compat import under_own_settings  # JAX comes with it, which a front door can do without

        try:
            under_own_settings(self._turn_over)()
        except Exception as error:
            if not self._stopping.is_set():
                logger.exception("the engine loop died")
                self.dead = f"the engine loop died: {type(error).__name__}: {error}; restart() starts it again"
        finally:
            self._drop_core()
            self.outbox.put(None)

    def _turn_over(self) -> None:
        core = self._core
        assert core is not None
        while not self._stopping.is_set():
            self.inbox.drain(core, wait=not core.has_work)
            if core.has_work:
                deltas = core.turn()
                self.last_turn = time.monotonic()
                if deltas:
                    self.outbox.put(deltas)

    def _drop_core(self) -> None:
        core, self._core = self._core, None
        assert core is not None
        self._last_stats = core.stats()
        core.close()


class ThreadClient:
    """The engine loop in a daemon thread. It ends with `shutdown`, or when its client is forgotten."""

    def __init__(self, core: Core, info: messages.EngineInfo):
        self.info = info
        self._loop = Loop(core)
        self._forgotten = weakref.finalize(self, self._loop.end)
        self._forgotten.atexit = False  # the loop sees to that

    @property
    def last_turn(self) -> float:
        return self._loop.last_turn

    def add(self, request: messages.EngineRequest) -> None:
        self._check_alive()
        self._loop.inbox.put(request)

    def abort(self, request_ids: list[str]) -> None:
        self._loop.inbox.put(request_ids)

    def outputs(self, timeout: float) -> list[messages.TokenDelta]:
        try:
            deltas = self._loop.outbox.get(timeout=timeout)
        except queue.Empty:
            return []
        if deltas is None:
            self._loop.outbox.put(None)  # every later caller learns it too
            self._check_alive()
            return []
        return deltas

    def stats(self) -> messages.EngineStats:
        return self._loop.stats()

    def has_begun(self, request_id: str) -> bool:
        return True  # unused: an engine in a thread is not started again by itself

    def ask(self, ask: Callable[[Core], T]) -> T:
        """The result of `ask` on the engine's core between two turns of the loop; no turn runs meanwhile.

        Raises:
            EngineDeadError: the loop has ended.
        """
        question = Question(ask)
        self._check_alive()
        self._loop.inbox.put(question)
        while True:
            try:
                return question.answer.result(timeout=IDLE_SECONDS)  # type: ignore[no-any-return]
            except TimeoutError:
                if question.answer.done():
                    raise  # it is the question's own
                self._check_alive()

    def order(self, order: messages.Order) -> None:
        carry_out(order, self.ask)

    @property
    def processes(self) -> dict[str, messages.LookAt]:
        return {}

    def keep_weights(self) -> None:
        raise ConfigError("engine_process is False: only an engine in a process of its own can sleep")

    def shutdown(self) -> None:
        self._loop.end(timeout=None)

    def _check_alive(self) -> None:
        if self._loop.dead is not None:
            raise EngineDeadError(self._loop.dead)
