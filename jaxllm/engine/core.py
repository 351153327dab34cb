"""The loop: schedule, dispatch, and while the device works read what the step before it gave."""

from __future__ import annotations

import bisect
import logging
import math
import queue
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from jaxllm.engine.detokenizer import Detokenizer
from jaxllm.engine.device.handle import Handle, Result, Score, on_host
from jaxllm.engine.device.keys import Key
from jaxllm.engine.device.runner import Runner
from jaxllm.engine.device.sampler import Logprobs
from jaxllm.engine.front.messages import STEP_TOKENS, EngineRequest, EngineStats, TokenDelta
from jaxllm.engine.jobs import Jobs
from jaxllm.engine.page_pool import PagePool
from jaxllm.engine.request import Request, Status
from jaxllm.engine.scheduler import Batch, Scheduler
from jaxllm.engine.thinking import Thinking, allow_only
from jaxllm.errors import InvalidRequestError
from jaxllm.requests.outputs import Logprob
from jaxllm.requests.prompt_scores import PromptScores
from jaxllm.requests.sampling import SamplingParams
from jaxllm.text.bad_words import spellings

if TYPE_CHECKING:
    from jaxllm.engine.grammar import Constraint, Grammars

logger = logging.getLogger(__name__)

PREPARING_THREADS = 2
GRAMMAR_THREADS = 4

TokenLogprobs = list[tuple[int, Logprob]]


class EngineCore:
    """One engine: no threads, no transport. `turn` does one step's work; a client calls it as long as `has_work`."""

    def __init__(
        self,
        scheduler: Scheduler,
        pool: PagePool,
        runner: Runner,
        tokenizer: Tokenizer | None,
        eos_token_ids: Sequence[int],
        seed: int = 0,
        grammars: Grammars | None = None,
    ):
        self._scheduler = scheduler
        self._pool = pool
        self._runner = runner
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)
        self._grammars = grammars
        self._preparing = Jobs("prepare", urgent_threads=PREPARING_THREADS)
        self._constraining = Jobs("constrain", urgent_threads=GRAMMAR_THREADS)
        """The same for requests with a grammar, which may take seconds: only others like them wait for those."""
        self._prepared: queue.SimpleQueue[tuple[Request, Future[Constraint | None]]] = queue.SimpleQueue()
        self.on_prepared: Callable[[], None] = lambda: None
        """Called on another thread when a request has become ready to be scheduled: wakes the loop."""
        self._seeds = random.Random(seed)
        self._requests: dict[str, Request] = {}
        self._failed: list[TokenDelta] = []
        self._detokenizers: dict[str, Detokenizer] = {}
        self._pending: Handle | None = None
        self._steps = 0
        self._prompt_tokens = 0
        self._cached_prompt_tokens = 0
        self._generation_tokens = 0
        self._steps_by_tokens = [0] * (len(STEP_TOKENS) + 1)
        self._step_tokens = 0
        self._host_seconds = 0.0
        self._wait_seconds = 0.0

    @property
    def has_work(self) -> bool:
        """There is something to schedule or a step to read."""
        return (
            self._pending is not None
            or self._scheduler.num_unfinished > 0
            or bool(self._failed)
            or not self._prepared.empty()
        )

    @property
    def load(self) -> tuple[int, int]:
        """Requests running and waiting."""
        return len(self._scheduler.running), len(self._scheduler.waiting)

    def add(self, message: EngineRequest) -> None:
        """Queue a request that a front door has validated. One that cannot be run fails alone, at the next turn."""
        request = Request.from_message(message, self._scheduler.max_model_len, self._seeds.getrandbits(64))
        self._requests[request.request_id] = request
        try:
            self._begin(request)
        except Exception as error:
            self._failed.append(self._fail(request, error))

    def _begin(self, request: Request) -> None:
        params = request.params
        request.status = Status.PREPARING
        request.prefix_node = request.cache_salt
        if self._tokenizer is not None and params.bad_words:
            request.bad_words = spellings(self._tokenizer, params.bad_words)
        if self._tokenizer is not None and params.detokenize and request.pooling is None:
            self._detokenizers[request.request_id] = Detokenizer(
                self._tokenizer,
                request.token_ids,
                stop=params.stop,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                shown_special_token_ids=params.shown_special_token_ids,
            )
        if self._tokenizer is not None:
            request.thinking = Thinking.of(params, self._tokenizer)
        if params.prompt_logprobs is not None:
            whole = params.prompt_logprobs == -1
            width = self._runner.vocab_size if whole else 1 + params.prompt_logprobs
            request.prompt_scores = PromptScores.empty(request.token_ids, width, whole=whole)
        self._runner.prepare(request)
        missing = self._runner.missing(request)
        if missing or params.structured_outputs is not None:
            self._prepare(request, missing)
        else:
            request.status = Status.WAITING
            self._scheduler.add(request)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests and free their pages; unknown and finished ids are ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._forget(request)

    def turn(self) -> list[TokenDelta]:
        """Dispatch the next step, then read the one before it.

        A step in which a grammar or a thinking budget has a say is dispatched in two halves: the tokens of the step
        before it settle the masks of its second half, and are read while its first half runs.
        """
        began = time.thread_time()
        deltas = self._start_prepared()
        batch = self._scheduler.schedule()
        handle = self._runner.dispatch(batch) if batch.chunks else None
        if handle is not None:
            self._count_steps(batch)
        previous, self._pending = self._pending, handle
        if previous is not None:
            self._wait_seconds += previous.wait()
            deltas += self._read(previous)
            self._steps += 1
        if handle is not None and handle.waiting:
            self._runner.sample_waiting(handle, self._fill_masks)
        self._host_seconds += time.thread_time() - began
        return deltas

    def stats(self) -> EngineStats:
        """A snapshot of counters and gauges."""
        s, compiles = self._scheduler, self._runner.compiles
        return EngineStats(
            num_running=len(s.running),
            num_waiting=len(s.waiting),
            num_preparing=len(self._requests) - s.num_unfinished,
            num_preemptions=s.stats.preemptions,
            num_pages=self._pool.num_pages - 1,
            num_free_pages=self._pool.num_free,
            page_size=self._pool.page_size,
            prefix_cache_queries=s.stats.prefix_queries,
            prefix_cache_hits=s.stats.prefix_hits,
            prompt_tokens=self._prompt_tokens,
            cached_prompt_tokens=self._cached_prompt_tokens,
            generation_tokens=self._generation_tokens,
            num_steps=self._steps,
            steps_by_tokens=list(self._steps_by_tokens),
            step_tokens=self._step_tokens,
            step_host_seconds=self._host_seconds,
            step_device_wait_seconds=self._wait_seconds,
            scheduled_tokens=dict(self._runner.scheduled_tokens),
            padded_tokens=dict(self._runner.padded_tokens),
            compiles_foreseen=compiles.foreseen,
            compiles_unforeseen=compiles.unforeseen,
            compile_seconds=compiles.seconds,
            compiles_pending=compiles.pending,
            ready=True,
        )

    def close(self) -> None:
        """End the threads that compile and that prepare requests, and what waits for them. Any thread may call this."""
        self._runner.close()
        self._preparing.close()
        self._constraining.close()

    def _prepare(self, request: Request, missing: list[Key]) -> None:
        """Get ready on a thread what only this request waits for: its grammar, executables that few requests need."""

        def prepare() -> Constraint | None:
            for key in missing:
                self._runner.compile(key)
            outputs = request.params.structured_outputs
            if outputs is None:
                return None
            assert self._grammars is not None, "the front door refuses a grammar where there is no tokenizer"
            return self._grammars.build(outputs)

        def done(future: Future[Constraint | None]) -> None:
            self._prepared.put((request, future))
            self.on_prepared()

        jobs = self._preparing if request.params.structured_outputs is None else self._constraining
        jobs.submit(prepare).add_done_callback(done)

    def _start_prepared(self) -> list[TokenDelta]:
        """Queue the requests for which all is ready; the deltas are of those for which something failed."""
        failed, self._failed = self._failed, []
        while not self._prepared.empty():
            request, future = self._prepared.get()
            if request.status is not Status.PREPARING:
                continue
            error = future.exception()
            if error is not None:
                failed.append(self._fail(request, error))
                continue
            request.constraint = future.result()
            request.status = Status.WAITING
            self._scheduler.add(request)
        return failed

    def _fill_masks(self, requests: list[Request], mask: np.ndarray) -> None:
        assert self._grammars is not None
        self._grammars.fill([request.constraint for request in requests], mask)
        for row, request in zip(mask, requests, strict=True):
            if request.thinking is not None and request.thinking.forced is not None:
                allow_only(row, request.thinking.forced)

    def _read(self, handle: Handle) -> list[TokenDelta]:
        for score in handle.scores:
            if score.request.status is not Status.FINISHED:
                _store_scores(score)
        logprobs = handle.logprobs()
        deltas = self._read_pooled(handle)
        for result in handle.results():
            if result.request.status is Status.FINISHED:
                continue  # it ended while this step was already under way
            try:
                deltas.append(self._accept(result, logprobs))
            except Exception as error:
                deltas.append(self._fail(result.request, error))
        return deltas

    def _fail(self, request: Request, error: BaseException) -> TokenDelta:
        """End one request alone."""
        self._forget(request)
        invalid = isinstance(error, InvalidRequestError)
        if not invalid:
            logger.error("request %s failed", request.request_id, exc_info=error)
        message = str(error) if invalid else f"{type(error).__name__}: {error}"
        return TokenDelta(request_id=request.request_id, finish_reason="error", error=message, invalid=invalid)

    def _read_pooled(self, handle: Handle) -> list[TokenDelta]:
        deltas = []
        for pooled in handle.pooled:
            values = np.asarray(pooled.result)
            for row, (request, count, first, last) in zip(values, pooled.rows, strict=False):
                if request.status is Status.FINISHED:
                    continue
                request.add_pooled(row[:count], first)
                if last:
                    deltas.append(self._finish_pooled(request))
        return deltas

    def _finish_pooled(self, request: Request) -> TokenDelta:
        self._count_prompt(request)
        self._forget(request)
        return TokenDelta(
            request_id=request.request_id,
            pooled=request.pooled_bytes(),
            finish_reason="stop",
            num_cached_tokens=max(request.num_cached, 0),
            first_scheduled_time=request.first_scheduled_time,
            num_preemptions=request.num_preemptions,
        )

    def _count_steps(self, batch: Batch) -> None:
        """A decode of several steps runs its rows as often."""
        tokens = sum(chunk.length for chunk in batch.chunks)
        self._step_tokens += tokens * batch.num_steps
        self._steps_by_tokens[bisect.bisect_left(STEP_TOKENS, tokens)] += batch.num_steps

    def _count_prompt(self, request: Request) -> None:
        self._prompt_tokens += request.num_prompt
        self._cached_prompt_tokens += max(request.num_cached, 0)

    def _accept(self, result: Result, logprobs: Logprobs | None) -> TokenDelta:
        """What a step gave one request becomes tokens of it, up to a stop."""
        request = result.request
        delta = TokenDelta(request_id=request.request_id, token_ids=[])
        if request.num_output == 0:
            self._count_prompt(request)
            delta.num_cached_tokens = max(request.num_cached, 0)
            delta.prompt_logprobs = None if request.prompt_scores is None else request.prompt_scores.finish()
            delta.first_scheduled_time = request.first_scheduled_time
        num_sampled = len(result.tokens)
        self._take(request, result.tokens, delta)
        if request.params.logprobs is not None and logprobs is not None:
            delta.logprobs = [
                _row_logprobs(logprobs, row, token, request.params)
                for row, token in enumerate(delta.token_ids, result.row)
            ]
        if request.thinking is not None:
            self._follow_thinking(request, request.thinking, delta)
        if request.constraint is not None and delta.finish_reason is None:
            num_sampled += self._follow_grammar(request, request.constraint, delta)
        self._scheduler.accept(request, delta.token_ids, num_sampled)
        self._generation_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            delta.num_preemptions = request.num_preemptions
            self._forget(request)
        return delta

    def _take(self, request: Request, tokens: Sequence[int], delta: TokenDelta) -> None:
        """Add tokens and their text to `delta`, up to and with the one that ends the request."""
        for token in tokens:
            delta.token_ids.append(token)
            self._detokenize_and_stop(request, token, len(request.token_ids) + len(delta.token_ids), delta)
            if delta.finish_reason is not None:
                return

    def _follow_thinking(self, request: Request, thinking: Thinking, delta: TokenDelta) -> None:
        """Count what was thought; once the reasoning is over the request is like any other."""
        for token in delta.token_ids:
            if not thinking.over:
                thinking.accept(token)
        if thinking.over:
            request.thinking = None

    def _follow_grammar(self, request: Request, constraint: Constraint, delta: TokenDelta) -> int:
        """Move on in the grammar, over the tokens that it forces too; it may be complete then.

        Returns how many rows of the step under way are not sampled for that.
        """
        for token in delta.token_ids:
            constraint.accept(token)
        forced = constraint.forced() if request.fast_forwards else []
        if len(forced) <= len(self._scheduler.running):
            forced = []  # a step with a chunk in it takes longer, for everyone: more than sampling these would
        withdrawn = self._pending.withdraw(request) if forced and self._pending is not None else 0
        for token in forced:
            constraint.accept(token)
        self._take(request, forced, delta)
        if constraint.complete and delta.finish_reason is None:
            detokenizer = self._detokenizers.get(request.request_id)
            delta.finish_reason = "stop"
            delta.text += detokenizer.flush() if detokenizer is not None else ""
        return withdrawn

    def _detokenize_and_stop(self, request: Request, token: int, length: int, delta: TokenDelta) -> None:
        """`length` is that of prompt and tokens up to this one."""
        params = request.params
        detokenizer = self._detokenizers.get(request.request_id)
        enough = length - request.num_prompt >= params.min_tokens
        is_eos = token in self._eos and not params.ignore_eos
        if enough and (is_eos or token in params.stop_token_ids):
            delta.finish_reason = "stop"
            delta.stop_reason = token if token in params.stop_token_ids else None
            if detokenizer is not None:
                shown = detokenizer.add(token, False)[0] if params.include_stop_str_in_output else ""
                delta.text += shown + detokenizer.flush()
            return
        if detokenizer is not None:
            text, stop = detokenizer.add(token, enough)
            delta.text += text
            if stop is not None:
                delta.finish_reason, delta.stop_reason = "stop", stop
                return
        if length >= request.max_total:
            delta.finish_reason = "length"
            if detokenizer is not None:
                delta.text += detokenizer.flush()

    def _forget(self, request: Request) -> None:
        self._scheduler.finish(request)
        del self._requests[request.request_id]
        self._detokenizers.pop(request.request_id, None)


def _row_logprobs(logprobs: Logprobs, row: int, token: int, params: SamplingParams) -> TokenLogprobs:
    """The chosen token first, then the most likely, best first, or those that were asked for, in their order."""
    chosen = (token, Logprob(float(logprobs.chosen[row]), int(logprobs.rank[row])))
    asked = len(params.logprob_token_ids)
    count = asked or params.logprobs
    ids = logprobs.top_ids[row, :count].tolist()
    values = logprobs.top[row, :count].tolist()
    pairs = [(i, v) for i, v in zip(ids, values, strict=True) if v > -math.inf]  # a small vocabulary has fewer
    ranked = [(i, Logprob(v, None if asked else rank)) for rank, (i, v) in enumerate(pairs, 1)]
    return [chosen, *(entry for entry in ranked if entry[0] != token)]


def _store_scores(score: Score) -> None:
    """Rows i … of the scores are of the prompt's tokens i + 1 …"""
    scores, positions = score.request.prompt_scores, score.positions
    assert scores is not None
    rows, count = slice(positions.start - 1, positions.stop - 1), len(positions)
    if not isinstance(score.result, Logprobs):
        scores.logprobs[rows] = np.asarray(score.result)[:count]
        return
    host = on_host(score.result)
    others = scores.ids.shape[1] - 1
    scores.ids[rows] = np.column_stack([score.targets, host.top_ids[:count, :others]])
    scores.logprobs[rows] = np.column_stack([host.chosen[:count], host.top[:count, :others]])
    scores.ranks[rows, 0] = host.rank[:count]
    scores.ranks[rows, 1:] = np.arange(1, others + 1)
