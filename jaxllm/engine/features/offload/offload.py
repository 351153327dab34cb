"""Pages and states of prefixes outside the devices: in host memory, on disk, and on other servers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxllm.engine.core.device import Device
from jaxllm.engine.core.feature import Built, Errand, Feature, Plan
from jaxllm.engine.core.keys import Key, Kind
from jaxllm.engine.core.pages import FoundPrefix
from jaxllm.engine.core.registry import Features
from jaxllm.engine.core.request import Request
from jaxllm.engine.core.sizes import Buckets, StepSizes, smallest_covering
from jaxllm.engine.core.step import StepFunctions
from jaxllm.engine.features.offload.pages import ROW_KINDS, CacheRow, Digest, Page, RowKind
from jaxllm.engine.features.offload.pulls import Pull
from jaxllm.engine.features.offload.tiers import Arriving, PageTiers
from jaxllm.engine.messages import EngineRequest, EngineStats, PagesAt, TokenDelta, TransferInfo
from jaxllm.models.caches import Buffer


@dataclass
class _OffloadState:
    hands_on: bool
    pages_at: PagesAt | None
    pull: Pull | None = None
    num_on_device: int = 0
    """Pages that it could have gone on after without the host."""


class OffloadFeature(Feature):
    """Its steps copy rows of the caches, pages or states, to the host and back."""

    name = "offload"
    words = ("page", "state")
    tiers: PageTiers

    def __init__(self, kinds: Iterable[RowKind]):
        self._kinds = tuple(kinds)
        self._returning: list[tuple[CacheRow, Page]] = []

    def plan(self, buckets: Buckets) -> Plan:
        kinds: tuple[Kind, ...] = ("copy_out", "copy_in")
        return Plan(soon=[Key(kind, n, frozenset({of})) for of in self._kinds for kind in kinds for n in SIZES[of]])

    def build(self, key: Key, maker: StepFunctions) -> Built:
        return copying_step(key, maker)

    def attach(self) -> None:
        around, self._returning = self.around, []
        self.copies = PageCopies(around.device, around.sizes)
        self._queries = self._hits = 0
        self._spared = around.pool.pages_for(around.sizes.max_num_batched_tokens)
        """Free pages that are not filled with what the host has, where layers keep no states."""

    def keep_in(self, tiers: PageTiers) -> None:
        self.tiers = tiers
        pool = self.around.pool
        pool.on_snapshot, pool.on_lose_snapshot = tiers.state_kept, tiers.state_forgotten

    def prepare(self, request: Request, asked: EngineRequest) -> _OffloadState:
        return _OffloadState(asked.hands_on, asked.pages_at)

    def job(self, request: Request, extra: _OffloadState) -> Errand | None:
        """Read what is on disk, unless the engine is paused: then it is computed again. Fetch from other servers."""
        core, tiers = self.around.core, self.tiers
        root, tokens = core.prefix_root(request), core.features.keys(request, 0, core.features.first_read(request))
        on_disk = [] if core.is_paused else tiers.on_disk(root, tokens)
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
        size, count, tiers = self.around.pool.page_size, len(found.pages), self.tiers
        if not found.at_depths:
            room = max(self.around.pool.num_free - self._spared, 0)
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
        size = self.around.pool.page_size
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
            core = self.around.core
            prompt, root = core.features.keys(request, 0, request.num_prompt), core.prefix_root(request)
            self._keep(self.tiers.to_hand_on(root, prompt, request.pages))

    def forget(self, request: Request, extra: _OffloadState) -> None:
        if extra.pull is not None:
            extra.pull.cancel()

    def before_step(self) -> None:
        """What leaves is copied before anything is written there, and what comes back is written after that."""
        returning, self._returning = self._returning, []
        self._keep(self.tiers.take_leaving())
        self.copies.write(returning)

    def _keep(self, rows: list[tuple[CacheRow, Digest]]) -> None:
        for digests, pages in self.copies.read(rows):
            self.tiers.keep(digests, pages)

    @property
    def has_idle_work(self) -> bool:
        return self.tiers.has_unsaved

    def idle(self) -> None:
        """Copy some pages or a state to disk that are not there yet."""
        for digests, pages in self.copies.read(self.tiers.take_unsaved()):
            self.tiers.save(digests, pages)
        self.tiers.save_from_host()

    def close(self) -> None:
        self.tiers.close()

    def stats(self, stats: EngineStats, running: Iterable[Request], waiting: Iterable[Request]) -> None:
        tiers = self.tiers
        stats.offload_queries, stats.offload_hits = self._queries, self._hits
        stats.num_host_pages, stats.num_disk_pages = tiers.num_host, tiers.num_disk
        _, pulls, listener = tiers.peers or (None, None, None)
        if listener is not None:
            stats.num_given_pages = listener.num_given
        if pulls is not None:
            stats.num_pulls, stats.num_failed_pulls = pulls.num_pulls, pulls.num_failed
            stats.pull_seconds, stats.num_pulled_pages = pulls.seconds, pulls.num_pages


def transfer_of(features: Features) -> TransferInfo | None:
    tiers = next((feature.tiers for feature in features if isinstance(feature, OffloadFeature)), None)
    return None if tiers is None or tiers.peers is None else tiers.peers.info


T = TypeVar("T")

SIZES: dict[RowKind, tuple[int, ...]] = {"page": (4, 32), "state": (1,)}
"""How many are copied at once; more in several steps. A state may be as large as a thousand pages."""


class PageBlocks:
    """How the parts of one page, or of one state, lie behind one another: a row of each layer's buffers."""

    def __init__(self, buffers: Sequence[Buffer]):
        self._parts = [(buffer.shape[1:], buffer.dtype) for buffer in buffers]
        self._ends = np.cumsum([math.prod(shape) * dtype.itemsize for shape, dtype in self._parts]).tolist()
        self.nbytes: int = self._ends[-1] if self._ends else 0

    def split(self, arrays: Sequence[jax.Array], count: int) -> list[np.ndarray]:
        """The first `count` pages of what a step gave, each uint8 `[nbytes]`; waits for it."""
        pages = [np.empty(self.nbytes, np.uint8) for _ in range(count)]
        for array, end, (shape, dtype) in zip(arrays, self._ends, self._parts, strict=True):
            rows = np.asarray(array).reshape(len(array), -1).view(np.uint8)
            begin = end - math.prod(shape) * dtype.itemsize
            for page, row in zip(pages, rows, strict=False):
                page[begin:end] = row
        return pages

    def join(self, pages: Sequence[np.ndarray], size: int) -> list[np.ndarray]:
        """What a step takes for pages of the host's, padded to `size` of them: an array of each buffer."""
        rows = np.zeros((size, self.nbytes), np.uint8)
        for row, page in zip(rows, pages, strict=False):
            row[:] = page
        begins = [0, *self._ends]
        return [
            np.ascontiguousarray(rows[:, begin:end]).view(dtype).reshape(size, *shape)
            for begin, end, (shape, dtype) in zip(begins, self._ends, self._parts, strict=False)
        ]


class PageCopies:
    """Nothing waits for a copy here: it is enqueued among the steps."""

    def __init__(self, device: Device, sizes: StepSizes):
        self._device = device
        self._blocks: dict[RowKind, PageBlocks] = {
            kind: PageBlocks(sizes.buffers_of(paged=kind == "page")) for kind in ROW_KINDS
        }
        self._padding: dict[RowKind, int] = {"page": 0, "state": sizes.max_num_seqs}

    def read(self, rows: list[tuple[CacheRow, Digest]]) -> list[tuple[list[Digest], Arriving]]:
        found = list[tuple[list[Digest], Arriving]]()
        for key, numbers, of, some in self._parts("copy_out", rows):
            arrays = self._device.run(key, numbers)
            for array in arrays:
                array.copy_to_host_async()
            found.append(([digest for _, digest in some], partial(self._blocks[of].split, arrays, len(some))))
        return found

    def write(self, rows: list[tuple[CacheRow, Page]]) -> None:
        for key, numbers, of, some in self._parts("copy_in", rows):
            contents = self._blocks[of].join([content for _, content in some], key.size)
            self._device.run(key, numbers, *contents)

    def _parts(
        self, kind: Kind, rows: list[tuple[CacheRow, T]]
    ) -> Iterator[tuple[Key, np.ndarray, RowKind, list[tuple[CacheRow, T]]]]:
        for of, same in groupby(rows, lambda entry: entry[0].kind):
            some = list(same)
            for start in range(0, len(some), SIZES[of][-1]):
                part = some[start : start + SIZES[of][-1]]
                key = Key(kind, smallest_covering(SIZES[of], len(part)), frozenset({of}))
                numbers = np.full(key.size, self._padding[of], np.int32)
                numbers[: len(part)] = [row.number for row, _ in part]
                yield key, numbers, of, part


def copying_step(key: Key, maker: StepFunctions) -> Built:
    """`(parts, numbers) -> (rows,)` of each buffer that has any, or `(parts, numbers, *rows) -> (caches,)`."""
    of: RowKind = "page" if "page" in key.variant else "state"
    has_them, buffers = _has_rows(of, maker), maker.sizes.buffers_of(paged=of == "page")

    def out(parts: dict[str, Any], numbers: jax.Array) -> tuple[Any, ...]:
        found = zip(jax.tree.leaves(parts["caches"]), has_them, strict=True)
        return (tuple(buffer[numbers] for buffer, has in found if has),)

    def back(parts: dict[str, Any], numbers: jax.Array, *rows: jax.Array) -> tuple[Any, ...]:
        found, tree = jax.tree.flatten(parts["caches"])
        given = iter(rows)
        pairs = zip(found, has_them, strict=True)
        written = [buffer.at[numbers].set(next(given)) if has else buffer for buffer, has in pairs]
        return (jax.tree.unflatten(tree, written),)

    numbers = maker.state.ints(key.size)
    if key.kind == "copy_out":
        return Built(out, [numbers], tuple(P(*buffer.axes) for buffer in buffers))
    return Built(back, [numbers, *(maker.state.sharded((key.size, *b.shape[1:]), b.dtype, b.axes) for b in buffers)])


def _has_rows(of: RowKind, maker: StepFunctions) -> list[bool]:
    """Of each array that layers keep, in turn, whether it has a row for each page, or for each state."""
    sizes, found = maker.sizes, list[bool]()
    paged = iter(sizes.is_paged)
    for buffers, layer in zip(sizes.buffers, maker.state.abstract()["caches"], strict=True):
        found += [next(paged) == (of == "page") for _ in buffers]
        found += [False] * (len(jax.tree.leaves(layer)) - len(buffers))  # places of experts
    return found
