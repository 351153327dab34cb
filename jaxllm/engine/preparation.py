"""What a single request waits for before it is scheduled: made ready on threads, while the loop goes on."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from jaxllm.engine.adapters.store import AdapterStore
from jaxllm.engine.device.keys import Key
from jaxllm.engine.jobs import Jobs
from jaxllm.engine.offload.prefix_digests import Digest
from jaxllm.engine.offload.tiers import PageTiers
from jaxllm.engine.page_pool import PrefixNode
from jaxllm.engine.request import Request

if TYPE_CHECKING:
    from jaxllm.engine.grammar import Constraint, Grammars

THREADS = 2
GRAMMAR_THREADS = 4


class Preparation:
    """Reads adapters, compiles executables that few requests need, fetches pages and builds grammars."""

    def __init__(
        self,
        compile_key: Callable[[Key], object],
        prefix_root: Callable[[Request], PrefixNode],
        adapters: AdapterStore | None = None,
        grammars: Grammars | None = None,
        tiers: PageTiers | None = None,
    ):
        self._compile = compile_key
        self._prefix_root = prefix_root
        self.on_ready: Callable[[], None] = lambda: None
        """Called on another thread when there is something for `take_ready`."""
        self._adapters = adapters
        self._grammars = grammars
        self._tiers = tiers
        self._jobs = Jobs("prepare", urgent_threads=THREADS)
        self._constraining = Jobs("constrain", urgent_threads=GRAMMAR_THREADS)
        """The same for requests with a grammar, which may take seconds: only others like them wait for those."""
        self._ready: queue.SimpleQueue[tuple[Request, Future[Constraint | None]]] = queue.SimpleQueue()

    @property
    def has_ready(self) -> bool:
        """Whether all is ready for some request, or has failed."""
        return not self._ready.empty()

    def begin(self, request: Request, missing: list[Key], *, reads_disk: bool) -> bool:
        """Make ready what the request waits for, the executables `missing` among it; False where it need not wait.

        Unless `reads_disk`, pages on disk are computed again.
        """
        on_disk: list[Digest] = []
        if self._tiers is not None:
            root, tokens = self._prefix_root(request), request.token_ids[: request.first_read]
            on_disk = self._tiers.on_disk(root, tokens) if reads_disk else []
            request.pull = self._tiers.pull(request.pages_at, root, tokens, on_disk)
        constrains = request.params.structured_outputs is not None
        waits = missing or on_disk or request.pull is not None or constrains
        if not waits and self._has_adapters(request):
            return False
        jobs = self._constraining if constrains else self._jobs
        if request.pull is not None:
            jobs = request.pull.jobs
        job = jobs.submit(lambda: self._prepare(request, missing, on_disk))
        job.add_done_callback(lambda ended: self._note(request, ended))
        return True

    def take_ready(self) -> Iterator[tuple[Request, Future[Constraint | None]]]:
        """Requests that wait for nothing more, with the constraint of each, or the error that it ends with."""
        while self.has_ready:
            yield self._ready.get()

    def close(self) -> None:
        """Make nothing more ready, and cancel what has begun. Any thread may call this."""
        self._jobs.close()
        self._constraining.close()

    def _has_adapters(self, request: Request) -> bool:
        """Whether its adapters have been read, which it is given then."""
        if request.adapters:
            assert self._adapters is not None
            known = [self._adapters.known(use) for use in request.adapters]
            request.adapter_rows = tuple(rows for rows in known if rows is not None)
        return len(request.adapter_rows) == len(request.adapters)

    def _prepare(self, request: Request, missing: list[Key], on_disk: list[Digest]) -> Constraint | None:
        if self._adapters is not None:
            request.adapter_rows = tuple(self._adapters.read(use) for use in request.adapters)
        for key in missing:
            self._compile(key)
        if on_disk:
            assert self._tiers is not None
            self._tiers.read(on_disk)
        if request.pull is not None:
            request.pull.run()
        outputs = request.params.structured_outputs
        if outputs is None:
            return None
        assert self._grammars is not None, "the front door refuses a grammar where there is no tokenizer"
        return self._grammars.build(outputs)

    def _note(self, request: Request, ended: Future[Constraint | None]) -> None:
        self._ready.put((request, ended))
        self.on_ready()
