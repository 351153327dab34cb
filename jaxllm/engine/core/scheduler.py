"""The choice of the tokens that run in the next step, and of how many more each request may be given."""

from __future__ import annotations

import bisect
import time
from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.engine.core.fair_queue import FairQueue, Sharers, gives_way, in_turn, preempted_first, prompt_shares
from jaxllm.engine.core.feature import EVERYTHING, Feature
from jaxllm.engine.core.handle import Result
from jaxllm.engine.core.pages import PagePool, PrefixNode, find_prefix
from jaxllm.engine.core.registry import Features
from jaxllm.engine.core.request import Batch, Chunk, Request, Status
from jaxllm.models.config import LengthRule


class Ahead:
    """The number of tokens that a step can give each request: more than one if all requests decode. If the host has a
    say in what the tokens are, they can only be tried, and the host chooses among them.
    """

    def __init__(
        self,
        pool: PagePool,
        max_model_len: int,
        features: Features,
        length_rule: LengthRule | None = None,
        decode_steps: int = 1,
    ):
        """`decode_steps` is the most tokens that a decode gives without trying any."""
        self.pool = pool
        self.max_model_len = max_model_len
        self._features = features
        self.length_rule = length_rule
        self.decode_steps = decode_steps

    def num_steps(self, requests: Sequence[Request]) -> int:
        """The number of tokens that a decode that tries none can give each of these requests.

        A request may be given more than it will take, when a stop is among them or its length is reached, but not when
        all of them would be.
        """
        running = _unfilled(requests)
        if self.decode_steps == 1 or not running:
            return 1
        longest = max(r.max_total - r.num_total for r in running)
        steps = min(self.decode_steps, self.pool.page_size, longest)  # a sequence gains one page at most
        fits = all(r.num_total + steps <= self.max_model_len and not self.outgrown(r, steps) for r in running)
        free = all(self._features.course(r) is None for r in running)
        return steps if fits and free and self._all_decode(running, steps, steps) else 1

    def most_ahead(self, requests: Sequence[Request]) -> int:
        """The number of tokens that a step may try ahead with each of these requests.

        If something is late, such steps are not compiled with features that are rare.
        """
        running = _unfilled(requests)
        found = (feature.ahead(running, len(requests)) for feature in self._features.having(Feature.ahead))
        most = max(found, default=0)
        if not most:
            return 0
        late = any(self._features.course(r) is not None for r in running)
        if late and any(f.rare and "verify" in f.on for r in running for f, _ in self._features.of(r)):
            return 0
        return most if self._all_decode(running, 1, 1 + most) else 0

    def awaits_text(self, requests: Sequence[Request]) -> bool:
        """Tokens may be tried ahead with these requests once the host has read what is in flight of them: it
        chooses what is tried of those whose text it knows the course of.
        """
        unread = any(r.num_inflight and self._features.course(r) is not None for r in requests)
        return unread and self.most_ahead(requests) > 0

    def further(self, request: Request, batch: Batch) -> int:
        """The number of tokens that this step may run of the request after those that are known now."""
        if not batch.most_ahead:
            return batch.num_steps - 1
        deep = self._features.of(request, Feature.depth)
        depths = [feature.depth(request, extra, batch.most_ahead) for feature, extra in deep]
        limits = [max(depths, default=0), request.max_total - request.num_total - 1]
        limits.append(self._features.certain(request) - request.num_inflight - 1)
        rule = self.length_rule
        if rule is not None and rule.all_or_none and request.rotary_len <= rule.original_length:
            limits.append(rule.original_length - request.num_total - 1)
        return max(0, min(limits))

    def outgrown(self, request: Request, more: int = 0) -> bool:
        """Its next token, or `more` after that, makes it too long for the rotary embedding of its pages."""
        rule, length = self.length_rule, request.num_total + more
        return rule is not None and rule.all_or_none and request.rotary_len <= rule.original_length < length

    def _all_decode(self, running: Sequence[Request], certain: int, most: int) -> bool:
        """One step can give each of these requests `certain` tokens, and up to `most` of them.

        It can where all decode, no feature must see their tokens first, and there are pages for the most.
        """
        missing = sum(self.pool.pages_for(r.num_computed + most) - len(r.pages) for r in running)
        return missing <= self.pool.num_free and all(
            r.num_total - r.num_computed == 1
            and r.num_inflight + certain <= self._features.certain(r)
            and not self._features.apart(r, range(r.num_computed, EVERYTHING))
            for r in running
        )


def _unfilled(requests: Sequence[Request]) -> list[Request]:
    """The requests whose tokens in flight do not fill their length already."""
    return [request for request in requests if request.num_total < request.max_total]


@dataclass
class SchedulerStats:
    """Counters since start."""

    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


class Scheduler:
    """Owns the queues. One token budget a step serves running requests in order, then new ones.

    Requests go by priority, then by arrival. When pages run out the last in that order is preempted: its pages go back,
    and it is recomputed later from the tokens it has. Nothing is ever aborted for lack of pages.

    If requests of several groups wait or run at one priority, the groups take turns and share a step's prompt
    tokens, and the one with most running is preempted first, also where another's request finds no slot or no page.
    """

    def __init__(
        self,
        pool: PagePool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        length_rule: LengthRule | None = None,
        decode_steps: int = 1,
        features: Features | None = None,
    ):
        self.features = features if features is not None else Features()
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.ahead = Ahead(pool, max_model_len, self.features, length_rule, decode_steps)
        self.waiting = FairQueue()
        self.running: list[Request] = []
        """In order as well."""
        self.stats = SchedulerStats()
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, request: Request) -> None:
        """Queue a request in its place."""
        self.waiting.add(request)

    def finish(self, request: Request) -> None:
        """Take a request out, whatever it is doing; its pages are free for the next step."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._release(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        self.waiting.charge(request, request.num_output)

    def schedule(self, *, admitting: bool = True) -> Batch:
        """Choose the next step's chunks and give them pages. Empty when there is nothing to run.

        Without `admitting` only requests go on that run; one that is preempted then waits.
        """
        for feature in self.features.having(Feature.begin_step):
            feature.begin_step()
        favoured = self._make_way() if admitting else None
        tries = not self._admits(admitting) and not self.ahead.awaits_text(self.running)
        most_ahead = self.ahead.most_ahead(self.running) if tries else 0
        batch = Batch(most_ahead=most_ahead, unsettled=any(r.num_unsettled for r in self.running))
        batch.num_steps = 1 if batch.tries or self._admits(admitting) else self.ahead.num_steps(self.running)
        preemptions = self.stats.preemptions
        budget, shares = self.max_num_batched_tokens, self._shares()
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            if self.ahead.outgrown(request):
                request.rotary_len = request.num_total
                self._preempt(request)
                continue
            remaining = self._remaining(request)
            room = self._room(request, budget, shares) if remaining > 1 else budget
            length = self._cut(request, request.num_computed, min(remaining, room), budget)
            if length and not self._make_room(request, length + self.ahead.further(request, batch), index):
                continue  # the request itself was preempted
            if length:
                self._run(request, length, batch)
                budget -= _taken(request, length, shares)
            index += 1
        if admitting and self.stats.preemptions == preemptions:  # else the preempted would come straight back
            self._admit(batch, budget, shares, favoured)
        batch.chunks.sort(key=lambda chunk: chunk.length > 1)  # stable: one-token chunks first
        batch.num_decodes = sum(chunk.length == 1 for chunk in batch.chunks)
        return batch

    def awaits_text(self, *, admitting: bool = True) -> bool:
        """The next step could try tokens ahead if the step under way were read before it is scheduled."""
        return not self._admits(admitting) and self.ahead.awaits_text(self.running)

    def _admits(self, admitting: bool) -> bool:
        """A request may begin. Waiting requests come first: nothing is tried ahead then."""
        return bool(admitting and self.waiting and self._free_slots)

    def settle(self, result: Result) -> None:
        """The device has taken all but the last token that it gave of those that a step tried ahead with a request."""
        request, tried, refused = result.request, result.num_reserved, result.num_reserved - len(result.tokens) + 1
        request.num_inflight -= refused
        request.num_unsettled -= tried
        if request.status is Status.RUNNING:
            request.num_computed -= refused
        for feature, extra in self.features.of(request, Feature.settled):
            feature.settled(request, extra, result)

    def accept(self, request: Request, tokens: Sequence[int], num_sampled: int) -> None:
        """`tokens` follow those that the host has seen, and `num_sampled` are no longer in flight.

        They may be fewer (a stop among them, a row withdrawn) or more (a grammar forces what follows).
        """
        request.num_inflight -= num_sampled
        request.token_ids += tokens
        if request.status is Status.RUNNING:
            self._register_full_pages(request)

    def _remaining(self, request: Request) -> int:
        """Tokens that could run now; none when the tokens in flight already fill the request's length."""
        return request.num_total - request.num_computed if request.num_total < request.max_total else 0

    def prefix_root(self, request: Request) -> PrefixNode:
        """Pages are shared only among requests whose positions are rotated alike."""
        rule = self.ahead.length_rule
        if rule is None or request.rotary_len <= rule.original_length:
            return request.cache_root
        return (request.cache_root, "long" if rule.all_or_none else request.rotary_len)

    def _make_way(self) -> Request | None:
        """Preempt requests of a group that has more running for one of another that waits for a slot or for pages.

        Returns the request that they gave way to, which alone is admitted now: they would come straight back. It is the
        first in turn to which any gives way: whose turn it is may have most running, and cannot begin.
        """
        ready = [request for request in self._turns() if not request.num_inflight and self._has_places(request)]
        if not ready or self._fits(ready[0]):
            return None
        for request in ready:
            victim = gives_way(self.running, request)
            if victim is None:
                continue
            while victim is not None and not self._fits(request):
                self._preempt(victim)
                victim = gives_way(self.running, request)
            return request
        return None

    def _turns(self) -> Sequence[Request]:
        """The first waiting request of each group, in the order in which they are admitted."""
        return in_turn(self.waiting.heads(), self.running)

    def _has_places(self, request: Request) -> bool:
        """A waiting request can begin, as far as its features know."""
        return all(feature.fits(request, extra) for feature, extra in self.features.of(request, Feature.fits))

    def _fits(self, request: Request) -> bool:
        """There is a slot for a waiting request, and as many pages as its first chunk may need."""
        first_chunk = min(len(request.token_ids), self.max_num_batched_tokens)
        return bool(self._free_slots) and self.pool.pages_for(first_chunk) <= self.pool.num_free

    def _shares(self) -> dict[Sharers, int]:
        """The most prompt tokens that this step runs of each group; empty where there is one group."""
        if len(self.waiting.groups | {request.group for request in self.running}) < 2:
            return {}
        running = ((request, self._remaining(request)) for request in self.running)
        first = self.waiting.first(len(self._free_slots), self.max_num_batched_tokens)
        admissible = [request for request in first if self._has_places(request) and self._fits(request)]
        return prompt_shares(running, admissible, self.max_num_batched_tokens)

    def _room(self, request: Request, budget: int, shares: dict[Sharers, int]) -> int:
        """The number of further tokens of the request's prompt that this step may run."""
        return max(0, min(budget, shares.get((request.priority, request.group), budget)))

    def _make_room(self, request: Request, length: int, index: int) -> bool:
        """Pages for `length` more tokens, preempting from the end. False when `request` itself had to go.

        It is at `index` among those that run; the ones before it have their place in the step.
        """
        while True:
            missing = self.pool.pages_for(request.num_computed + length) - len(request.pages)
            pages = self.pool.allocate(missing) if missing > 0 else []
            if pages is not None:
                request.pages.extend(pages)
                return True
            victim = preempted_first(self.running, index)
            self._preempt(victim)
            if victim is request:
                return False

    def _preempt(self, request: Request) -> None:
        self.stats.preemptions += 1
        request.num_preemptions += 1
        self.running.remove(request)
        self._release(request)
        request.status = Status.WAITING
        self.add(request)

    def _release(self, request: Request) -> None:
        self.pool.release(request.pages)
        self._free_slots.append(request.slot)
        request.pages = []
        request.num_computed = request.num_registered = 0
        request.prefix_node = None
        request.slot = -1
        for feature, extra in self.features.of(request, Feature.release):
            feature.release(request, extra)

    def _admit(self, batch: Batch, budget: int, shares: dict[Sharers, int], favoured: Request | None) -> None:
        """Start waiting requests in turn while there is budget, a slot, and pages for their first chunk.

        A request that some feature has no place for waits, and all after it, until another request has ended.
        """
        while self.waiting and budget > 0 and self._free_slots:
            length: int | None = 0
            for request in self._turns():
                room = self._room(request, budget, shares)
                if room > 0 and favoured in (None, request) and not request.num_inflight:
                    length = self._start(request, room, budget, batch)
                if length != 0:
                    break
            if not length:
                return
            budget -= _taken(request, length, shares)

    def _start(self, request: Request, room: int, budget: int, batch: Batch) -> int | None:
        """Admit a request with up to `room` tokens, and return how many; see `_cut` for more.

        The result is 0 if it had better wait for a step that is under way, so that others may begin, and None if there
        are no pages or places for it, which others must not take before it.
        """
        if not self._has_places(request):
            return None
        found = find_prefix(self.pool, self.features, request, self.prefix_root(request))
        if found is None:
            return 0
        cached, start = found.pages, found.depth * self.pool.page_size
        length = self._cut(request, start, min(len(request.token_ids) - start, room), budget)
        pages = self.pool.allocate(self.pool.pages_for(start + length) - len(cached)) if length else None
        if pages is None:
            self.pool.release(cached)
            return None if length else 0
        if not request.num_preemptions:  # it was charged when it was first admitted
            self.waiting.charge(request, len(request.token_ids) - start)
        self.waiting.remove(request)
        if request.num_cached < 0:
            request.num_cached = start
            self.stats.prefix_queries += request.num_prompt
            self.stats.prefix_hits += start
        request.pages = cached + pages
        request.num_computed = start
        request.num_registered, request.prefix_node = len(cached), found.node
        request.slot = self._free_slots.pop()
        request.status = Status.RUNNING
        for feature, extra in self.features.of(request, Feature.place):
            feature.place(request, extra, found)
        request.first_scheduled_time = request.first_scheduled_time or time.time()
        bisect.insort(self.running, request, key=lambda r: r.order)
        batch.admitted.append(request)
        self._run(request, length, batch)
        return length

    def _cut(self, request: Request, start: int, length: int, most: int) -> int:
        """Tokens of a chunk that begins at `start`: `length` at most, or up to `most` that cannot be parted."""
        for feature, extra in self.features.of(request, Feature.cut):
            length = feature.cut(request, extra, start, length, most)
        return length

    def _run(self, request: Request, length: int, batch: Batch) -> None:
        start, further = request.num_computed, self.ahead.further(request, batch)
        num_sampled = 1 + further if start + length == request.num_total else 0
        chunk = Chunk(request, start, length, num_sampled)
        batch.chunks.append(chunk)
        for feature, extra in self.features.of(request, Feature.scheduled):
            feature.scheduled(chunk, extra, further, tries=batch.most_ahead > 0)
        request.num_computed += length + further
        request.num_inflight += num_sampled
        if batch.most_ahead:
            request.num_unsettled += further
        if request.extras:
            chunk.apart = self.features.apart(request, range(start, start + length))
            batch.late |= num_sampled > 0 and self.features.is_late(request)
        self._register_full_pages(request)

    def _register_full_pages(self, request: Request) -> None:
        """Full pages whose tokens are known become findable, also to a request that begins in the same step: steps run
        in order, and a layer writes all keys and values of a step before any of its tokens attends.
        """
        size = self.pool.page_size
        known = min(request.num_computed, len(request.token_ids))
        while (request.num_registered + 1) * size <= known:
            index = request.num_registered
            tokens = self.features.keys(request, index * size, (index + 1) * size)
            request.prefix_node = self.pool.register(request.pages[index], request.prefix_node, tokens)
            request.num_registered += 1
            for feature, extra in self.features.of(request, Feature.registered):
                feature.registered(request, extra)


def _taken(request: Request, length: int, shares: dict[Sharers, int]) -> int:
    """`length`, which is no longer in its group's share; a decode is outside of it."""
    kind = (request.priority, request.group)
    if length > 1 and kind in shares:
        shares[kind] -= length
    return length
