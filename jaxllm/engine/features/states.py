"""States of layers that keep one of each sequence (convolutions, recurrences), and those of cached prefixes.

A prompt that begins as an earlier one did goes on only where the state after its pages is kept: at the last full page
of a chunk, as far as there are rows for it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.engine.core.feature import Feature, Fields, Traced, TracedStep
from jaxllm.engine.core.handle import Result
from jaxllm.engine.core.keys import Key
from jaxllm.engine.core.pages import FoundPrefix, PrefixNode
from jaxllm.engine.core.request import Chunk, Request, Status
from jaxllm.engine.core.sizes import StepSizes
from jaxllm.engine.core.slots import Slots
from jaxllm.engine.messages import EngineRequest
from jaxllm.pallas_kernels import StateRows, StepMetadata


class Found(NamedTuple):
    """The longest prefix with a state, in nodes of a chain, and the state's row; a longer one may be `awaited`."""

    depth: int
    row: int
    awaited: bool


@dataclass
class _Snapshot:
    row: int
    found: bool = False


class StateCache:
    """A budget of rows. A row is free, reserved for a state that a step is to keep, or holds the state of a prefix.

    When all are taken, the state that was least recently found or kept gives way. Steps run in the order in which they
    are scheduled: so a row may be given away as soon as the step that reads it has been scheduled, but one step writes
    no row twice, and none that it reads.
    """

    def __init__(self, first_row: int, num_rows: int):
        self.first_row, self.num_rows = first_row, num_rows
        self._free = list(range(first_row + num_rows - 1, first_row - 1, -1))
        self._snapshots: OrderedDict[PrefixNode, _Snapshot] = OrderedDict()
        self._awaited: set[PrefixNode] = set()
        self._written: set[int] = set()
        self._read: set[int] = set()
        self._free_later: list[int] = []
        """Those of them that are free as soon as the next one is."""
        self.on_keep: Callable[[int, PrefixNode], None] = lambda row, node: None
        """Is told of each state that is kept, which its row has once the step under way has run."""
        self.on_forget: Callable[[int, PrefixNode, bool], None] = lambda row, node, is_of_use: None
        """Is told of each that is kept no longer, and whether it is of use: its row holds it until the next step."""

    def begin_step(self) -> None:
        """What earlier steps keep can be read by the one that is scheduled now."""
        self._awaited.clear()
        self._written.clear()
        self._read.clear()
        self._free += self._free_later
        self._free_later.clear()

    def reserve(self) -> int:
        """A row for a state that a step is to keep; 0 where every row is reserved, awaited or read."""
        if not self._free:
            spared = (node for node, found in self._snapshots.items() if found.row not in self._read)
            oldest = next((node for node in spared if node not in self._awaited), None)
            if oldest is not None:
                self.forget(oldest)
        if not self._free:
            return 0
        row = self._free.pop()
        self._written.add(row)
        return row

    def release(self, row: int) -> None:
        (self._free_later if row in self._written | self._read else self._free).append(row)

    def keep(self, node: PrefixNode, row: int) -> bool:
        """A reserved row will hold the state after the prefix `node`; False, and the row is free, if another does."""
        if node in self._snapshots:
            self._snapshots.move_to_end(node)
            self.release(row)
            return False
        self._snapshots[node] = _Snapshot(row)
        self._awaited.add(node)
        self.on_keep(row, node)
        return True

    def find(self, chain: Sequence[PrefixNode]) -> Found:
        """The last node of a chain of prefixes, each one page longer than the one before, whose state can be read."""
        awaited = False
        for depth in range(len(chain), 0, -1):
            node = chain[depth - 1]
            if node in self._awaited:
                awaited = True
            elif node in self._snapshots:
                return Found(depth, self._snapshots[node].row, awaited)
        return Found(0, 0, awaited)

    def use(self, node: PrefixNode) -> None:
        self._snapshots[node].found = True
        self._read.add(self._snapshots[node].row)
        self._snapshots.move_to_end(node)

    def discard(self, node: PrefixNode) -> None:
        """Forget a state that a longer prefix of the same request has outdone, unless some request went on from it."""
        snapshot = self._snapshots.get(node)
        if snapshot is not None and not snapshot.found:
            self._forget(node, is_of_use=False)

    def forget(self, node: PrefixNode) -> None:
        if node in self._snapshots:
            self._forget(node, is_of_use=True)

    def _forget(self, node: PrefixNode, *, is_of_use: bool) -> None:
        row = self._snapshots.pop(node).row
        self._awaited.discard(node)
        self.on_forget(row, node, is_of_use and row not in self._written)
        self.release(row)

    def check(self, reserved: Sequence[int]) -> None:
        """Assert that every row is free, in use once, or among those `reserved` by requests."""
        rows = [*self._free, *self._free_later, *reserved, *(snapshot.row for snapshot in self._snapshots.values())]
        assert sorted(rows) == list(range(self.first_row, self.first_row + self.num_rows)), "a row of states was lost"
        assert self._awaited <= set(self._snapshots), "a state is awaited that nobody keeps"


@dataclass
class _Reserved:
    row: int
    tokens: int = 0
    """The state is the one after this many tokens; 0 where that is not known yet."""
    start: int = 0
    tried: int = 0
    unsettled: int = 0

    def find_page(self, page_size: int) -> bool:
        """Whether a state may be kept, as far as is known; `tokens` are set where it is kept for certain."""
        if self.unsettled or self.tokens:
            return True
        if (self.start + 1) % page_size == 0:
            self.tokens = self.start + 1
        return (self.start + 1 + self.tried) // page_size * page_size > self.start


class ReservedStates:
    """States that scheduled steps keep of one request, in order, and after how many of its tokens each is.

    Where drafts are tried only the device knows where a step begins and ends. It keeps the state at the last full page
    that the step fills, if it fills any; since a step with drafts has at most as many tokens as a page, there is no
    other. So the host knows which state that was as soon as it knows how many drafts were taken.
    """

    def __init__(self) -> None:
        self._steps: deque[_Reserved] = deque()

    @property
    def rows(self) -> list[int]:
        return [step.row for step in self._steps]

    def add(self, row: int, tokens: int) -> None:
        self._steps.append(_Reserved(row, tokens))

    def add_uncertain(self, row: int, start: int, tried: int, unsettled: int, page_size: int) -> None:
        """A step may keep a state: it begins at `start` less those of `unsettled` drafts that are refused."""
        step = _Reserved(row, start=start, tried=tried, unsettled=unsettled)
        step.find_page(page_size)
        self._steps.append(step)

    def settle(self, begin: int, num_tried: int, num_taken: int, page_size: int) -> list[int]:
        """The step that began at token `begin` has taken so many of its drafts. Returns rows that stay unused."""
        unused = []
        for step in [step for step in self._steps if not step.tokens]:
            if not step.unsettled and step.start == begin:
                kept = (begin + 1 + num_taken) // page_size * page_size
                step.tokens = kept if kept > begin else 0
                keeps = step.tokens > 0
            else:
                step.start -= num_tried - num_taken
                step.unsettled -= num_tried
                keeps = step.find_page(page_size)
            if not keeps:
                self._steps.remove(step)
                unused.append(step.row)
        return unused

    def take(self, tokens: int) -> int:
        """The row of the state after `tokens` tokens, which is no longer reserved; 0 where no step keeps it."""
        is_next = self._steps and self._steps[0].tokens == tokens
        return self._steps.popleft().row if is_next else 0


@dataclass
class _StateRows:
    row: int = 0
    found: FoundPrefix | None = None
    branches_at: int = 0
    """The number of tokens after which it parts from other requests, and no state is kept; 0 for none."""
    reserved: ReservedStates = field(default_factory=ReservedStates)
    answer_node: PrefixNode = None


class _ChunkStates(NamedTuple):
    read: int = 0
    """The row of the state that it goes on from; 0 is its slot's."""
    kept: int = 0
    """The row that the state after its sequence's first `tokens` tokens is kept in; 0 for none."""
    tokens: int = 0


class StatesFeature(Feature):
    """Rows of the layers' buffers: one for each slot, one for padding, and then one for each state of a prefix."""

    name = "states"
    on = ("decode", "verify", "backbone")
    always = True
    after_first = {"state_read": 0}  # noqa: RUF012  each goes on from the state in its slot

    def __init__(self, first_row: int, num_rows: int):
        self.cache = StateCache(first_row, num_rows)

    def attach(self) -> None:
        self.cache, self._pool = StateCache(self.cache.first_row, self.cache.num_rows), self.around.pool
        self._pool.on_forget = self.cache.forget
        self.cache.on_keep = lambda row, node: self._pool.on_snapshot(row, node)
        self.cache.on_forget = lambda row, node, is_of_use: self._pool.on_lose_snapshot(row, node, is_of_use)

    @property
    def _keeps(self) -> bool:
        return self.cache.num_rows > 0 and self._pool.enable_prefix_caching

    def prepare(self, request: Request, asked: EngineRequest) -> _StateRows:
        return _StateRows()

    def begin_step(self) -> None:
        self.cache.begin_step()

    def extend(self, request: Request, extra: _StateRows, found: FoundPrefix) -> bool:
        """As many of the pages as lead to a state; other pages are of no use, so it waits for a longer one."""
        kept = self.cache.find(found.chain)
        found.depth, found.at_depths, extra.row, extra.found = kept.depth, True, kept.row, found
        return not kept.awaited

    def place(self, request: Request, extra: _StateRows, found: FoundPrefix) -> None:
        """A state that comes back from the host takes a row where others find it as well, or else its slot's."""
        extra.found, extra.branches_at = None, self._branch(found)
        if found.snapshot is None:
            extra.row = extra.row if found.depth else 0
            if found.depth:
                self.cache.use(found.node)
            return
        extra.row = self.cache.reserve() if self._keeps else 0
        found.snapshot_row = extra.row or request.slot
        if extra.row:
            extra.reserved.add(extra.row, request.num_computed)
            if not found.returning:  # its pages are findable already
                self._keep(request, extra, request.num_computed)

    def cut(self, request: Request, extra: _StateRows, start: int, length: int, most: int) -> int:
        """So that a chunk ends where a state is wanted and none would be kept."""
        branch = extra.branches_at if extra.found is None else self._branch(extra.found)
        size = self._pool.page_size
        kept_anyway = (request.num_total - 1) // size * size
        return branch - start if start < branch < start + length and branch != kept_anyway else length

    def _branch(self, found: FoundPrefix) -> int:
        """Tokens after which a state is kept for others that begin like that: more pages are known than lead to one."""
        return found.known * self._pool.page_size if found.known > found.depth else 0

    def scheduled(self, chunk: Chunk, extra: _StateRows, further: int, tries: bool) -> None:
        """The chunk's state is kept at the last full page, if it reaches another one.

        A prompt that comes again needs its last token's logits, so that of its pages the ones before it count. Where
        tokens tried ahead are in flight, only the device knows which page that is.
        """
        request, size = chunk.request, self._pool.page_size
        read, extra.row = extra.row, 0
        end = chunk.start + chunk.length + further
        longest = end if chunk.length == 1 else min(end, request.num_total - 1)
        tokens, unsettled = longest // size * size, request.num_unsettled
        row = self.cache.reserve() if self._keeps and tokens > chunk.start - unsettled else 0
        chunk.extras[self.name] = _ChunkStates(read, row, tokens if row else 0)
        tried = further if tries else 0
        if row and (tried or unsettled):
            extra.reserved.add_uncertain(row, chunk.start, tried, unsettled, size)
        elif row:
            extra.reserved.add(row, tokens)

    def settled(self, request: Request, extra: _StateRows, result: Result) -> None:
        """The step that ran the last known token of a request has taken some of what it tried."""
        if request.status is Status.RUNNING:
            begin, taken = len(request.token_ids) - 1, len(result.tokens) - 1
            for row in extra.reserved.settle(begin, result.num_reserved, taken, self._pool.page_size):
                self.cache.release(row)

    def registered(self, request: Request, extra: _StateRows) -> None:
        self._keep(request, extra, request.num_registered * self._pool.page_size)

    def _keep(self, request: Request, extra: _StateRows, num_tokens: int) -> None:
        """Others find a state after the first `num_tokens` tokens, which the host knows; of an answer only the last."""
        row = extra.reserved.take(num_tokens)
        if row and self.cache.keep(request.prefix_node, row) and num_tokens > request.num_prompt:
            self.cache.discard(extra.answer_node)
            extra.answer_node = request.prefix_node

    def release(self, request: Request, extra: _StateRows) -> None:
        for row in extra.reserved.rows:
            self.cache.release(row)
        extra.reserved, extra.answer_node = ReservedStates(), None

    def check(self) -> None:
        self.cache.check([])

    def fields(self, key: Key, sizes: StepSizes) -> dict[str, tuple[int, ...]]:
        """Rows of states, and after how many tokens one is kept, which a step that tries tokens ahead finds itself."""
        rows = min(key.size, sizes.max_num_seqs) if key.kind == "backbone" else key.size
        last = () if key.kind == "verify" else ("kept_tokens",)
        return dict.fromkeys(("state_read", "state_kept", *last), (rows,))

    def pack(self, key: Key, x: Fields, chunks: Sequence[Chunk]) -> tuple[np.ndarray, ...]:
        told = [chunk.extras[self.name] for chunk in chunks]
        x["state_read"][: len(told)] = [one.read for one in told]
        x["state_kept"][: len(told)] = [one.kept for one in told]
        if "kept_tokens" in x:
            x["kept_tokens"][: len(told)] = [one.tokens for one in told]
        return ()

    def traced(self, step: TracedStep) -> Traced:
        return _Resuming(step.x, step.sizes.page_size)


class _Resuming(Traced):
    def __init__(self, x: Fields, page_size: int):
        self._x, self._page_size = x, page_size

    def metadata(self, meta: StepMetadata, slots: Slots) -> StepMetadata:
        """Slots' own rows precede the kept ones; of several kept, the one whose token the step runs is written."""
        assert meta.slots is not None, "an engine's steps have slots"
        end, padding = meta.context_len, slots.position.shape[0] - 1
        begin = end - jnp.diff(meta.query_start)
        tokens: jax.Array = self._x.get("kept_tokens", end // self._page_size * self._page_size)
        read, kept = self._x["state_read"], self._x["state_kept"]
        keeps = (kept > 0) & (begin < tokens) & (tokens <= end)
        rows = StateRows(
            read=jnp.where(read > 0, read, meta.slots),
            begins=begin == 0,
            written=meta.slots,
            kept=jnp.where(keeps, kept, padding),
            kept_tokens=jnp.where(keeps, tokens, 0),
        )
        return replace(meta, states=rows)
