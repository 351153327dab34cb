"""What a dispatched step will give, and to whom."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxllm.engine.device.choice import Sampled
from jaxllm.engine.device.page_blocks import PageBlocks
from jaxllm.engine.device.ran_step import RanStep
from jaxllm.engine.device.sampler import Logprobs
from jaxllm.engine.offload.host_pages import Page
from jaxllm.engine.offload.prefix_digests import Digest
from jaxllm.engine.request import Request


class Score(NamedTuple):
    """Prompt log-probabilities under way: row `row + i` of `result` is of `request`'s token at `positions[i]`."""

    request: Request
    positions: range
    row: int
    result: Any
    """Logprobs, or `[R, V]` log-probabilities of the whole vocabulary; several requests may have rows of it."""


class PooledRow(NamedTuple):
    """Whose values a row holds, and how many; the `first` of a request's rows and the `last` may be the same."""

    request: Request
    width: int
    first: bool
    last: bool


class Pooled(NamedTuple):
    """Values under way for requests that pool: row i of `result` is `rows[i]`."""

    rows: list[PooledRow]
    result: Any


class Recorded(NamedTuple):
    """Activations under way for one request: of the tokens at `positions`, in `rows` of `result`."""

    request: Request
    positions: list[int]
    places: list[int]
    """Where those that it asks for are in `result`."""
    rows: list[int]
    result: Any
    """`[N, R, E]`; several requests may have rows of it."""

    def values(self) -> np.ndarray:
        """`[activations, positions, E]` float32."""
        return np.asarray(self.result)[np.ix_(self.places, self.rows)].astype(np.float32)


class SampledRow(NamedTuple):
    """A request that is given a token: from which row of hidden states."""

    request: Request
    row: int


class Vocabularies(NamedTuple):
    """Log-probabilities of whole vocabularies under way: row i of `result`, `[R, V]`, is of the token of `rows[i]`."""

    rows: list[SampledRow]
    result: Any


class LeavingPages(NamedTuple):
    """Pages, or states, on their way to the host, and what they are called there."""

    digests: list[Digest]
    arrays: Any
    """Of each buffer as many rows, or more."""
    blocks: PageBlocks

    def contents(self) -> list[Page]:
        """The pages, once they have arrived."""
        return self.blocks.split(self.arrays, len(self.digests))


class Result(NamedTuple):
    """The tokens that a step gave one request; the first of them is row `row` of what was sampled."""

    request: Request
    row: int
    tokens: list[int]
    num_drafted: int = 0
    """How many tokens the step tried ahead; all of `tokens` but the last are of them."""
    num_reserved: int = 0
    """How many it might have tried."""


@dataclass
class Handle:
    """A dispatched step. Row i of `sampled` is `rows[i]`'s.

    A decode of several tokens has `stride` rows of `sampled` for each of `rows`, of which the first `num_steps` are
    filled, or as many as the device has settled; `reserved` says how many drafts it might have tried with each.

    Where a grammar has a say, `waiting` holds the rows that are still to be sampled, once their masks are known.
    """

    rows: list[SampledRow] = field(default_factory=list)
    sampled: Sampled | None = None
    scores: list[Score] = field(default_factory=list)
    pooled: list[Pooled] = field(default_factory=list)
    vocabularies: list[Vocabularies] = field(default_factory=list)
    recorded: list[Recorded] = field(default_factory=list)
    waiting: list[SampledRow] = field(default_factory=list)
    num_steps: int = 1
    stride: int = 1
    reserved: list[int] = field(default_factory=list)
    ran: RanStep | None = None
    leaving: list[LeavingPages] = field(default_factory=list)
    further: list[Handle] = field(default_factory=list)
    """Other parts of the step, of which there is nothing to know but what they have sampled."""

    def wait(self) -> float:
        """Block until the step's results are on the host; returns the seconds it took."""
        began = time.perf_counter()
        for array in self.arrays():
            array.block_until_ready()
        return time.perf_counter() - began

    def arrays(self) -> list[jax.Array]:
        """Everything the step hands to the host; pages that leave are waited for elsewhere."""
        parts = (self.scores, self.pooled, self.vocabularies, self.recorded)
        sampled = [part.sampled for part in (self, *self.further)]
        return jax.tree.leaves((sampled, [part.result for several in parts for part in several]))

    def withdraw(self, request: Request) -> int:
        """Don't sample for `request`; returns how many rows of it waited."""
        kept = [row for row in self.waiting if row.request is not request]
        withdrawn = len(self.waiting) - len(kept)
        self.waiting = kept
        return withdrawn

    def results(self) -> list[Result]:
        """What was sampled, request by request; rows are those of `logprobs`."""
        found, before = [], 0
        for part in (self, *self.further):
            found += [result._replace(row=result.row + before) for result in part._own_results()]
            if part.sampled is not None and part.sampled.logprobs is not None:
                before += len(part.sampled.tokens)
        return found

    def _own_results(self) -> list[Result]:
        if self.sampled is None:
            return []
        tokens = np.asarray(self.sampled.tokens).tolist()
        settled = self.sampled.settled
        if settled is None:
            starts = range(0, len(self.rows) * self.stride, self.stride)
            return [
                Result(r.request, at, tokens[at : at + self.num_steps]) for r, at in zip(self.rows, starts, strict=True)
            ]
        results = []
        counts = zip(np.asarray(settled.drafted).tolist(), np.asarray(settled.taken).tolist(), strict=True)
        for index, (row, reserved, (drafted, taken)) in enumerate(zip(self.rows, self.reserved, counts, strict=False)):
            at = index * self.stride
            results.append(Result(row.request, at, tokens[at : at + 1 + taken], drafted, reserved))
        return results

    def vocabulary_of(self, request: Request) -> np.ndarray | None:
        """`[n, V]` log-probabilities of the whole vocabulary at each of the request's tokens, where it wants them."""
        places = [
            (found.result, index)
            for found in self.vocabularies
            for index, row in enumerate(found.rows)
            if row.request is request
        ]
        return np.stack([np.asarray(result)[index] for result, index in places]) if places else None

    def logprobs(self) -> Logprobs | None:
        """The sampled tokens' log-probabilities as NumPy arrays, where the step computed any."""
        parts = [part.sampled.logprobs for part in (self, *self.further) if part.sampled is not None]
        found = [on_host(logprobs) for logprobs in parts if logprobs is not None]
        return Logprobs(*map(np.concatenate, zip(*found, strict=True))) if found else None  # type: ignore[arg-type]


def on_host(logprobs: Logprobs) -> Logprobs:
    """The same, as NumPy arrays."""
    return Logprobs(*(np.asarray(a) for a in logprobs))  # type: ignore[arg-type]
