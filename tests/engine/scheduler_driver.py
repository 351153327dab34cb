"""Drives the engine core over a simulated device, as an engine does, and checks each step that is scheduled."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from types import SimpleNamespace
from typing import Any
from unittest import mock

from jaxllm.engine.core.feature import Feature, Surroundings
from jaxllm.engine.core.loop import EngineCore
from jaxllm.engine.core.pages import PagePool
from jaxllm.engine.core.registry import Features
from jaxllm.engine.core.request import Batch, Request, Status
from jaxllm.engine.core.scheduler import Scheduler
from jaxllm.engine.features.adapters.adapters import AdapterPlaces, AdaptersFeature
from jaxllm.engine.features.drafts.feature import DraftsFeature
from jaxllm.engine.features.drafts.rules import DraftDepth, NgramDrafts
from jaxllm.engine.features.grammar.grammar import GrammarFeature
from jaxllm.engine.features.offload.tiers import PageTiers
from jaxllm.engine.features.scores import ScoresFeature
from jaxllm.engine.features.states import StatesFeature
from jaxllm.engine.messages import EngineRequest, EngineStats
from jaxllm.models.registry import AdaptedModel
from jaxllm.requests.sampling import SamplingParams
from jaxllm.requests.steering import AdapterUse
from tests.engine.simulated_device import VOCAB, SimulatedOffload, SimulatedRunner, alone, salted


def rows_of(use: AdapterUse) -> tuple[str, ...]:
    """What stands for the arrays of an adapter."""
    return (f"rows of {use.id}",)


class Driver:
    """The engine core with a simulated device under it; every step is checked."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        budget: int,
        caching: bool = True,
        stop: int | None = None,
        decode_steps: int = 1,
        snapshots: int | None = None,
        num_drafts: int = 0,
        places: int = 0,
        host_pages: int = 0,
    ):
        """`host_pages` are kept in host memory, states among them; without any, none is. `snapshots` is the number of
        states that can be kept, of a model whose layers have some; None is another.
        """
        self.pool = PagePool(num_pages, page_size, caching and snapshots != 0)
        self.max_model_len = (num_pages - 1) * page_size
        self.runner = SimulatedRunner(num_pages, page_size, has_states=snapshots is not None)
        listed: list[Feature] = [
            GrammarFeature(),
            AdaptersFeature(mock.Mock(spec=AdaptedModel), places),
            ScoresFeature(),
        ]
        self.num_drafts = num_drafts
        if num_drafts:
            listed.append(DraftsFeature(NgramDrafts(num_drafts, 1, 1), DraftDepth(num_drafts)))
        if snapshots is not None:
            listed.append(StatesFeature(max_num_seqs + 1, snapshots if caching else 0))
        if host_pages and caching:
            listed.append(SimulatedOffload(["page"]))
        sizes: Any = SimpleNamespace(
            max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, vocab_size=VOCAB, buffers_of=lambda paged: []
        )
        around = Surroundings(self.runner, sizes, self.pool, None, [])  # type: ignore[arg-type]
        self.features = Features(feature.attached(around) for feature in listed)
        self.runner.features = self.features
        self.states = self.features["states"].cache if "states" in self.features else None  # type: ignore[attr-defined]
        self.adapters: AdapterPlaces = self.features["adapters"].places  # type: ignore[attr-defined]
        self.features["adapters"].store = SimpleNamespace(known=rows_of)  # type: ignore[attr-defined]
        self.offload = next((f for f in self.features if isinstance(f, SimulatedOffload)), None)
        if self.offload is not None:
            self.offload.keep_in(PageTiers(self.pool, host_pages, has_states=snapshots is not None))
        self.scheduler = Scheduler(
            self.pool, max_num_seqs, budget, self.max_model_len, decode_steps=decode_steps, features=self.features
        )
        stops = [] if stop is None else [stop]
        self.core = EngineCore(self.scheduler, self.pool, self.runner, None, stops, features=self.features)  # type: ignore[arg-type]
        around.core = self.core
        self.stop = stop
        self.requests: list[Request] = []
        self.tokens: dict[str, list[int]] = {}
        """Prompt and what the deltas said."""
        self.done: dict[str, list[int]] = {}
        self.scored: dict[str, set[int]] = {}

    def stats(self) -> EngineStats:
        """What the features count, and how much of prompts was found."""
        now = self.scheduler.stats
        found = EngineStats(prefix_cache_queries=now.prefix_queries, prefix_cache_hits=now.prefix_hits)
        for feature in self.features:
            feature.stats(found, [], [])
        return found

    def add(
        self,
        prompt: list[int],
        *,
        max_tokens: int = 4,
        priority: int = 0,
        salt: str | None = None,
        score: bool = False,
        group: str = "",
        adapters: Collection[int] = (),
    ) -> Request:
        number = len(self.requests)
        self.core.add(
            EngineRequest(
                request_id=f"r{number}",
                prompt_token_ids=list(prompt),
                sampling_params=SamplingParams(max_tokens=max_tokens, prompt_logprobs=0 if score else None),
                arrival_time=float(number),
                priority=priority,
                cache_salt=salt,
                group=group,
                adapters=tuple(AdapterUse(number, f"adapter {number}", "") for number in adapters),
            )
        )
        request = next(r for r in self.scheduler.waiting if r.request_id == f"r{number}")
        self.requests.append(request)
        self.tokens[request.request_id] = list(prompt)
        self.scored[request.request_id] = set()
        return request

    @property
    def groups(self) -> set[str]:
        return {request.group for request in self.requests}

    def abort(self, request: Request) -> None:
        self.core.abort([request.request_id])

    def step(self) -> Batch:
        """One turn of the engine: a step is scheduled and dispatched, then the one before it is read."""
        ran_before = list(self.scheduler.running)
        preemptions = self.scheduler.stats.preemptions
        schedule, batches = self.scheduler.schedule, []

        def checked(**options: bool) -> Batch:
            batch = schedule(**options)
            self.check(batch, ran_before)
            if self.scheduler.stats.preemptions > preemptions:
                assert len(batch.admitted) <= len(self.groups) - 1, "the preempted would come straight back"
            batches.append(batch)
            return batch

        self.scheduler.schedule = checked  # type: ignore[method-assign]
        try:
            deltas = self.core.turn()
            if not batches:  # where groups take turns, a step with prompts is read in a turn of its own
                deltas += self.core.turn()
        finally:
            self.scheduler.schedule = schedule  # type: ignore[method-assign]
        for delta in deltas:
            assert delta.error is None, delta.error
            self.tokens[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                self.done[delta.request_id] = self.tokens[delta.request_id]
        self.pool.check([r.pages for r in self.scheduler.running])
        self.adapters.check([r.extras["adapters"].ids for r in self.scheduler.running if "adapters" in r.extras])
        if self.offload is not None:
            self.offload._kept.wait()
        if self.states is not None:
            self.states.check([row for r in self.scheduler.running for row in r.extras["states"].reserved.rows])
        return batches[0]

    def finish(self) -> None:
        """Run everything to its end; then nothing may be held."""
        turns = 0
        while self.core.has_work:
            self.step()
            turns += 1
            assert turns < 2000, "the scheduler makes no progress"
        self.pool.check([])
        if self.states is not None:
            self.states.check([])
        assert self.pool.num_free == self.pool.num_pages - 1
        assert sorted(self.scheduler._free_slots) == list(range(self.scheduler.max_num_seqs))

    def check_tokens(self) -> None:
        """Every request that was not aborted has the tokens it would have had alone."""
        for request in self.requests:
            assert request.status is Status.FINISHED
            prompt = request.token_ids[: request.num_prompt]
            asked = request.extras.get("adapters")
            salt = salted(request.cache_root, [] if asked is None else [rows_of(use) for use in asked.uses])
            expected = alone(prompt, salt, request.max_total, self.stop)
            if request.request_id in self.done:
                assert self.done[request.request_id] == expected
            else:
                assert request.token_ids == expected[: len(request.token_ids)]  # aborted on the way

    def check(self, batch: Batch, ran_before: list[Request]) -> None:
        scheduler, running = self.scheduler, self.scheduler.running
        assert batch.num_tokens <= scheduler.max_num_batched_tokens
        assert len(running) <= scheduler.max_num_seqs
        slots = [r.slot for r in running]
        assert len(set(slots)) == len(slots) and all(0 <= slot < scheduler.max_num_seqs for slot in slots)
        assert [r.order for r in running] == sorted(r.order for r in running)
        assert [r.order for r in scheduler.waiting] == sorted(r.order for r in scheduler.waiting)
        assert all(r.status is Status.WAITING and not r.pages and r.slot == -1 for r in scheduler.waiting)

        lengths = [chunk.length for chunk in batch.chunks]
        assert lengths == sorted(lengths, key=lambda n: n > 1)
        assert batch.num_decodes == lengths.count(1)
        assert len({id(chunk.request) for chunk in batch.chunks}) == len(batch.chunks)
        assert 1 <= batch.num_steps <= min(scheduler.ahead.decode_steps, self.pool.page_size)
        assert batch.num_steps == 1 or (
            batch.decode_only and not (scheduler.waiting and scheduler._free_slots) and not batch.admitted
        )
        most = 1 + batch.most_ahead if batch.tries else batch.num_steps
        assert not batch.tries or batch.num_steps == 1
        assert not batch.most_ahead or (batch.decode_only and not batch.admitted)
        assert batch.tries or not any(r.num_unsettled for r in running), "the host does not know where it is"
        for chunk in batch.chunks:
            request, end = chunk.request, chunk.start + chunk.length
            written = end + max(chunk.num_sampled, 1) - 1
            assert request in running and chunk.length >= 1
            assert written == request.num_computed, "chunks of a request follow one another"
            assert written < scheduler.max_model_len
            assert end < request.max_total, "the last token is never run: nothing would be sampled from it"
            in_flight = request.num_inflight - chunk.num_sampled
            assert 0 <= in_flight <= max(scheduler.ahead.decode_steps, 1 + self.num_drafts)
            total = len(request.token_ids) + in_flight
            fewest = 1 if batch.tries else most
            assert end <= total
            assert fewest <= chunk.num_sampled <= most if end == total else chunk.num_sampled == 0
            assert total + chunk.num_sampled <= request.max_total or not batch.tries
            known, needed = self.pool.pages_for(written + self.num_drafts), self.pool.pages_for(written)
            assert needed <= len(request.pages) <= known, "those for refused drafts are used next"
            if request.params.prompt_logprobs is not None:
                self.scored[request.request_id] |= set(range(chunk.start, written))
                assert set(range(written)) <= self.scored[request.request_id], "every logit of the prompt is needed"
        self.check_sharing(running)

        preempted = [r for r in ran_before if r.status is Status.WAITING]
        for group in self.groups:
            gone, there = of(group, preempted), of(group, running)
            if gone and there:
                assert min(r.order for r in gone) > max(r.order for r in there), "the last goes first"
            admitted, waiting = of(group, batch.admitted), of(group, scheduler.waiting)
            if admitted and waiting:
                assert max(r.order for r in admitted) < min(r.order for r in waiting), "somebody jumped the queue"
        if batch.admitted and scheduler.waiting:
            most_urgent = min(r.priority for r in scheduler.waiting)
            assert max(r.priority for r in batch.admitted) <= most_urgent, "a group's turn came before priority"

    def check_sharing(self, running: list[Request]) -> None:
        """Requests share only pages that none of them will write again."""
        owners: dict[int, list[Request]] = {}
        for request in running:
            assert len(set(request.pages)) == len(request.pages)
            for page in request.pages:
                owners.setdefault(page, []).append(request)
        for page, sharers in owners.items():
            if len(sharers) > 1:
                places = {request.pages.index(page) for request in sharers}
                assert len(places) == 1
                end = (places.pop() + 1) * self.pool.page_size
                assert all(request.num_computed >= end for request in sharers)


def of(group: str, requests: Iterable[Request]) -> list[Request]:
    return [request for request in requests if request.group == group]
