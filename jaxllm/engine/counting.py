"""What one core counts while it runs, and what it says of itself at a moment."""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Iterable

import msgspec

from jaxllm.engine.device.handle import Result
from jaxllm.engine.device.ran_step import RanStep, StepKind
from jaxllm.engine.device.runner import Runner
from jaxllm.engine.messages import STEP_TOKENS, EngineStats
from jaxllm.engine.page_pool import PagePool
from jaxllm.engine.request import Request
from jaxllm.engine.scheduler import Scheduler
from jaxllm.engine.work import Batch

SHORTEST_WAIT = 5e-5
"""Seconds: looking at a step that has ended takes less."""


class Counting:
    """`so_far` holds the sums; its gauges are those of no moment."""

    def __init__(self, most_drafts: int):
        """`most_drafts` is how many tokens may be tried ahead with a sequence."""
        self.so_far = EngineStats(accepted_by_position=[0] * most_drafts)
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

    def drafts(self, result: Result) -> None:
        """A step tried tokens ahead with a request."""
        taken = len(result.tokens) - 1
        self.so_far.num_drafts += 1
        self.so_far.num_draft_tokens += result.num_drafted
        for place in range(taken):
            self.so_far.accepted_by_position[place] += 1
        result.request.num_drafted += result.num_drafted
        result.request.num_taken += taken

    def snapshot(self, scheduler: Scheduler, pool: PagePool, runner: Runner, num_preparing: int) -> EngineStats:
        """The sums, and how things are now."""
        now, compiles, tiers = scheduler.stats, runner.compiles, scheduler.tiers
        peers = None if tiers is None else tiers.peers
        pulls = None if peers is None else peers.pulls
        return msgspec.structs.replace(
            self.so_far,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_preparing=num_preparing,
            running_adapters=_adapters_of(scheduler.running) if scheduler.adapters.count else {},
            waiting_adapters=_adapters_of(scheduler.waiting) if scheduler.adapters.count else {},
            num_preemptions=now.preemptions,
            num_pages=pool.num_pages - 1,
            num_free_pages=pool.num_free,
            page_size=pool.page_size,
            prefix_cache_queries=now.prefix_queries,
            prefix_cache_hits=now.prefix_hits,
            offload_queries=now.offload_queries,
            offload_hits=now.offload_hits,
            num_host_pages=0 if tiers is None else tiers.num_host,
            num_disk_pages=0 if tiers is None else tiers.num_disk,
            num_pulls=0 if pulls is None else pulls.num_pulls,
            num_failed_pulls=0 if pulls is None else pulls.num_failed,
            pull_seconds=0.0 if pulls is None else pulls.seconds,
            num_pulled_pages=0 if pulls is None else pulls.num_pages,
            num_given_pages=0 if peers is None else peers.num_given,
            accepted_by_position=list(self.so_far.accepted_by_position),
            steps_by_tokens=list(self.so_far.steps_by_tokens),
            scheduled_tokens=dict(runner.scheduled_tokens),
            padded_tokens=dict(runner.padded_tokens),
            compiles_foreseen=compiles.foreseen,
            compiles_unforeseen=compiles.unforeseen,
            compile_seconds=compiles.seconds,
            compiles_pending=compiles.pending,
            ready=True,
        )


def _adapters_of(requests: Iterable[Request]) -> dict[str, int]:
    """How many requests use each adapter, by its name."""
    return dict(Counter(use.name for request in requests for use in request.adapters))
