"""Pages that other servers of the model have computed, on their way to the host memory of this one."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import numpy as np

from jaxllm.config.parts import KVTransferConfig
from jaxllm.engine.core.jobs import Jobs
from jaxllm.engine.features.offload.host_pages import Digest, HostPages, Page
from jaxllm.engine.features.offload.page_listener import (
    MOST_DIGESTS,
    AllGiven,
    FromGiver,
    NoPages,
    PageListener,
    PagesWanted,
    SomePages,
)
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


class Pulls:
    """What all pulls of an engine share. Pages that several requests wait for are fetched once."""

    def __init__(
        self,
        host: HostPages,
        secret: bytes,
        contents: str,
        page_bytes: int,
        state_bytes: int,
        timeout: float,
        *,
        must_come: bool,
    ):
        """`contents` is a digest of all that decides what is in a page; with `must_come` a request fails without its
        pages, instead of being computed.
        """
        self.host = host
        self.secret = secret
        self.contents = contents
        self.page_bytes = page_bytes
        self.state_bytes = state_bytes
        self.timeout = timeout
        self.must_come = must_come
        self.jobs = Jobs("pull", urgent_threads=PULLING_THREADS)
        self.num_pulls = self.num_failed = self.num_pages = 0
        self.seconds = 0.0
        """That requests have waited for pages, together."""
        self._changed = threading.Condition()
        self._coming: set[Digest] = set()
        self._running: set[Pull] = set()
        self._complained: set[tuple[str, int]] = set()
        """Of whom it was said that no pages come from there, and none have since."""

    def begin(self, source: PagesAt, digests: Sequence[Digest], state: Digest | None = None) -> Pull:
        """A pull of the pages of these prefixes, which a thread runs; its time begins now.

        `state` is what the state after all of them is called, where there is one; it may be among `digests`. Without
        one of them the others are of no use then, so it brings all that host memory has room for, or nothing.
        """
        sizes = [self.state_bytes if digest == state else self.page_bytes for digest in digests]
        room = min(MOST_DIGESTS, sum(total <= self.host.budget for total in accumulate(sizes)))
        most = 0 if state is not None and room < len(digests) else room
        return Pull(self, source, dict(zip(digests[:most], sizes, strict=False)), room, len(digests))

    def close(self) -> None:
        """Bring nothing more."""
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

    def count(self, pages: int) -> None:
        """So many have come."""
        with self._changed:
            self.num_pages += pages

    def note(self, source: PagesAt, seconds: float, problem: str | None) -> None:
        """A pull has ended, with a problem or without; one that lasts is said once.

        Raises:
            JaxLLMError: of a problem, where pages must come.
        """
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


class Pull:
    """The pages of one request's prompt. One thread runs it; any may cancel it."""

    def __init__(self, pulls: Pulls, source: PagesAt, wanted: dict[Digest, int], room: int, count: int):
        """`wanted` says how many bytes each has. They are the first of `count`, of which host memory has `room` for so
        many.
        """
        self._pulls = pulls
        self._source = source
        self._wanted = wanted
        self._room = room
        self._count = count
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._over: str | None = None
        """Why nothing is received any more."""
        self._cancelled = False

    @property
    def jobs(self) -> Jobs:
        """Whose threads run it: they wait for other servers, and for nothing else."""
        return self._pulls.jobs

    def cancel(self) -> None:
        """Nobody waits for it any more: the connection ends at once."""
        self._cancelled = True
        self._stop("it was cancelled")

    def run(self) -> None:
        """Bring the pages to host memory, as far as they can be had in time; what keeps them is said and counted.

        Raises:
            JaxLLMError: some did not come, and must.
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
        """What nobody else brings; then what others do, or were to and have not."""
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
        left = self._left
        if left <= 0:
            raise _NotPulledError(f"{self._late} before there was a thread for it")
        timer = threading.Timer(left, self._stop, [self._late])
        timer.daemon = True
        timer.start()
        try:
            with socket.create_connection((self._source.host, self._source.port), timeout=left) as connection:
                connection.settimeout(None)  # from now on the timer ends it
                self._receive(self._introduced(connection), digests)
        except TimeoutError:
            raise _NotPulledError(self._late) from None
        except (OSError, WireError, UnicodeError) as error:  # the last of names that no host can have
            raise _NotPulledError(self._over or reason(error)) from None
        finally:
            timer.cancel()

    @property
    def _late(self) -> str:
        return f"its {self._pulls.timeout:g} seconds (kv_timeout) were over"

    def _introduced(self, connection: socket.socket) -> Wire[FromGiver]:
        with self._lock:
            self._connection = connection
        if self._over is not None or not introduce(connection, self._pulls.secret):
            raise _NotPulledError(self._over or "its cluster_secret is another")
        return Wire(connection, FromGiver)

    def _receive(self, wire: Wire[FromGiver], digests: list[Digest]) -> None:
        wire.send(PagesWanted(self._pulls.contents, digests))
        got = 0
        while True:
            message, arrays = wire.receive(None)
            match message:
                case SomePages():
                    pages = self._checked(arrays, [self._wanted[digest] for digest in digests[got:]])
                    for digest, page in zip(digests[got:], pages, strict=False):
                        self._pulls.host.add(digest, page.copy())  # else it would keep all that came with it
                    got += len(pages)
                    self._pulls.count(len(pages))
                case AllGiven():
                    if got < len(digests):
                        raise _NotPulledError(f"it has {got} of the {len(digests)} pages that were asked for")
                    return
                case NoPages(why):
                    raise _NotPulledError(one_line(why))

    @staticmethod
    def _checked(arrays: list[np.ndarray], expected: list[int]) -> np.ndarray:
        """Pages, or a state: uint8 `[pages, nbytes]`, the next of the `expected` ones. Raises WireError for others."""
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


class Peers:
    """An engine's side of both directions, as far as its role has them."""

    def __init__(
        self,
        config: KVTransferConfig,
        secret: bytes,
        contents: str,
        page_bytes: int,
        state_bytes: int,
        host: HostPages,
        give: Callable[[Sequence[Digest]], Iterator[Page]],
    ):
        """What comes goes to `host`; `give` gives pages of prefixes up to the first that is not there.

        Raises:
            ConfigError: nobody can listen at its address.
        """
        self.pulls: Pulls | None = None
        self._listener: PageListener | None = None
        if config.takes:
            must_come = config.kv_load_failure_policy == "fail"
            lengths = (page_bytes, state_bytes)
            self.pulls = Pulls(host, secret, contents, *lengths, config.kv_timeout, must_come=must_come)
        if config.gives:
            self._listener = PageListener((config.kv_ip, config.kv_port), secret, contents, give)
        self.info = TransferInfo(
            engine_id=secrets.token_hex(8),
            role=config.kv_role,
            host=config.kv_ip,
            port=0 if self._listener is None else self._listener.port,
            peers=config.kv_peers,
        )

    @property
    def num_given(self) -> int:
        """Pages that others have been sent."""
        return 0 if self._listener is None else self._listener.num_given

    def close(self) -> None:
        """Bring and give nothing more."""
        if self.pulls is not None:
            self.pulls.close()
        if self._listener is not None:
            self._listener.close()
