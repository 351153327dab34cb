"""A dispatched step: what it will give, and to whom; what it ran, and what is counted of that."""

from __future__ import annotations

import bisect
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import jax
import numpy as np

from jaxllm.engine.core.feature import Reading
from jaxllm.engine.core.keys import Key
from jaxllm.engine.core.request import Batch, Request
from jaxllm.engine.core.sampler import Logprobs, Sampled
from jaxllm.engine.messages import STEP_TOKENS, EngineStats


class SampledRow(NamedTuple):
    """A request that is given a token: from which row of hidden states."""

    request: Request
    row: int


class Result(NamedTuple):
    """The tokens that a step gave one request; the first of them is row `row` of what was sampled."""

    request: Request
    row: int
    tokens: list[int]
    num_drafted: int = 0
    """Tokens that the step tried ahead; all of `tokens` but the last are of them."""
    num_reserved: int = 0
    """The most tokens that it might have tried."""


@dataclass
class Handle:
    """A dispatched step. Row i of `sampled` is `rows[i]`'s.

    A decode of several tokens has `stride` rows of `sampled` for each of `rows`, of which the first `num_steps` are
    filled, or as many as the device has settled; `reserved` says how many it might have tried ahead with each.

    If features fill something in late, `waiting` holds the rows that are still to be sampled, once that is known.
    """

    rows: list[SampledRow] = field(default_factory=list)
    sampled: Sampled | None = None
    readings: list[Reading] = field(default_factory=list)
    """The arrays that features read of its hidden states."""
    waiting: list[SampledRow] = field(default_factory=list)
    num_steps: int = 1
    stride: int = 1
    reserved: list[int] = field(default_factory=list)
    ran: RanStep | None = None
    further: list[Handle] = field(default_factory=list)
    """Other parts of the step, of which there is nothing to know but what they have sampled."""

    def wait(self) -> float:
        """Block until the devices have filled the step's results; returns the seconds it took."""
        began = time.perf_counter()
        for array in self.arrays():
            array.block_until_ready()
        return time.perf_counter() - began

    def arrays(self) -> list[jax.Array]:
        """Everything that the step hands to the host."""
        sampled = [part.sampled for part in (self, *self.further)]
        return jax.tree.leaves((sampled, [reading.arrays for reading in self.readings]))

    def withdraw(self, request: Request) -> int:
        """Don't sample for `request`; returns how many rows of it waited."""
        kept = [row for row in self.waiting if row.request is not request]
        withdrawn = len(self.waiting) - len(kept)
        self.waiting = kept
        return withdrawn

    def results(self) -> list[Result]:
        """The sampled tokens, request by request; rows are those of `logprobs`."""
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

    def logprobs(self) -> Logprobs | None:
        """The sampled tokens' log-probabilities as NumPy arrays, where the step computed any."""
        parts = [part.sampled.logprobs for part in (self, *self.further) if part.sampled is not None]
        found = [on_host(logprobs) for logprobs in parts if logprobs is not None]
        return Logprobs(*map(np.concatenate, zip(*found, strict=True))) if found else None  # type: ignore[arg-type]


def on_host(logprobs: Logprobs) -> Logprobs:
    """The same, as NumPy arrays."""
    return Logprobs(*(np.asarray(a) for a in logprobs))  # type: ignore[arg-type]


StepKind = Literal["decode", "prefill"]
"""A decode gives each of its requests tokens; a prefill computes some prompt, perhaps beside others' decodes."""


class RanExecutable(NamedTuple):
    """An executable that a step has run."""

    key: Key
    used: int | None = None
    """Rows or tokens of its bucket that are some request's; None where they are not counted."""
    times: int = 1
    """The number of times that it runs the model, one token after the other."""


class RanSequence(NamedTuple):
    """A request's part of a step."""

    length: int
    """Tokens that are computed."""
    context: int
    """Tokens that its attention may see at the end, these among them."""


@dataclass
class RanStep:
    """One step: what it ran, for whom, and how long it took."""

    kind: StepKind
    executables: Sequence[RanExecutable]
    lengths: Sequence[int]
    """Tokens of each request that are computed."""
    contexts: Sequence[int]
    """Tokens of each request that its attention may see at the end."""
    dispatched: float
    """When it had been enqueued, on `time.perf_counter`'s clock."""
    seconds: float | None = None
    """From when the one before it had been read, or it was enqueued if that was later, until its results were on the
    host.
    """
    waited: bool = True
    """The host waited for it; otherwise it had ended some time before its results were looked at."""

    @classmethod
    def of(cls, batch: Batch, executables: Sequence[RanExecutable], dispatched: float) -> RanStep:
        """A step that has just been enqueued, noted in as little time as can be: every step is.

        Only the device knows of drafts that are still under way; the known ones count.
        """
        kind: StepKind = "decode" if batch.decode_only else "prefill"
        lengths = [chunk.length for chunk in batch.chunks]
        contexts = [min(chunk.start + chunk.length, len(chunk.request.token_ids) + 1) for chunk in batch.chunks]
        return cls(kind, executables, lengths, contexts, dispatched)

    @property
    def sequences(self) -> list[RanSequence]:
        """Each request's part of it."""
        return list(map(RanSequence, self.lengths, self.contexts))


SHORTEST_WAIT = 5e-5
"""Seconds: looking at a step that has ended takes less."""


class Counting:
    """`so_far` holds the sums; its gauges are those of no moment."""

    def __init__(self) -> None:
        self.so_far = EngineStats()
        self.last_steps: dict[StepKind, RanStep] = {}
        """The last one of each kind whose results have been read; the newest comes last."""
        self._read_at = 0.0
        """When a step's results were last on the host."""

    def step(self, batch: Batch) -> None:
        """A step was dispatched. A decode of several steps runs its rows as often."""
        tokens = sum(chunk.length for chunk in batch.chunks)
        self.so_far.step_tokens += tokens * batch.num_steps
        self.so_far.steps_by_tokens[bisect.bisect_left(STEP_TOKENS, tokens)] += batch.num_steps

    def note(self, ran: RanStep | None, waited: float) -> None:
        """A step's results are on the host, which has waited `waited` seconds for them."""
        now = time.perf_counter()
        if ran is not None:
            ran.seconds, ran.waited = now - max(ran.dispatched, self._read_at), waited > SHORTEST_WAIT
            self.last_steps.pop(ran.kind, None)
            self.last_steps[ran.kind] = ran
        self._read_at = now

    def prompt(self, request: Request) -> None:
        """A request's prompt has been computed."""
        self.so_far.prompt_tokens += request.num_prompt
        self.so_far.cached_prompt_tokens += max(request.num_cached, 0)
