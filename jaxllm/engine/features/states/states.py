"""States of layers that keep one of each sequence (convolutions, recurrences), and those of cached prefixes.

A prompt that begins as an earlier one did goes on only where the state after its pages is kept: at the last full page
of a chunk, as far as there are rows for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.engine.core.feature import Feature, Fields, Surroundings, Traced, TracedStep
from jaxllm.engine.core.handle import Result
from jaxllm.engine.core.keys import Key
from jaxllm.engine.core.pages import FoundPrefix, PrefixNode
from jaxllm.engine.core.request import Chunk, Request, Status
from jaxllm.engine.core.sizes import StepSizes
from jaxllm.engine.core.slots import Slots
from jaxllm.engine.features.states.reserved_states import ReservedStates
from jaxllm.engine.features.states.state_cache import StateCache
from jaxllm.engine.messages import EngineRequest
from jaxllm.pallas_kernels import StateRows, StepMetadata


@dataclass
class _StateRows:
    row: int = 0
    """Where its first chunk since it was last admitted finds the state of a cached prefix; 0 for nowhere."""
    found: FoundPrefix | None = None
    """The prefix that it is to begin with; None once it has begun."""
    branches_at: int = 0
    """Where its tokens part from other requests' although no state is kept there: tokens; 0 for nowhere."""
    reserved: ReservedStates = field(default_factory=ReservedStates)
    """Rows of states that scheduled steps keep of it, and whose tokens the host does not all know."""
    answer_node: PrefixNode = None
    """The longest prefix in its answer whose state is kept."""


class _ChunkStates(NamedTuple):
    """Which states a chunk goes on from and keeps.

    Attributes:
        read: the row of the state that it goes on from; 0 is its slot's.
        kept: the row that the state after its sequence's first `tokens` tokens is kept in; 0 for none. A step that
            tries tokens ahead keeps the one at the last page that it fills, if any.
    """

    read: int = 0
    kept: int = 0
    tokens: int = 0


class StatesFeature(Feature):
    """Rows of the layers' buffers: one for each slot, one for padding, and then one for each state of a prefix."""

    name = "states"
    on = ("decode", "verify", "backbone")
    always = True

    def __init__(self, first_row: int, num_rows: int):
        """`num_rows` states of prefixes can be kept, from `first_row` on."""
        self.cache = StateCache(first_row, num_rows)

    def attach(self, around: Surroundings) -> None:
        self.cache, self._pool = StateCache(self.cache.first_row, self.cache.num_rows), around.pool
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
        """As many of the pages as lead to a state, the longest that there is one for.

        A part of the pages would be of no use, so that a request waits for a longer one that a step keeps.
        """
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

    def cut(self, request: Request, extra: _StateRows, start: int, length: int) -> int:
        """So that a chunk ends where a state is wanted and none would be kept."""
        branch = extra.branches_at if extra.found is None else self._branch(extra.found)
        size = self._pool.page_size
        kept_anyway = (request.num_total - 1) // size * size
        return branch - start if start < branch < start + length and branch != kept_anyway else length

    def _branch(self, found: FoundPrefix) -> int:
        """Where more pages are known than lead to a state, other requests begin as this one does: after so many tokens
        a state is kept too when it comes by; 0 for none.
        """
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
        """The host knows the request's first `num_tokens` tokens, whose pages are full: others find a state there.

        Of an answer only the last one is kept.
        """
        row = extra.reserved.take(num_tokens)
        if row and self.cache.keep(request.prefix_node, row) and num_tokens > request.num_prompt:
            self.cache.discard(extra.answer_node)
            extra.answer_node = request.prefix_node

    def release(self, request: Request, extra: _StateRows) -> None:
        """Of what its steps were to keep nothing will be found."""
        for row in extra.reserved.rows:
            self.cache.release(row)
        extra.reserved.clear()
        extra.answer_node = None

    def check(self) -> None:
        self.cache.check([])

    # ------------------------------------------------------------ a step

    def fields(self, key: Key, sizes: StepSizes) -> dict[str, tuple[int, ...]]:
        """The row that each sequence is resumed from, the one that another state is kept in, and after how many tokens.

        A step that tries tokens ahead finds the last by itself.
        """
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
        """A slot's own row has its number; those that are kept come after the last slot's.

        A state is kept by the step that runs the token it comes after, where the host has named one of several.
        """
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
