"""Where pages go when their place on the devices is given away, and where they are found again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future

from jaxllm.engine.jobs import Jobs
from jaxllm.engine.messages import PagesAt
from jaxllm.engine.offload.disk_pages import DiskPages
from jaxllm.engine.offload.host_pages import HostPages, Page
from jaxllm.engine.offload.peers import Peers
from jaxllm.engine.offload.prefix_digests import Digest, PrefixDigests, chain
from jaxllm.engine.offload.pulls import Pull
from jaxllm.engine.page_pool import PagePool, PrefixNode
from jaxllm.kv_transfer_config import KVTransferConfig

logger = logging.getLogger(__name__)

SAVED_AT_ONCE = 32
"""Pages that an engine without work copies to disk before it looks whether there is work."""

Arriving = Callable[[], Sequence[Page]]
"""Gives pages that are on their way to the host when they have arrived."""


class PageTiers:
    """Host memory, and perhaps a disk and other servers, below one page pool.

    A page that is given away is copied to host memory before another prefix is written there; when that is full, the
    longest unused go to disk. An engine without work copies to disk what is not there yet, so that another process
    finds it. The loop's thread calls all of this; copies and files are the business of a thread of its own.
    """

    def __init__(self, pool: PagePool, host_bytes: int, disk: DiskPages | None = None):
        self._page_size = pool.page_size
        self._disk = disk
        self._host = HostPages(host_bytes, self._to_disk)
        self._digests = PrefixDigests()
        self._on_device: dict[Digest, int] = {}
        """Where each prefix is that can be found there."""
        self._unsaved: dict[Digest, int] = {}
        """Pages on the devices that are on no disk, the oldest first."""
        self._unsaved_on_host: dict[Digest, None] = {}
        """Pages that were given away before they could be saved."""
        self._leaving: list[tuple[int, Digest]] = []
        self._jobs = Jobs("offload", urgent_threads=1)
        self.peers: Peers | None = None
        """Other servers, after `join`."""
        pool.on_register = self._registered
        pool.on_give_away = self._given_away

    def join(self, config: KVTransferConfig, secret: bytes, contents: str, page_bytes: int) -> None:
        """Exchange pages with other servers from now on, whose pages hold what `contents` is a digest of as well.

        Raises:
            ConfigError: nobody can listen at the config's address.
        """
        self.peers = Peers(config, secret, contents, page_bytes, self._host, self._give)

    @property
    def num_host(self) -> int:
        """Pages in host memory."""
        return len(self._host)

    @property
    def num_disk(self) -> int:
        """Pages on disk."""
        return 0 if self._disk is None else len(self._disk)

    def take_leaving(self) -> list[tuple[int, Digest]]:
        """Pages that have been given away since the last call: to be copied before anything is written to them."""
        leaving, self._leaving = self._leaving, []
        return leaving

    def keep(self, digests: Sequence[Digest], pages: Arriving) -> None:
        """Keep pages that are on their way to the host, in host memory."""

        def arrive() -> None:
            for digest, page in zip(digests, pages(), strict=False):
                self._host.add(digest, page)
                if self._disk is not None and digest not in self._disk:
                    self._unsaved_on_host[digest] = None

        self._submit(arrive)

    def find(self, node: PrefixNode, tokens: Sequence[int]) -> list[Page]:
        """The pages in host memory of `tokens` behind the prefix `node`, as far as they are there."""
        begin = self._digests[node]
        found: list[Page] = []
        if begin is None:
            return found
        for digest in chain(begin, tokens, self._page_size):
            page = self._host.get(digest)
            if page is None:
                break
            found.append(page)
        return found

    def on_disk(self, root: PrefixNode, tokens: Sequence[int]) -> list[Digest]:
        """What has to be read from disk so that `find` finds as much of a prompt as is known anywhere here."""
        found: list[Digest] = []
        if self._disk is None or not len(self._disk):
            return found
        for digest in self._not_in_memory(root, tokens):
            if digest not in self._disk:
                break
            found.append(digest)
        return found

    def pull(self, source: PagesAt | None, root: PrefixNode, tokens: Sequence[int]) -> Pull | None:
        """What brings the pages of a prompt that another server has; None where nothing has to come."""
        pulls = None if self.peers is None else self.peers.pulls
        if source is None or pulls is None:
            return None
        if source.count is not None:
            tokens = tokens[: source.count * self._page_size]
        digests = self._missing(root, tokens)
        return pulls.begin(source, digests) if digests else None

    def to_hand_on(self, root: PrefixNode, tokens: Sequence[int], pages: Sequence[int]) -> list[tuple[int, Digest]]:
        """Of the pages of a prompt those that are to be copied, so that other servers find all of them."""
        digests = chain(self._digests.of_root(root), tokens, self._page_size)
        return [(page, digest) for page, digest in zip(pages, digests, strict=False) if self._host.get(digest) is None]

    def _missing(self, root: PrefixNode, tokens: Sequence[int]) -> list[Digest]:
        """What other servers would have to give so that `find` finds the whole of a prompt."""
        disk = () if self._disk is None else self._disk
        return [digest for digest in self._not_in_memory(root, tokens) if digest not in disk]

    def _not_in_memory(self, root: PrefixNode, tokens: Sequence[int]) -> Iterator[Digest]:
        """Prefixes of a prompt that are neither on the devices nor in host memory; what is there gives way later."""
        for digest in chain(self._digests.of_root(root), tokens, self._page_size):
            if digest not in self._on_device and self._host.get(digest) is None:
                yield digest

    def read(self, digests: Sequence[Digest]) -> None:
        """Read pages from disk into host memory. Any thread may call this."""
        assert self._disk is not None, "only what is on disk is read"
        room = self._host.budget
        for digest in digests:
            page = self._disk.read(digest)
            if page is None or (room := room - page.nbytes) < 0:
                return
            self._host.add(digest, page)

    @property
    def has_unsaved(self) -> bool:
        """Whether pages are still to be copied to disk."""
        return bool(self._unsaved or self._unsaved_on_host)

    def take_unsaved(self) -> list[tuple[int, Digest]]:
        """Some pages on the devices that are on no disk; they count as saved from now on."""
        digests = [digest for digest, _ in zip(self._unsaved, range(SAVED_AT_ONCE), strict=False)]
        return [(self._unsaved.pop(digest), digest) for digest in digests]

    def save(self, digests: Sequence[Digest], pages: Arriving) -> None:
        """Write pages that are on their way to the host to disk."""

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
        """Copy, fetch and give nothing more."""
        if self.peers is not None:
            self.peers.close()
        self._jobs.close()

    def _give(self, digests: Sequence[Digest]) -> Iterator[Page]:
        """Pages up to the first that is nowhere here, once all that are on their way to the host have come."""
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
        if digest is None:
            return
        self._on_device[digest] = page
        if self._disk is not None and digest not in self._disk:
            self._unsaved[digest] = page

    def _given_away(self, page: int, node: PrefixNode) -> None:
        digest = self._digests.forget(node)
        if digest is None:
            return
        if self._on_device.get(digest) == page:  # else the same prefix was computed again, and is found elsewhere
            del self._on_device[digest]
            self._unsaved.pop(digest, None)
        if digest not in self._host:
            self._leaving.append((page, digest))
