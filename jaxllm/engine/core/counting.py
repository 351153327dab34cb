"""What one core counts while it runs, and what it says of itself at a moment."""

from __future__ import annotations

import bisect
import time

import msgspec

from jaxllm.engine.core.handle import RanStep, StepKind
from jaxllm.engine.core.pages import PagePool
from jaxllm.engine.core.request import Request
from jaxllm.engine.core.runner import Runner
from jaxllm.engine.core.scheduler import Scheduler
from jaxllm.engine.core.work import Batch
from jaxllm.engine.messages import STEP_TOKENS, EngineStats

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
        """A step's results are on the host, which has waited for them for so many seconds."""
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

    def snapshot(self, scheduler: Scheduler, pool: PagePool, runner: Runner, num_preparing: int) -> EngineStats:
        """The sums, and how things are now."""
        now, compiles = scheduler.stats, runner.compiles
        return msgspec.structs.replace(
            self.so_far,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_preparing=num_preparing,
            num_preemptions=now.preemptions,
            num_pages=pool.num_pages - 1,
            num_free_pages=pool.num_free,
            page_size=pool.page_size,
            prefix_cache_queries=now.prefix_queries,
            prefix_cache_hits=now.prefix_hits,
            steps_by_tokens=list(self.so_far.steps_by_tokens),
            scheduled_tokens=dict(runner.scheduled_tokens),
            padded_tokens=dict(runner.padded_tokens),
            compiles_foreseen=compiles.foreseen,
            compiles_unforeseen=compiles.unforeseen,
            compile_seconds=compiles.seconds,
            compiles_pending=compiles.pending,
            ready=True,
        )
