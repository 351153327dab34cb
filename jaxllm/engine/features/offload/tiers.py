"""Where pages and states go when their place on the devices is given away, and where they are found again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from jaxllm.config.parts import KVTransferConfig
from jaxllm.engine.core.jobs import Jobs
from jaxllm.engine.core.pages import PagePool, PrefixNode
from jaxllm.engine.features.offload.pages import (
    CacheRow,
    Digest,
    DiskPages,
    HostPages,
    Page,
    PrefixDigests,
    chain,
    of_state,
)
from jaxllm.engine.features.offload.pulls import Peers, Pull, new_peers
from jaxllm.engine.messages import PagesAt

logger = logging.getLogger(__name__)

SAVED_AT_ONCE = 32
"""Pages, or one state, that an engine without work copies to disk before it looks whether there is work."""
NOTHING = np.empty(0, np.uint8)
"""What a page holds where no layer has any."""

Arriving = Callable[[], Sequence[Page]]


class Returning(NamedTuple):
    """What host memory adds to what the devices have of a prompt."""

    pages: list[Page]
    state: Page | None = None
    depth: int = 0
    known: int = 0
    """Pages of the prompt that are on the devices and in host memory, with a state or without."""
    awaited: bool = False
    """The step that is being scheduled will copy more of them to the host."""


class PageTiers:
    """Host memory, and perhaps a disk and other servers, below one page pool and its states of prefixes.

    A page that is given away is copied to host memory before another prefix is written there; when that is full, the
    longest unused go to disk. An engine without work copies to disk what is not there yet, for other processes. States
    are kept as pages are, by digests of their own. Where layers have states, a prompt goes on from a prefix only where
    all its pages and the state after it are found. The loop's thread calls all of this; another copies and writes.
    """

    def __init__(
        self,
        pool: PagePool,
        host_bytes: int,
        disk: DiskPages | None = None,
        *,
        has_states: bool = False,
        has_pages: bool = True,
    ):
        """Without `has_pages` nothing is in the model's pages, which are found all the same."""
        self._has_states, self._has_pages = has_states, has_pages
        self._page_size, self._disk = pool.page_size, disk
        self._host = HostPages(host_bytes, self._to_disk)
        self._digests = PrefixDigests()
        self._on_device: dict[Digest, CacheRow] = {}
        """The row of each page and each state that can be found there."""
        self._unsaved: dict[Digest, CacheRow] = {}
        self._unsaved_on_host: dict[Digest, None] = {}
        """What was given away before it could be saved."""
        self._leaving: dict[Digest, CacheRow] = {}
        self._arriving: set[Digest] = set()
        self._jobs = Jobs("offload", urgent_threads=1)
        self.peers: Peers | None = None
        pool.on_register = self._registered
        pool.on_give_away = self._given_away

    def join(self, config: KVTransferConfig, secret: bytes, contents: str, page_bytes: int, state_bytes: int) -> None:
        self.peers = new_peers(config, secret, contents, (page_bytes, state_bytes), self._host, self._give)

    @property
    def num_host(self) -> int:
        return len(self._host)

    @property
    def num_disk(self) -> int:
        return 0 if self._disk is None else len(self._disk)

    def take_leaving(self) -> list[tuple[CacheRow, Digest]]:
        """What has been given away since the last call: to be copied before anything is written there."""
        leaving, self._leaving = self._leaving, {}
        return [(row, digest) for digest, row in leaving.items()]

    def keep(self, digests: Sequence[Digest], pages: Arriving) -> None:
        """Keep pages and states that are on their way to the host, in host memory."""

        def arrive() -> None:
            try:
                for digest, page in zip(digests, pages(), strict=False):
                    self._host.add(digest, page)
                    if self._disk is not None and digest not in self._disk:
                        self._unsaved_on_host[digest] = None
            finally:
                self._arriving.difference_update(digests)

        self._arriving.update(digests)
        self._submit(arrive)

    def find(self, node: PrefixNode, tokens: Sequence[int]) -> list[Page]:
        """The pages in host memory of `tokens` after the prefix `node`, as far as they are there."""
        begin = self._digests[node]
        return [] if begin is None else self._pages_of(chain(begin, tokens, self._page_size))

    def find_state(self, root: PrefixNode, nodes: Sequence[PrefixNode], tokens: Sequence[int], least: int) -> Returning:
        """What host memory adds to a prompt of pages `nodes` and then `tokens`, beyond `least` pages."""
        digests = [digest for digest in (self._digests[node] for node in nodes) if digest is not None]
        begin = digests[-1] if digests else self._digests.of_root(root)
        digests += self._leading(begin, tokens, self._is_found)
        known = len(digests) if self._has_pages else len(nodes)
        for depth in range(len(digests), least, -1):
            name, following = of_state(digests[depth - 1]), digests[len(nodes) : depth]
            if self._is_found(name) and not self._leaving.keys().isdisjoint([name, *following]):
                return Returning([], awaited=True)
            state = self._from_host(name)
            pages = self._pages_of(following) if state is not None else []
            if state is not None and len(pages) == len(following):  # else another thread has pushed some out meanwhile
                return Returning(pages, state, depth, known)
        return Returning([], known=known)

    def on_disk(self, root: PrefixNode, tokens: Sequence[int]) -> list[Digest]:
        """What has to be read from disk so that a prompt goes on from the longest prefix known anywhere here."""
        if self._disk is None or not len(self._disk):
            return []
        prefixes = self._leading(self._digests.of_root(root), tokens, self._is_here)
        if self._has_states:
            depths = range(len(prefixes), 0, -1)
            depth = next((depth for depth in depths if self._is_here(of_state(prefixes[depth - 1]))), 0)
            prefixes = prefixes[:depth]
        return self._not_in_memory(prefixes)

    def pull(
        self, source: PagesAt | None, root: PrefixNode, tokens: Sequence[int], on_disk: Sequence[Digest] = ()
    ) -> Pull | None:
        """What brings a prompt's pages from another server, and the state after them; None if nothing has to come."""
        pulls = None if self.peers is None else self.peers.pulls
        if source is None or pulls is None:
            return None
        if source.count is not None:
            tokens = tokens[: source.count * self._page_size]
        prefixes = chain(self._digests.of_root(root), tokens, self._page_size)
        missing = [digest for digest in self._not_in_memory(prefixes) if digest not in on_disk]
        state = of_state(prefixes[-1]) if prefixes and self._has_states else None
        return pulls.begin(source, missing, state) if missing else None

    def to_hand_on(
        self, root: PrefixNode, tokens: Sequence[int], pages: Sequence[int]
    ) -> list[tuple[CacheRow, Digest]]:
        """A prompt's pages, and the last usable state, that are to be copied so that other servers find them."""
        prefixes = chain(self._digests.of_root(root), tokens, self._page_size)
        rows = [(CacheRow("page", page), digest) for page, digest in zip(pages, prefixes, strict=False)]
        found = rows if self._has_pages else []
        usable = prefixes[: (len(tokens) - 1) // self._page_size]  # the last token is computed again, for its logits
        state = of_state(usable[-1]) if usable and self._has_states else None
        if state is not None and state in self._on_device:
            found.append((self._on_device[state], state))
        return [(row, digest) for row, digest in found if self._host.get(digest) is None]

    def _pages_of(self, prefixes: Sequence[Digest]) -> list[Page]:
        if not self._has_pages:
            return [NOTHING] * len(prefixes)
        found: list[Page] = []
        for digest in prefixes:
            page = self._from_host(digest)
            if page is None:
                break
            found.append(page)
        return found

    def _from_host(self, digest: Digest) -> Page | None:
        """What is in host memory, or arrives there: the devices have given it already, or are about to."""
        if digest in self._arriving:
            self.wait()
        return self._host.get(digest)

    def _not_in_memory(self, prefixes: Sequence[Digest]) -> list[Digest]:
        """What a prompt needs that is not in memory, the state first; what is in memory will give way last."""
        states = [of_state(prefixes[-1])] if prefixes and self._has_states else []
        needed = [*states, *(prefixes if self._has_pages else ())]
        coming = self._leaving.keys() | self._arriving
        elsewhere = (digest for digest in needed if digest not in self._on_device and digest not in coming)
        return [digest for digest in elsewhere if self._host.get(digest) is None]

    def _leading(self, begin: Digest, tokens: Sequence[int], is_there: Callable[[Digest], bool]) -> list[Digest]:
        prefixes = chain(begin, tokens, self._page_size)
        return list(takewhile(is_there, prefixes)) if self._has_pages else prefixes

    def _is_found(self, digest: Digest) -> bool:
        return digest in self._leaving or digest in self._arriving or digest in self._host

    def _is_here(self, digest: Digest) -> bool:
        on_disk = self._disk is not None and digest in self._disk
        return on_disk or digest in self._on_device or self._is_found(digest)

    def read(self, digests: Sequence[Digest]) -> None:
        """Read pages and states from disk into host memory, up to one that is damaged. Any thread may call this."""
        assert self._disk is not None, "only what is on disk is read"
        room = self._host.budget
        for digest in digests:
            page = self._disk.read(digest)
            if page is None or (room := room - page.nbytes) < 0:
                return
            self._host.add(digest, page)

    @property
    def has_unsaved(self) -> bool:
        return bool(self._unsaved or self._unsaved_on_host)

    def take_unsaved(self) -> list[tuple[CacheRow, Digest]]:
        """Some of what is on the devices and on no disk; it counts as saved from now on."""
        some: list[tuple[CacheRow, Digest]] = []
        while self._unsaved and len(some) < SAVED_AT_ONCE and (not some or some[-1][0].kind == "page"):
            digest = next(iter(self._unsaved))
            some.append((self._unsaved.pop(digest), digest))
        return some

    def save(self, digests: Sequence[Digest], pages: Arriving) -> None:
        def write() -> None:
            for digest, page in zip(digests, pages(), strict=False):
                self._to_disk(digest, page)

        self._submit(write)

    def save_from_host(self) -> None:
        """Write some pages in host memory to disk that are not there; they count as saved from now on."""
        digests = list(self._unsaved_on_host)[:SAVED_AT_ONCE]
        for digest in digests:
            del self._unsaved_on_host[digest]

        def write() -> None:
            for digest in digests:
                page = self._host.get(digest)
                if page is not None:  # else it has given way, and is on disk
                    self._to_disk(digest, page)

        if digests:
            self._submit(write)

    def wait(self) -> None:
        """Block until all that was given to `keep` and `save` is where it is kept."""
        self._jobs.submit(lambda: None).result()

    def close(self) -> None:
        for peer in (self.peers.pulls, self.peers.listener) if self.peers is not None else ():
            if peer is not None:
                peer.close()
        self._jobs.close()

    def _give(self, digests: Sequence[Digest]) -> Iterator[Page]:
        self.wait()
        for digest in digests:
            page = self._host.get(digest)
            if page is None and self._disk is not None and digest in self._disk:
                page = self._disk.read(digest)
            if page is None:
                return
            yield page

    def _submit(self, work: Callable[[], None]) -> None:
        def done(job: Future[None]) -> None:
            error = None if job.cancelled() else job.exception()
            if error is not None and not isinstance(error, CancelledError):
                logger.error("pages of the KV cache were lost on their way to the host", exc_info=error)

        self._jobs.submit(work).add_done_callback(done)

    def _to_disk(self, digest: Digest, page: Page) -> None:
        if self._disk is not None:
            self._disk.write(digest, page)

    def _registered(self, page: int, node: PrefixNode, parent: PrefixNode, tokens: Sequence[int]) -> None:
        digest = self._digests.add(node, parent, tokens)
        self._note_found(CacheRow("page", page), digest if self._has_pages else None)

    def _given_away(self, page: int, node: PrefixNode) -> None:
        digest = self._digests.forget(node)
        self._note_lost(CacheRow("page", page), digest if self._has_pages else None, leaves=True)

    def state_kept(self, row: int, node: PrefixNode) -> None:
        prefix = self._digests[node]
        self._note_found(CacheRow("state", row), prefix and of_state(prefix))

    def state_forgotten(self, row: int, node: PrefixNode, leaves: bool) -> None:
        """It cannot any more; unless it `leaves`, it is lost."""
        prefix = self._digests[node]
        self._note_lost(CacheRow("state", row), prefix and of_state(prefix), leaves=leaves)

    def _note_found(self, row: CacheRow, digest: Digest | None) -> None:
        if digest is None:
            return
        self._on_device[digest] = row
        if self._disk is not None and digest not in self._disk:
            self._unsaved[digest] = row

    def _note_lost(self, row: CacheRow, digest: Digest | None, *, leaves: bool) -> None:
        if digest is None:
            return
        if self._on_device.get(digest) == row:  # else the same prefix was computed again, and is found elsewhere
            del self._on_device[digest]
            self._unsaved.pop(digest, None)
        if leaves and digest not in self._host:
            self._leaving[digest] = row
