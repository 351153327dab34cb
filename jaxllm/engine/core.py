"""The loop: schedule, dispatch, and while the device works read what the step before it gave."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from tokenizers import Tokenizer

from jaxllm.engine.accept import Results, store_scores
from jaxllm.engine.adapters.store import AdapterStore, check_adapters
from jaxllm.engine.counting import Counting
from jaxllm.engine.device.handle import Handle, Result
from jaxllm.engine.device.ran_step import RanStep, StepKind
from jaxllm.engine.device.runner import Runner
from jaxllm.engine.device.sampler import Logprobs
from jaxllm.engine.device.sizes import StepSizes
from jaxllm.engine.fair_shares import RecentGroups
from jaxllm.engine.host_copies import HostCopies
from jaxllm.engine.idle_check import IdleCheck
from jaxllm.engine.kv_events.events import KVEvents
from jaxllm.engine.masks import allow_only
from jaxllm.engine.messages import (
    INITIAL_VERSION,
    CapturedRows,
    EngineRequest,
    EngineStats,
    TokenDelta,
    TransferInfo,
)  # fmt: skip
from jaxllm.engine.orders import NewWeights, PauseMode, ReadsWeights
from jaxllm.engine.page_pool import PagePool
from jaxllm.engine.preparation import Preparation
from jaxllm.engine.request import Request, Status, root_of
from jaxllm.engine.scheduler import Scheduler
from jaxllm.engine.thinking_budget import Thinking
from jaxllm.engine.work import Batch
from jaxllm.errors import InvalidRequestError
from jaxllm.models.abstract import LiveModel
from jaxllm.requests.prompt_scores import PromptScores
from jaxllm.text.bad_words import spellings

if TYPE_CHECKING:
    from jaxllm.engine.grammar import Grammars

logger = logging.getLogger(__name__)


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
        adapters: AdapterStore | None = None,
        model: LiveModel | None = None,
        weights: ReadsWeights | None = None,
        kv_events: KVEvents | None = None,
    ):
        """`model` is there for those who take it apart, `weights` for those who exchange them; `kv_events` tells others
        of the prefix cache.
        """
        self._kv_events = kv_events
        self.model = model
        self._weights = weights
        self.weight_version = INITIAL_VERSION
        """What the weights that steps run with are called."""
        self._paused: PauseMode | None = None
        self._cache_generation = 0
        """Requests share what they have computed with those of their own generation."""
        self._scheduler = scheduler
        self._pool = pool
        self._tiers = scheduler.tiers
        self._idle_check = IdleCheck(pool, scheduler.states, scheduler.adapters)
        self._runner = runner
        self._copies = HostCopies(self._tiers, runner)
        self._tokenizer = tokenizer
        self._results = Results(tokenizer, eos_token_ids)
        self._grammars = grammars
        self._preparation = Preparation(runner.compile, scheduler.prefix_root, adapters, grammars, self._tiers)
        self.on_begin: Callable[[list[str]], None] = lambda request_ids: None
        """Called with the requests that get their place, before their first step."""
        self._seeds = random.Random(seed)
        self._requests: dict[str, Request] = {}
        self._groups = RecentGroups()
        self._failed: list[TokenDelta] = []
        self._pending: Handle | None = None
        self._pending_version = self._read_version = self.weight_version
        """Of the weights that the step under way runs with, and that the step being read ran with."""
        self._counting = Counting(scheduler.ahead.drafts.most)

    def when_prepared(self, wake: Callable[[], None]) -> None:
        """Have `wake` called on another thread whenever a request has become ready to be scheduled."""
        self._preparation.on_ready = wake

    @property
    def has_work(self) -> bool:
        """There is something to schedule, a step to read, or a copy to be made."""
        return self._has_requests or self._is_saving

    @property
    def _has_requests(self) -> bool:
        return (
            self._pending is not None or self._num_schedulable > 0 or bool(self._failed) or self._preparation.has_ready
        )

    @property
    def _is_saving(self) -> bool:
        """Nobody waits for anything, and pages are to be copied to disk."""
        return self._copies.has_unsaved and not self._scheduler.num_unfinished

    @property
    def _num_schedulable(self) -> int:
        match self._paused:
            case "keep":
                return 0
            case "wait":
                return len(self._scheduler.running)
        return self._scheduler.num_unfinished

    @property
    def load(self) -> tuple[int, int]:
        """Requests running and waiting."""
        return len(self._scheduler.running), len(self._scheduler.waiting)

    def add(self, message: EngineRequest) -> None:
        """Queue a request that a front door has validated. One that cannot be run fails alone, at the next turn."""
        request = Request.from_message(message, self._scheduler.max_model_len, self._seeds.getrandbits(64))
        request.cache_generation = self._cache_generation
        self._requests[request.request_id] = request
        self._groups.note(request.group)
        try:
            self._begin(request)
        except Exception as error:
            self._failed.append(self._fail(request, error))

    def _begin(self, request: Request) -> None:
        request.status = Status.PREPARING
        params, most = request.params, self._scheduler.max_model_len - (request.pooling is None)
        count = request.num_prompt
        if count > most:  # which the front doors check; it would wait for ever
            raise InvalidRequestError(f"prompt has {count} tokens; accepted are up to {most}", param="prompt")
        request.prefix_node = request.cache_root
        if self._tokenizer is not None and params.bad_words:
            request.bad_words = spellings(self._tokenizer, params.bad_words)
        self._results.begin(request)
        if self._tokenizer is not None:
            request.thinking = Thinking.of(params, self._tokenizer)
        if params.prompt_logprobs is not None:
            whole = params.prompt_logprobs == -1
            width = self._runner.vocab_size if whole else 1 + params.prompt_logprobs
            tokens = request.token_ids[request.scores_from - 1 :]
            request.prompt_scores = PromptScores.empty(tokens, width, whole=whole)
        if request.adapters:
            check_adapters(request.adapters, self._scheduler.adapters.count)
        self._runner.prepare(request)
        missing = self._runner.missing(request)
        if not self._preparation.begin(request, missing, reads_disk=self._paused is None):
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
        before it settle the masks of its second half, and are read while its first half runs. One that tries drafts
        under a grammar is whole, and the step before it is read first: its tokens settle the drafts too.

        Where several groups send requests, a step that prompts fill is read before the next is dispatched, which is in
        the next turn: requests that have come meanwhile may be in it. Such a step is long beside what this costs.
        """
        began = time.thread_time()
        deltas = self._start_prepared()
        if self._lets_others_in:
            return deltas + self._read_pending(None)
        if self._pending is not None and self._scheduler.awaits_text(admitting=self._paused is None):
            deltas += self._read_pending(None)
        if self._is_saving and not self._has_requests:
            self._copies.save()
        batch = Batch() if self._paused == "keep" else self._scheduler.schedule(admitting=self._paused is None)
        if batch.admitted:
            self.on_begin([request.request_id for request in batch.admitted])
        fill = None if self._grammars is None else self._grammars.fill
        handle = self._runner.dispatch(batch, fill) if batch.chunks else None
        if handle is not None:
            self._counting.step(batch)
        self._copies.keep(self._runner.read_pages(batch.leaving) if handle is None else handle.leaving)
        deltas += self._read_pending(handle)
        if handle is not None and handle.waiting:
            self._runner.sample_waiting(handle, self._fill_masks)
        if self._kv_events is not None:
            self._kv_events.flush()
        self._counting.so_far.step_host_seconds += time.thread_time() - began
        if not self.has_work and not self._scheduler.running:
            self._idle_check.run()
        return deltas

    @property
    def _lets_others_in(self) -> bool:
        ran = None if self._pending is None else self._pending.ran
        if ran is None or ran.kind == "decode" or sum(ran.lengths) < self._scheduler.max_num_batched_tokens:
            return False
        return self._groups.are_several

    def _read_pending(self, handle: Handle | None) -> list[TokenDelta]:
        """Read the step under way, if there is one, and put `handle` in its place."""
        previous, self._pending = self._pending, handle
        self._read_version, self._pending_version = self._pending_version, self.weight_version
        if previous is None:
            return []
        waited = previous.wait()
        self._counting.so_far.step_device_wait_seconds += waited
        self._counting.note(previous.ran, waited)
        deltas = self._read(previous)
        self._counting.so_far.num_steps += 1
        return deltas

    @property
    def last_steps(self) -> dict[StepKind, RanStep]:
        """The last one of each kind whose results have been read; the newest comes last."""
        return self._counting.last_steps

    @property
    def sizes(self) -> StepSizes:
        """Those that every step shares."""
        return self._runner.sizes

    def stats(self) -> EngineStats:
        """A snapshot of counters and gauges."""
        num_preparing = len(self._requests) - self._scheduler.num_unfinished
        return self._counting.snapshot(self._scheduler, self._pool, self._runner, num_preparing)

    def unembed(self, states: np.ndarray, normed: bool) -> np.ndarray:
        """The logits `[n, V]` of states `[n, E]`, as many as a step takes at a time: fewer rows than given are left.

        States pass the last norm first unless they are `normed`.
        """
        return self._runner.unembed(states[: self._runner.most_rows], normed)

    @property
    def is_paused(self) -> bool:
        """Whether it waits for `resume`."""
        return self._paused is not None

    def pause(self, mode: PauseMode) -> None:
        """Begin no step any more, or with "wait" no request; what is added waits."""
        self._paused = mode

    def resume(self) -> None:
        """Go on after `pause`."""
        self._paused = None

    def reset_prefix_cache(self) -> None:
        """Requests that are added from now on share nothing with earlier ones, whose pages are used again in time."""
        self._cache_generation += 1
        if self._kv_events is not None:
            self._kv_events.clear(root_of(None, self._cache_generation))
            self._kv_events.flush()

    @property
    def transfer(self) -> TransferInfo | None:
        """How it exchanges pages with other servers, if it does."""
        peers = None if self._tiers is None else self._tiers.peers
        return None if peers is None else peers.info

    @property
    def weights(self) -> ReadsWeights:
        """Reads other weights for this engine. Any thread may use it."""
        assert self._weights is not None, "whoever builds an engine gives its core what reads its weights"
        return self._weights

    def update_weights(self, new: NewWeights, version: str) -> None:
        """Run the next steps with other weights. Requests that run go on, with what they have computed so far.

        Raises:
            EngineDeadError: the devices did not take them; the old ones are lost.
        """
        self._runner.change_weights(lambda weights: self.weights.exchange(weights, new))
        self.weight_version = version
        self.reset_prefix_cache()

    def keep_weights(self, file: BinaryIO) -> None:
        """Leave the weights in a file, for another engine of the same plan; this one runs no step any more."""
        self._runner.keep_weights(file)

    def close(self) -> None:
        """End the threads that compile and that prepare requests, and what waits for them. Any thread may call this."""
        self._runner.close()
        self._preparation.close()
        if self._tiers is not None:
            self._tiers.close()
        if self._kv_events is not None:
            self._kv_events.close()

    def _start_prepared(self) -> list[TokenDelta]:
        """Queue the requests for which all is ready; the deltas are of those for which something failed."""
        failed, self._failed = self._failed, []
        for request, future in self._preparation.take_ready():
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
                store_scores(score)
        for recorded in handle.recorded:
            if recorded.request.status is not Status.FINISHED:
                recorded.request.captured.append(CapturedRows(recorded.positions, recorded.values().tobytes()))
        logprobs = handle.logprobs()
        deltas = self._read_pooled(handle)
        for result in handle.results():
            if result.request.status is Status.FINISHED:
                continue  # it ended while this step was already under way
            self._settle(result)
            try:
                deltas.append(self._accept(result, logprobs, handle.vocabulary_of(result.request)))
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
        self._counting.prompt(request)
        self._forget(request)
        return TokenDelta(
            request_id=request.request_id,
            pooled=request.pooled_bytes(),
            finish_reason="stop",
            num_cached_tokens=max(request.num_cached, 0),
            first_scheduled_time=request.first_scheduled_time,
            num_preemptions=request.num_preemptions,
            padding=request.padding,
        )

    def _settle(self, result: Result) -> None:
        """Drafts that the device refused were never tokens; those that it took are."""
        if result.num_reserved:
            tried = result.num_drafted > 0 or result.request.constraint is None
            self._scheduler.settle(result.request, result.num_reserved, len(result.tokens) - 1, tried=tried)
        if result.num_drafted:
            self._counting.drafts(result)

    def _accept(self, result: Result, logprobs: Logprobs | None, vocabulary: np.ndarray | None) -> TokenDelta:
        """What a step gave one request becomes tokens of it, up to a stop."""
        request = result.request
        if request.num_output == 0:
            self._counting.prompt(request)
        running = len(self._scheduler.running)
        delta, settled = self._results.accept(result, logprobs, running, self._pending, vocabulary)
        delta.weight_version = self._read_version
        self._scheduler.accept(request, delta.token_ids, settled)
        self._counting.so_far.generation_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            delta.num_preemptions, delta.padding = request.num_preemptions, request.padding
            delta.num_drafted, delta.num_taken = request.num_drafted, request.num_taken
            self._runner.remember_answer(request)
            self._copies.hand_on(request, self._scheduler.prefix_root(request))
            self._forget(request)
        return delta

    def _forget(self, request: Request) -> None:
        if request.pull is not None:
            request.pull.cancel()
        self._scheduler.finish(request)
        del self._requests[request.request_id]
        self._results.forget(request)
