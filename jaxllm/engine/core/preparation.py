"""What a single request waits for before it is scheduled: made ready on threads, while the loop goes on."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from jaxllm.engine.core.feature import Errand, Feature
from jaxllm.engine.core.jobs import Jobs
from jaxllm.engine.core.keys import Key
from jaxllm.engine.core.registry import Features
from jaxllm.engine.core.request import Request

THREADS = 2


class Preparation:
    """Compiles executables that few requests need, and does what features have to do first."""

    def __init__(
        self,
        compile_key: Callable[[Key], object],
        features: Features,
    ):
        self._compile = compile_key
        self.on_ready: Callable[[], None] = lambda: None
        """Called on another thread when there is something for `take_ready`."""
        self._features = features
        self._jobs = Jobs("prepare", urgent_threads=THREADS)
        self._ready: queue.SimpleQueue[tuple[Request, Future[None]]] = queue.SimpleQueue()

    @property
    def has_ready(self) -> bool:
        """Whether all is ready for some request, or has failed."""
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
