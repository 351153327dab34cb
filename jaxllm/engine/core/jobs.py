"""Work beside the loop, on threads: compiling, and what a single request waits for before it is scheduled."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from functools import partial
from typing import Generic, TypeVar

from jaxllm import compat
from jaxllm.engine.core.feature import Errand, Feature
from jaxllm.engine.core.keys import Key
from jaxllm.engine.core.registry import Features
from jaxllm.engine.core.request import Request
from jaxllm.threads import start_thread

T = TypeVar("T")

BACKGROUND_NICENESS = 5
"""The niceness, above the engine's own, of work that no request waits for. On a core that something else keeps busy
Linux gives it a quarter of the time (at 10 a tenth, at 19 a hundredth), so that it ends on a busy machine too."""

_open: weakref.WeakSet[Jobs] = weakref.WeakSet()


class Job(Future, Generic[T]):
    """A call to come, and its result."""

    def __init__(self, function: Callable[[], T], urgent: bool):
        super().__init__()
        self.function: Callable[[], T] | None = function
        self.urgent = urgent
        self.background_thread: int | None = None
        """The thread that runs it, if it is one of low priority."""


class Jobs:
    """Runs jobs on threads of its own, which live from the first one until `close`.

    Urgent jobs have threads to themselves. The others run at low priority, and none of them begins while an urgent job
    waits or runs.
    """

    def __init__(self, name: str, *, urgent_threads: int, background_threads: int = 0):
        self._niceness = os.getpriority(os.PRIO_PROCESS, 0) if sys.platform == "linux" else 0
        """The niceness of the thread which makes this; Linux counts it per thread."""
        self._changed = threading.Condition()
        self._waiting: list[Job] = []
        self._running: set[Job] = set()
        self.closed = False
        self._to_start: list[tuple[str, Callable[[], None]]] = [
            *((f"{name}-{number}", partial(self._work, self._next_urgent)) for number in range(urgent_threads)),
            *((f"{name}-behind-{number}", self._work_behind) for number in range(background_threads)),
        ]
        _open.add(self)

    def submit(self, function: Callable[[], T], *, urgent: bool = True) -> Job[T]:
        """Have `function` called; its job is cancelled where `close` comes first."""
        job: Job[T] = Job(function, urgent)
        with self._changed:
            if self.closed:
                job.cancel()
            else:
                self._waiting.append(job)
                self._changed.notify_all()
                while self._to_start:
                    start_thread(*self._to_start.pop())
        return job

    def hurry(self, job: Job) -> None:
        """Somebody waits for `job`: it is urgent from now on."""
        with self._changed:
            job.urgent = True
            if job.background_thread is not None:
                set_niceness(job.background_thread, self._niceness)
            self._changed.notify_all()

    def close(self) -> None:
        """Cancel every job, at once: running jobs run on, and their results are dropped."""
        with self._changed:
            self.closed = True
            dropped = [*self._waiting, *self._running]
            self._waiting.clear()
            self._changed.notify_all()
        for job in dropped:
            if not job.cancel():
                with contextlib.suppress(InvalidStateError):  # it ended meanwhile
                    job.set_exception(CancelledError("the engine was shut down"))

    def _next_urgent(self) -> Job | None:
        return next((job for job in self._waiting if job.urgent), None)

    def _next_behind(self) -> Job | None:
        if any(job.urgent for job in (*self._waiting, *self._running)):
            return None
        job = next(iter(self._waiting), None)
        if job is not None:
            job.background_thread = threading.get_native_id()
        return job

    def _work_behind(self) -> None:
        self._lower_priority()
        self._work(self._next_behind)

    def _lower_priority(self) -> None:
        set_niceness(threading.get_native_id(), self._niceness + BACKGROUND_NICENESS)

    @compat.under_own_settings
    def _work(self, choose: Callable[[], Job | None]) -> None:
        while (job := self._take(choose)) is not None:
            _run(job)
            with self._changed:
                self._running.discard(job)
                if job.background_thread is not None:
                    job.background_thread = None
                    self._lower_priority()  # it was raised if somebody came to wait for the job
                self._changed.notify_all()
            del job  # and its result with it, which would live until the next one comes

    def _take(self, choose: Callable[[], Job | None]) -> Job | None:
        with self._changed:
            while not self.closed:
                job = choose()
                if job is None:
                    self._changed.wait()
                    continue
                self._waiting.remove(job)
                if job.set_running_or_notify_cancel():
                    self._running.add(job)
                    return job
        return None


@atexit.register
def _close_all() -> None:
    """Threads without work would keep alive a program whose engine was never shut down."""
    for jobs in list(_open):
        jobs.close()


def set_niceness(thread: int, niceness: int) -> None:
    """Set the niceness of one thread, if the system can tell threads apart (Linux)."""
    if sys.platform == "linux":
        with contextlib.suppress(PermissionError, ProcessLookupError):  # root alone may raise a priority; it has ended
            os.setpriority(os.PRIO_PROCESS, thread, niceness)


def _run(job: Job) -> None:
    function, job.function = job.function, None
    assert function is not None
    with contextlib.suppress(InvalidStateError):  # `close` cancelled it meanwhile
        try:
            result = function()
        except BaseException as error:  # the thread has other jobs to run
            job.set_exception(error)
        else:
            job.set_result(result)


THREADS = 2


class Preparation:
    """Compiles executables that few requests need, and does what features have to do first."""

    def __init__(self, compile_key: Callable[[Key], object], features: Features):
        self._compile = compile_key
        self.on_ready: Callable[[], None] = lambda: None
        """Called on another thread when there is something for `take_ready`."""
        self._features = features
        self._jobs = Jobs("prepare", urgent_threads=THREADS)
        self._ready: queue.SimpleQueue[tuple[Request, Future[None]]] = queue.SimpleQueue()

    @property
    def has_ready(self) -> bool:
        """Some request has all that it waited for, or has failed."""
        return not self._ready.empty()

    def begin(self, request: Request, missing: list[Key]) -> bool:
        """Make ready what the request waits for, the executables `missing` among it; False where it need not wait."""
        found = (f.job(request, extra) for f, extra in self._features.of(request, Feature.job))
        asked = [job for job in found if job is not None]
        if not missing and not asked:
            return False
        jobs = next((job.jobs for job in reversed(asked) if job.jobs is not None), self._jobs)
        begun = jobs.submit(lambda: self._prepare(missing, asked))
        begun.add_done_callback(lambda ended: self._note(request, ended))
        return True

    def take_ready(self) -> Iterator[tuple[Request, Future[None]]]:
        """Requests that wait for nothing more, each with the error that it ends with, if any."""
        while self.has_ready:
            yield self._ready.get()

    def close(self) -> None:
        """Make nothing more ready, and cancel what has begun. Any thread may call this."""
        self._jobs.close()

    def _prepare(self, missing: list[Key], asked: Sequence[Errand]) -> None:
        for key in missing:
            self._compile(key)
        for job in asked:
            job.run()

    def _note(self, request: Request, ended: Future[None]) -> None:
        self._ready.put((request, ended))
        self.on_ready()
