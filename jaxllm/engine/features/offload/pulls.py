"""Pages that other servers of the model have computed, on their way to the host memory of this one."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from jaxllm.config.parts import KVTransferConfig
from jaxllm.engine.core.jobs import Jobs
from jaxllm.engine.features.offload.page_listener import (
    MOST_DIGESTS,
    AllGiven,
    FromGiver,
    NoPages,
    PageListener,
    PagesWanted,
    SomePages,
)
from jaxllm.engine.features.offload.pages import Digest, HostPages, Page
from jaxllm.engine.messages import PagesAt, TransferInfo
from jaxllm.errors import JaxLLMError, one_line, reason
from jaxllm.sharding.wire import Wire, WireError, interrupt, introduce

logger = logging.getLogger(__name__)

PULLING_THREADS = 8
"""Requests beyond that wait for a thread, and no longer than for their pages."""
MOST_PLACES = 256
"""Servers of which it is said once that no pages come from there; requests name them, so others are only counted."""


class _NotPulledError(Exception):
    """Pages did not come, and why."""


@dataclass(eq=False)
class Pulls:
    """What all pulls of an engine share. Pages that several requests wait for are fetched once."""

    host: HostPages
    secret: bytes
    contents: str
    """A digest of all that decides what is in a page."""
    page_bytes: int
    state_bytes: int
    timeout: float
    must_come: bool
    """A request fails without its pages, instead of being computed."""
    num_pulls: int = 0
    num_failed: int = 0
    num_pages: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.jobs = Jobs("pull", urgent_threads=PULLING_THREADS)
        self._changed = threading.Condition()
        self._coming: set[Digest] = set()
        self._running: set[Pull] = set()
        self._complained: set[tuple[str, int]] = set()

    def begin(self, source: PagesAt, digests: Sequence[Digest], state: Digest | None = None) -> Pull:
        """A pull of the pages of these prefixes, which a thread runs; its time begins now.

        `digests` may include the `state` after all of them. As one is of no use without the others then, all of them
        are brought or, where host memory has no room, none.
        """
        sizes = [self.state_bytes if digest == state else self.page_bytes for digest in digests]
        room = min(MOST_DIGESTS, sum(total <= self.host.budget for total in accumulate(sizes)))
        most = 0 if state is not None and room < len(digests) else room
        return Pull(self, source, dict(zip(digests[:most], sizes, strict=False)), room, len(digests))

    def close(self) -> None:
        self.jobs.close()
        with self._changed:
            running = list(self._running)
        for pull in running:
            pull.cancel()

    @contextmanager
    def running(self, pull: Pull) -> Iterator[None]:
        """`close` cancels it meanwhile."""
        with self._changed:
            self._running.add(pull)
        try:
            yield
        finally:
            with self._changed:
                self._running.discard(pull)

    @contextmanager
    def claimed(self, digests: list[Digest]) -> Iterator[list[Digest]]:
        """Those of them that are not here, and that no other pull brings; others wait for them meanwhile."""
        with self._changed:
            mine = [digest for digest in digests if digest not in self._coming and digest not in self.host]
            self._coming.update(mine)
        try:
            yield mine
        finally:
            with self._changed:
                self._coming.difference_update(mine)
                self._changed.notify_all()

    def wait(self, digests: list[Digest], seconds: float) -> None:
        """Block until other pulls bring none of them any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._coming.isdisjoint(digests), max(0.0, seconds))

    def take(self, digests: Sequence[Digest], pages: np.ndarray) -> None:
        for digest, page in zip(digests, pages, strict=False):
            self.host.add(digest, page.copy())  # else it would keep all that came with it
        with self._changed:
            self.num_pages += len(pages)

    def note(self, source: PagesAt, seconds: float, problem: str | None) -> None:
        """A pull has ended; a problem that lasts is logged once. Raises JaxLLMError: pages must come and did not."""
        place = (source.host, source.port)
        with self._changed:
            self.num_pulls += 1
            self.seconds += seconds
            if problem is None:
                self._complained.discard(place)
                return
            self.num_failed += 1
            is_new = place not in self._complained and len(self._complained) < MOST_PLACES
            if is_new:
                self._complained.add(place)
        where = f"{source.host}:{source.port}"
        if self.must_come:
            raise JaxLLMError(f"the pages of its prompt did not come from {where}: {problem}")
        if is_new:
            logger.warning(
                "pages of a prompt did not come from %s, and are computed here: %s; more of this is counted in "
                "kv_transfer_failures and not logged until some come again",
                where,
                problem,
            )


@dataclass(eq=False)
class Pull:
    """The pages of one request's prompt. One thread runs it; any may cancel it."""

    _pulls: Pulls
    _source: PagesAt
    _wanted: dict[Digest, int]
    _room: int
    _count: int

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._over: str | None = None
        self._cancelled = False
        self.jobs = self._pulls.jobs
        """The threads that run it: they wait for other servers, and for nothing else."""

    def cancel(self) -> None:
        """No request waits for it any more: the connection ends at once."""
        self._cancelled = True
        self._stop("it was cancelled")

    def run(self) -> None:
        """Bring the pages to host memory in time, and count problems. Raises JaxLLMError: pages must come and did
        not.
        """
        problem = None
        with self._pulls.running(self):
            try:
                self._bring()
            except _NotPulledError as error:
                problem = str(error)
        if not self._cancelled:
            self._pulls.note(self._source, time.monotonic() - self._began, problem)

    def _bring(self) -> None:
        missing = list(self._wanted)
        for _ in range(2):
            with self._pulls.claimed(missing) as mine:
                if mine and not self._cancelled:
                    self._fetch(mine)
            own = set(mine)
            others = [digest for digest in missing if digest not in own]
            self._pulls.wait(others, self._left)
            missing = [digest for digest in others if digest not in self._pulls.host]
        if missing:
            raise _NotPulledError("another request that waited for the same pages did not get them")
        if self._room < self._count:
            room = f"room for {self._room} of its {self._count} pages"
            raise _NotPulledError(f"host memory (kv_offload_memory) has {room}")

    @property
    def _left(self) -> float:
        return self._began + self._pulls.timeout - time.monotonic()

    def _fetch(self, digests: list[Digest]) -> None:
        left, late = self._left, f"its {self._pulls.timeout:g} seconds (kv_timeout) were over"
        if left <= 0:
            raise _NotPulledError(f"{late} before there was a thread for it")
        timer = threading.Timer(left, self._stop, [late])
        timer.daemon = True
        timer.start()
        try:
            with socket.create_connection((self._source.host, self._source.port), timeout=left) as connection:
                connection.settimeout(None)  # from now on the timer ends it
                with self._lock:
                    self._connection = connection
                if self._over is not None or not introduce(connection, self._pulls.secret):
                    raise _NotPulledError(self._over or "its cluster_secret is another")
                self._receive(Wire(connection, FromGiver), digests)
        except TimeoutError:
            raise _NotPulledError(late) from None
        except (OSError, WireError, UnicodeError) as error:  # the last of names that no host can have
            raise _NotPulledError(self._over or reason(error)) from None
        finally:
            timer.cancel()

    def _receive(self, wire: Wire[FromGiver], digests: list[Digest]) -> None:
        wire.send(PagesWanted(self._pulls.contents, digests))
        got = 0
        while True:
            message, arrays = wire.receive(None)
            match message:
                case SomePages():
                    pages = self._checked(arrays, [self._wanted[digest] for digest in digests[got:]])
                    self._pulls.take(digests[got:], pages)
                    got += len(pages)
                case AllGiven():
                    if got < len(digests):
                        raise _NotPulledError(f"it has {got} of the {len(digests)} pages that were asked for")
                    return
                case NoPages(why):
                    raise _NotPulledError(one_line(why))

    @staticmethod
    def _checked(arrays: list[np.ndarray], expected: list[int]) -> np.ndarray:
        """The next pages or state of the `expected` ones, uint8 `[pages, nbytes]`. Raises WireError for others."""
        pages = arrays[0] if len(arrays) == 1 else np.empty(0)
        are_pages = pages.dtype == np.uint8 and pages.ndim == 2 and len(pages) > 0
        if not are_pages or expected[: len(pages)] != [pages.shape[1]] * len(pages):
            raise WireError("what was sent are no pages of this model, or more than were asked for")
        return pages

    def _stop(self, why: str) -> None:
        with self._lock:
            self._over = self._over or why
            connection = self._connection
        if connection is not None:
            interrupt(connection)


class Peers(NamedTuple):
    """An engine's side of both directions, as far as its role has them."""

    info: TransferInfo
    pulls: Pulls | None
    listener: PageListener | None


def new_peers(
    config: KVTransferConfig,
    secret: bytes,
    contents: str,
    lengths: tuple[int, int],
    host: HostPages,
    give: Callable[[Sequence[Digest]], Iterator[Page]],
) -> Peers:
    """What exchanges pages with other servers whose pages hold what `contents` is a digest of as well.

    `lengths` are those of a page and of a state. What comes goes to `host`; `give` gives pages of prefixes up to the
    first that is not there.

    Raises ConfigError: nobody can listen at the config's address.
    """
    pulls = listener = None
    if config.takes:
        must_come = config.kv_load_failure_policy == "fail"
        pulls = Pulls(host, secret, contents, *lengths, config.kv_timeout, must_come)
    if config.gives:
        listener = PageListener((config.kv_ip, config.kv_port), secret, contents, give)
    port = 0 if listener is None else listener.port
    info = TransferInfo(secrets.token_hex(8), config.kv_role, config.kv_ip, port, config.kv_peers)
    return Peers(info, pulls, listener)
