"""Pages and states of prefixes outside the devices: in host memory, on disk, and on other servers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jaxllm.engine.core.feature import Built, Errand, Feature, Plan, Surroundings
from jaxllm.engine.core.keys import Key, Kind
from jaxllm.engine.core.pages import FoundPrefix
from jaxllm.engine.core.registry import Features
from jaxllm.engine.core.request import Request
from jaxllm.engine.core.sizes import Buckets
from jaxllm.engine.core.step import StepFunctions
from jaxllm.engine.features.offload.host_pages import CacheRow, Page, RowKind
from jaxllm.engine.features.offload.page_copies import SIZES, LeavingPages, PageCopies, copying_step
from jaxllm.engine.features.offload.pulls import Pull
from jaxllm.engine.features.offload.tiers import PageTiers
from jaxllm.engine.messages import EngineRequest, EngineStats, PagesAt, TokenDelta, TransferInfo


@dataclass
class _OffloadState:
    hands_on: bool
    """Another server will fetch the pages of its prompt."""
    pages_at: PagesAt | None
    """Where another server gives those."""
    pull: Pull | None = None
    """What brings them."""
    num_on_device: int = 0
    """Pages that it could have gone on after without the host."""


class OffloadFeature(Feature):
    """Its steps copy rows of the caches, pages or states, to the host and back."""

    name = "offload"
    words = ("page", "state")

    def __init__(self, kinds: Iterable[RowKind]):
        """`kinds` are the rows that the model's layers have."""
        self._kinds = tuple(kinds)
        self.tiers: PageTiers | None = None
        """What keeps them, in the process that has requests."""
        self._returning: list[tuple[CacheRow, Page]] = []

    def plan(self, buckets: Buckets) -> Plan:
        kinds: tuple[Kind, ...] = ("copy_out", "copy_in")
        return Plan(soon=[Key(kind, n, frozenset({of})) for of in self._kinds for kind in kinds for n in SIZES[of]])

    def build(self, key: Key, maker: StepFunctions) -> Built:
        return copying_step(key, maker)

    def attach(self, around: Surroundings) -> None:
        self._around, self._returning = around, []
        self._copies = PageCopies(around.device, around.sizes)
        self._queries = self._hits = 0
        self._spared = around.pool.pages_for(around.sizes.max_num_batched_tokens)
        """Free pages that are not filled with what the host has, where layers keep no states."""

    def keep_in(self, tiers: PageTiers) -> None:
        """Keep pages and states in `tiers` from now on."""
        self.tiers = tiers
        pool = self._around.pool
        pool.on_snapshot, pool.on_lose_snapshot = tiers.state_kept, tiers.state_forgotten

    @property
    def _kept(self) -> PageTiers:
        assert self.tiers is not None, "a core that offloads has tiers"
        return self.tiers

    # ------------------------------------------------------------ a request

    def prepare(self, request: Request, asked: EngineRequest) -> _OffloadState:
        return _OffloadState(asked.hands_on, asked.pages_at)

    def job(self, request: Request, extra: _OffloadState) -> Errand | None:
        """Read what is on disk, unless the engine is paused: then it is computed again. Fetch from other servers."""
        around, tiers = self._around, self._kept
        root, tokens = around.prefix_root(request), request.token_ids[: around.features().first_read(request)]
        on_disk = [] if around.is_paused() else tiers.on_disk(root, tokens)
        pull = extra.pull = tiers.pull(extra.pages_at, root, tokens, on_disk)
        if not on_disk and pull is None:
            return None

        def bring() -> None:
            if on_disk:
                tiers.read(on_disk)
            if pull is not None:
                pull.run()

        return Errand(bring, None if pull is None else pull.jobs)

    def extend(self, request: Request, extra: _OffloadState, found: FoundPrefix) -> bool:
        """With states as many pages as lead to one, on the devices or in the host; else as there is room for."""
        extra.num_on_device = found.depth
        size, count, tiers = self._around.pool.page_size, len(found.pages), self._kept
        if not found.at_depths:
            room = max(self._around.pool.num_free - self._spared, 0)
            node = found.chain[-1] if found.chain else found.root
            found.returning = tiers.find(node, found.tokens[count * size : (count + room) * size])
            found.depth = found.known = count + len(found.returning)
            return True
        back = tiers.find_state(found.root, found.chain, found.tokens[count * size :], found.depth)
        found.known = max(count, back.known)
        if back.depth > found.depth:
            found.depth, found.returning, found.snapshot = back.depth, back.pages, back.state
        return not back.awaited

    def place(self, request: Request, extra: _OffloadState, found: FoundPrefix) -> None:
        size = self._around.pool.page_size
        pages = request.pages[len(found.pages) :]
        back = zip(pages, found.returning, strict=False)
        self._returning += [(CacheRow("page", page), content) for page, content in back if content.nbytes]
        if found.snapshot is not None:
            self._returning.append((CacheRow("state", found.snapshot_row), found.snapshot))
        if not request.num_preemptions:
            self._queries += request.num_prompt - extra.num_on_device * size
            self._hits += (found.depth - extra.num_on_device) * size

    def ended(self, request: Request, extra: _OffloadState, delta: TokenDelta) -> None:
        """Copy the full pages of a prompt, and its state, to host memory, where other servers find them."""
        if extra.hands_on:
            prompt, root = request.token_ids[: request.num_prompt], self._around.prefix_root(request)
            self._keep(self._read(self._kept.to_hand_on(root, prompt, request.pages)))

    def forget(self, request: Request, extra: _OffloadState) -> None:
        if extra.pull is not None:
            extra.pull.cancel()

    # ------------------------------------------------------------ between the steps

    def before_step(self) -> None:
        """What leaves is copied before anything is written there, and what comes back is written after that."""
        returning, self._returning = self._returning, []
        self._keep(self._read(self._kept.take_leaving()))
        self._write(returning)

    def _read(self, rows: list[tuple[CacheRow, Any]]) -> list[LeavingPages]:
        return self._copies.read(rows)

    def _write(self, rows: list[tuple[CacheRow, Page]]) -> None:
        self._copies.write(rows)

    def _keep(self, leaving: list[LeavingPages]) -> None:
        for part in leaving:
            self._kept.keep(part.digests, part.contents)

    @property
    def has_idle_work(self) -> bool:
        return self._kept.has_unsaved

    def idle(self) -> None:
        """Copy some pages or a state to disk that are not there yet."""
        for part in self._read(self._kept.take_unsaved()):
            self._kept.save(part.digests, part.contents)
        self._kept.save_from_host()

    def close(self) -> None:
        if self.tiers is not None:
            self.tiers.close()

    def stats(self, stats: EngineStats, running: Iterable[Request], waiting: Iterable[Request]) -> None:
        tiers = self._kept
        stats.offload_queries, stats.offload_hits = self._queries, self._hits
        stats.num_host_pages, stats.num_disk_pages = tiers.num_host, tiers.num_disk
        pulls = None if tiers.peers is None else tiers.peers.pulls
        if tiers.peers is not None:
            stats.num_given_pages = tiers.peers.num_given
        if pulls is not None:
            stats.num_pulls, stats.num_failed_pulls = pulls.num_pulls, pulls.num_failed
            stats.pull_seconds, stats.num_pulled_pages = pulls.seconds, pulls.num_pages


def transfer_of(features: Features) -> TransferInfo | None:
    """How an engine exchanges pages with other servers, if it does."""
    found = features.get(OffloadFeature.name)
    tiers = found.tiers if isinstance(found, OffloadFeature) else None
    return None if tiers is None or tiers.peers is None else tiers.peers.info
