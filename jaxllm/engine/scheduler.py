"""Which tokens run in the next step."""

from __future__ import annotations

import bisect
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from jaxllm.engine.page_pool import PagePool, PrefixNode
from jaxllm.engine.request import Request, Status
from jaxllm.engine.state_cache import StateCache
from jaxllm.models.config import LengthRule


@dataclass
class Chunk:
    """Tokens `start … start + length - 1` of one request; if `num_sampled` is not 0, its end chooses new tokens.

    A decode may choose several, one behind another: every one of them but the last is run as well. Where drafts are
    tried, `num_sampled` is the most it can be, and so is `start` as long as a step before has not been read.
    """

    request: Request
    start: int
    length: int
    num_sampled: int
    state_read: int = 0
    """The row of the state that it goes on from; 0 is its slot's."""
    state_kept: int = 0
    """The row that the state after its sequence's first `kept_tokens` tokens is kept in; 0 for none."""
    kept_tokens: int = 0


@dataclass
class Batch:
    """One step's work: chunks of one token come first, in the kernels' order."""

    chunks: list[Chunk] = field(default_factory=list)
    num_decodes: int = 0
    """Leading chunks of exactly one token."""
    admitted: list[Request] = field(default_factory=list)
    num_steps: int = 1
    """How many tokens a decode gives each request, one after another."""
    drafts: bool = False
    """A decode tries as many drafted tokens with each request as its chunk may sample, less one."""
    masked: bool = False
    """The host has a say in some token that is sampled, once it has seen the one before: a grammar's, or a budget's."""

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def decode_only(self) -> bool:
        """Every chunk is one token that samples, and nothing else is read from its hidden states: one executable does
        it all.
        """
        return all(chunk.length == 1 and chunk.num_sampled and not chunk.request.reads_hidden for chunk in self.chunks)


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
    """

    def __init__(
        self,
        pool: PagePool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        length_rule: LengthRule | None = None,
        decode_steps: int = 1,
        states: StateCache | None = None,
        num_drafts: int = 0,
    ):
        """`states` are kept for a model whose layers have some; without them no prefix of such a model is shared.

        `num_drafts` is the most tokens that a decode tries ahead with each request.
        """
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.length_rule = length_rule
        self.decode_steps = decode_steps
        self.num_drafts = num_drafts
        self.states = states
        if states is not None:
            pool.on_forget = states.forget
        self.waiting: deque[Request] = deque()
        """In order: preempted requests go back to their place."""
        self.running: list[Request] = []
        """In order as well."""
        self.stats = SchedulerStats()
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, request: Request) -> None:
        """Queue a request in its place."""
        if not self.waiting or request.order > self.waiting[-1].order:
            self.waiting.append(request)
            return
        place = bisect.bisect([r.order for r in self.waiting], request.order)
        self.waiting.insert(place, request)

    def finish(self, request: Request) -> None:
        """Take a request out, whatever it is doing; its pages are free for the next step."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._release(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        request.status = Status.FINISHED

    def schedule(self) -> Batch:
        """Choose the next step's chunks and give them pages. Empty when there is nothing to run."""
        if self.states is not None:
            self.states.begin_step()
        batch = Batch(num_steps=self._num_steps(), drafts=self._may_draft())
        preemptions = self.stats.preemptions
        budget = self.max_num_batched_tokens
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            if self._outgrown(request):
                request.rotary_len = request.num_total
                self._preempt(request)
                continue
            length = self._up_to_branch(request, min(self._remaining(request), budget), request.num_computed)
            if length and not self._make_room(request, length + self._further(request, batch)):
                break  # the request itself was preempted, and it was the last
            if length:
                self._run(request, length, batch)
                budget -= length
            index += 1
        if self.stats.preemptions == preemptions:  # else the preempted would come straight back
            self._admit(batch, budget)
        batch.chunks.sort(key=lambda chunk: chunk.length > 1)  # stable: one-token chunks first
        batch.num_decodes = sum(chunk.length == 1 for chunk in batch.chunks)
        return batch

    def settle(self, request: Request, num_drafted: int, num_taken: int) -> None:
        """Of the tokens that a step tried ahead with a request, the device has taken the first `num_taken`."""
        request.num_inflight -= num_drafted - num_taken
        if request.status is Status.RUNNING:
            request.num_computed -= num_drafted - num_taken

    def accept(self, request: Request, tokens: Sequence[int], num_sampled: int) -> None:
        """`tokens` follow those that the host has seen, and `num_sampled` are no longer in flight.

        They may be fewer (a stop among them, a row withdrawn) or more (a grammar forces what follows).
        """
        request.num_inflight -= num_sampled
        request.token_ids += tokens
        if request.status is Status.RUNNING:
            self._register_full_pages(request)

    def _num_steps(self) -> int:
        """How many tokens each request can be given before anybody needs the host.

        A request may be given more than it will take, when a stop is among them or its length is reached, but not when
        all of them would be.
        """
        running = [r for r in self.running if r.num_total < r.max_total]
        if self.decode_steps == 1 or self.waiting or not running:
            return 1
        longest = max(r.max_total - r.num_total for r in running)
        steps = min(self.decode_steps, self.pool.page_size, longest)  # a sequence gains one page at most
        fits = all(r.num_total + steps <= self.max_model_len and not self._outgrown(r, steps) for r in running)
        return steps if fits and self._all_decode(running, steps, steps) else 1

    def _may_draft(self) -> bool:
        """Whether this step tries tokens ahead. Requests that wait come first: a step that admits them does not."""
        running = [r for r in self.running if r.num_total < r.max_total]
        return bool(self.num_drafts) and not self.waiting and self._all_decode(running, 1, 1 + self.num_drafts)

    def _all_decode(self, running: Sequence[Request], certain: int, most: int) -> bool:
        """Whether one step can give each of these requests `certain` tokens, and up to `most` of them.

        It can where all decode, the host has no say in what the tokens are, and there are pages for the most of them.
        """
        missing = sum(self.pool.pages_for(r.num_computed + most) - len(r.pages) for r in running)
        return missing <= self.pool.num_free and all(
            r.num_total - r.num_computed == 1
            and r.constraint is None
            and (r.thinking is None or r.num_inflight + certain <= r.thinking.left)
            and not r.reads_hidden
            for r in running
        )

    def _further(self, request: Request, batch: Batch) -> int:
        """How many tokens this step may run of the request behind those that are known now."""
        if not batch.drafts:
            return batch.num_steps - 1
        limits = [self.num_drafts, request.max_total - request.num_total - 1]
        if request.thinking is not None:
            limits.append(request.thinking.left - request.num_inflight - 1)
        rule = self.length_rule
        if rule is not None and rule.all_or_none and request.rotary_len <= rule.original_length:
            limits.append(rule.original_length - request.num_total - 1)
        return max(0, min(limits))

    def _remaining(self, request: Request) -> int:
        """Tokens that could run now; none when the tokens in flight already fill the request's length."""
        return request.num_total - request.num_computed if request.num_total < request.max_total else 0

    def _outgrown(self, request: Request, more: int = 0) -> bool:
        """Its next token, or `more` behind that, makes it too long for the rotary embedding of its pages."""
        rule, length = self.length_rule, request.num_total + more
        return rule is not None and rule.all_or_none and request.rotary_len <= rule.original_length < length

    def _prefix_root(self, request: Request) -> PrefixNode:
        """Pages are shared only among requests whose positions are rotated alike."""
        rule = self.length_rule
        if rule is None or request.rotary_len <= rule.original_length:
            return request.cache_salt
        return (request.cache_salt, "long" if rule.all_or_none else request.rotary_len)

    def _make_room(self, request: Request, length: int) -> bool:
        """Pages for `length` more tokens, preempting from the end. False when `request` itself had to go."""
        while True:
            missing = self.pool.pages_for(request.num_computed + length) - len(request.pages)
            pages = self.pool.allocate(missing) if missing > 0 else []
            if pages is not None:
                request.pages.extend(pages)
                return True
            victim = self.running[-1]
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
        if self.states is not None:
            for _, row in request.reserved_states:
                self.states.release(row)
        request.reserved_states.clear()
        request.answer_node = None
        request.pages = []
        request.num_computed = request.num_registered = 0
        request.prefix_node = None
        request.slot = -1

    def _admit(self, batch: Batch, budget: int) -> None:
        """Start waiting requests in order while there is budget, a slot, and pages for their first chunk."""
        while self.waiting and budget > 0 and self._free_slots:
            request = self.waiting[0]
            if request.num_inflight:
                return  # preempted with a token under way, which it needs to be recomputed
            found = self._find_prefix(request)
            if found is None:
                return
            cached, node = found
            start = len(cached) * self.pool.page_size
            length = self._up_to_branch(request, min(len(request.token_ids) - start, budget), start)
            pages = self.pool.allocate(self.pool.pages_for(start + length) - len(cached))
            if pages is None:
                self.pool.release(cached)
                return
            self.waiting.popleft()
            if request.num_cached < 0:
                request.num_cached = start
                self.stats.prefix_queries += request.num_prompt
                self.stats.prefix_hits += start
            request.pages = cached + pages
            request.num_computed = request.num_admitted = start
            request.num_registered, request.prefix_node = len(cached), node
            request.slot = self._free_slots.pop()
            request.status = Status.RUNNING
            request.first_scheduled_time = request.first_scheduled_time or time.time()
            bisect.insort(self.running, request, key=lambda r: r.order)
            batch.admitted.append(request)
            self._run(request, length, batch)
            budget -= length

    def _find_prefix(self, request: Request) -> tuple[list[int], PrefixNode] | None:
        """Cached pages for all but the last token, whose logits are needed; none where every logit is.

        None where the request had better wait for a step that is under way.
        """
        root = self._prefix_root(request)
        if request.reads_prompt:
            return [], root
        usable = list(islice(request.token_ids, len(request.token_ids) - 1))
        pages, node = self.pool.acquire_prefix(usable, root)
        return (pages, node) if self.states is None else self._find_state(request, pages, root, self.states)

    def _find_state(
        self, request: Request, pages: list[int], root: PrefixNode, states: StateCache
    ) -> tuple[list[int], PrefixNode] | None:
        """As many of the pages as lead to a state that is kept, the longest that one is kept for.

        Where more pages are known, other requests begin as this one does: the state is kept there too when it comes by.
        """
        chain = self.pool.chain(pages)
        found = states.find(chain)
        used = 0 if found.awaited else found.depth
        self.pool.release(pages[used:])
        if found.awaited:
            return None
        request.branches_at = len(pages) * self.pool.page_size if len(pages) > used else 0
        request.state_row = found.row
        if used:
            states.use(chain[used - 1])
        return pages[:used], chain[used - 1] if used else root

    def _up_to_branch(self, request: Request, length: int, start: int) -> int:
        """Tokens of a chunk that begins at `start`, so that one ends where a state is wanted and none would be kept."""
        branch = request.branches_at
        kept_anyway = (request.num_total - 1) // self.pool.page_size * self.pool.page_size
        return branch - start if start < branch < start + length and branch != kept_anyway else length

    def _run(self, request: Request, length: int, batch: Batch) -> None:
        start, further = request.num_computed, self._further(request, batch)
        num_sampled = 1 + further if start + length == request.num_total else 0
        chunk = Chunk(request, start, length, num_sampled)
        batch.chunks.append(chunk)
        if self.states is not None:
            self._place_states(chunk, start + length + further, self.states)
        request.num_computed += length + further
        request.num_inflight += num_sampled
        if request.constraint is not None or request.thinking is not None:
            batch.masked |= num_sampled > 0 and request.awaits_mask
        self._register_full_pages(request)

    def _place_states(self, chunk: Chunk, end: int, states: StateCache) -> None:
        """Where the chunk's state comes from, and that it is kept at the last full page, if it reaches another one.

        A prompt that comes again needs its last token's logits, so that of its pages the ones before it count.
        """
        request, size = chunk.request, self.pool.page_size
        chunk.state_read, request.state_row = request.state_row, 0
        longest = end if chunk.length == 1 else min(end, request.num_total - 1)
        kept_tokens = longest // size * size
        row = states.reserve() if kept_tokens > chunk.start else 0
        if row:
            chunk.state_kept, chunk.kept_tokens = row, kept_tokens
            request.reserved_states.append((kept_tokens, row))

    def _keep_state(self, request: Request, num_tokens: int, states: StateCache) -> None:
        """The host knows the request's first `num_tokens` tokens, whose pages are full: others find a state there.

        Of an answer only the last one is kept.
        """
        if not request.reserved_states or request.reserved_states[0][0] != num_tokens:
            return
        _, row = request.reserved_states.popleft()
        if states.keep(request.prefix_node, row) and num_tokens > request.num_prompt:
            states.discard(request.answer_node)
            request.answer_node = request.prefix_node

    def _register_full_pages(self, request: Request) -> None:
        """Full pages whose tokens are known become findable; steps run in order, so they will be written by then."""
        size = self.pool.page_size
        known = min(request.num_computed, len(request.token_ids))
        while (request.num_registered + 1) * size <= known:
            index = request.num_registered
            tokens = request.token_ids[index * size : (index + 1) * size]
            request.prefix_node = self.pool.register(request.pages[index], request.prefix_node, tokens)
            request.num_registered += 1
            if self.states is not None:
                self._keep_state(request, request.num_registered * size, self.states)
