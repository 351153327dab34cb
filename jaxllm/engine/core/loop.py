"""The loop: schedule, dispatch, and while the device works read what the step before it gave."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import BinaryIO, Literal

import msgspec
import psutil
from tokenizers import Tokenizer

from jaxllm.engine.core.fair_queue import RecentGroups
from jaxllm.engine.core.feature import Feature
from jaxllm.engine.core.handle import Counting, Handle, RanStep, Result, StepKind
from jaxllm.engine.core.jobs import Preparation
from jaxllm.engine.core.pages import PagePool, PrefixNode
from jaxllm.engine.core.registry import Features
from jaxllm.engine.core.request import Batch, Request, Status, root_of
from jaxllm.engine.core.results import Results
from jaxllm.engine.core.runner import Runner
from jaxllm.engine.core.sampler import Logprobs
from jaxllm.engine.core.scheduler import Scheduler
from jaxllm.engine.core.sizes import StepSizes
from jaxllm.engine.messages import (
    INITIAL_VERSION,
    EngineRequest,
    EngineStats,
    NewWeights,
    PauseMode,
    ReadsWeights,
    TokenDelta,
)
from jaxllm.errors import InvalidRequestError
from jaxllm.models.registry import LiveModel

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
        features: Features | None = None,
        model: LiveModel | None = None,
        weights: ReadsWeights | None = None,
    ):
        """`model` is there for whoever takes it apart, and `weights` for whoever exchanges them."""
        self.model = model
        self._weights = weights
        self.weight_version = INITIAL_VERSION
        """The name of the weights that steps run with."""
        self._paused: PauseMode | None = None
        self._cache_generation = 0
        """Requests share what they have computed with those of their own generation."""
        self._scheduler = scheduler
        self._pool = pool
        self.features = features if features is not None else Features()
        """The features of this core."""
        self._idle_check = IdleCheck(pool, self.features)
        self._runner = runner
        self._tokenizer = tokenizer
        self._results = Results(tokenizer, eos_token_ids, self.features)
        self._preparation = Preparation(runner.device.compile, self.features)
        self.on_begin: Callable[[list[str]], None] = lambda request_ids: None
        """Called with the requests that get their place, before their first step."""
        self._seeds = random.Random(seed)
        self._requests: dict[str, Request] = {}
        self._groups = RecentGroups()
        self._failed: list[TokenDelta] = []
        self._pending: Handle | None = None
        self._pending_version = self._read_version = self.weight_version
        """The versions of the weights of the step under way and of the step being read."""
        self._counting = Counting()
        self._process = psutil.Process()

    def when_prepared(self, wake: Callable[[], None]) -> None:
        """Have `wake` called on another thread whenever a request has become ready to be scheduled."""
        self._preparation.on_ready = wake

    def wake(self) -> None:
        """Have the loop look for work. Any thread may call this."""
        self._preparation.on_ready()

    @property
    def has_work(self) -> bool:
        """There is something to schedule, a step to read, or something to do meanwhile."""
        return self._has_requests or self._idles

    @property
    def _has_requests(self) -> bool:
        return (
            self._pending is not None or self._num_schedulable > 0 or bool(self._failed) or self._preparation.has_ready
        )

    @property
    def _idles(self) -> bool:
        """No request waits for anything, and features have something to do meanwhile."""
        return not self._scheduler.num_unfinished and any(
            feature.has_idle_work for feature in self.features.having(Feature.idle)
        )

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
        request = Request.from_message(message, self._scheduler.max_model_len)
        self._requests[request.request_id] = request
        self._groups.note(request.group)
        try:
            self._begin(request, message)
        except Exception as error:
            self._failed.append(self._fail(request, error))

    def _begin(self, request: Request, message: EngineRequest) -> None:
        request.status = Status.PREPARING
        most, count = self._scheduler.max_model_len - request.samples, request.num_prompt
        if count > most:  # which the front doors check; it would wait for ever
            raise InvalidRequestError(f"prompt has {count} tokens; accepted are up to {most}", param="prompt")
        self.features.prepare(request, message)
        salted = self.features.of(request, Feature.salt)
        salts = tuple(salt for feature, extra in salted if (salt := feature.salt(extra)) is not None)
        root: PrefixNode = (message.cache_salt, *salts) if salts else message.cache_salt
        request.cache_root = request.prefix_node = root_of(root, self._cache_generation)
        self._results.begin(request)
        self._runner.prepare(request, self._seeds.getrandbits(64))
        if not self._preparation.begin(request, self._runner.missing(request)):
            request.status = Status.WAITING
            self._scheduler.add(request)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests and free their pages; unknown and finished ids are ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._forget(request)

    def hurry(self, request_ids: Sequence[str]) -> None:
        """Tell the features of these requests that what they bound is to end now; unknown ids are ignored."""
        for request in filter(None, map(self._requests.get, request_ids)):
            for feature, extra in self.features.of(request, Feature.hurried):
                feature.hurried(request, extra)

    def turn(self) -> list[TokenDelta]:
        """Dispatch the next step and read the one before it, in the order that `_order` chooses.

        `add`, `abort` and all else come between two turns, on the same thread.
        """
        began = time.thread_time()
        deltas, order = self._start_prepared(), self._order()
        if order != "overlap":
            deltas += self._read_pending(None)
        if order != "read_only":
            deltas += self._step()
        for feature in self.features.having(Feature.turned):
            feature.turned()
        self._counting.so_far.step_host_seconds += time.thread_time() - began
        if not self.has_work and not self._requests:
            self._idle_check.run()
        return deltas

    def _order(self) -> Literal["overlap", "read_first", "read_only"]:
        """The order of this turn.

        - overlap: the next step is dispatched, and the one before it is read while the devices work.
        - read_first: the next step tries tokens ahead in a text that must be followed; the tokens of the step before
          it settle what is tried.
        - read_only: several groups send requests, and prompts have filled the step under way: the next step is
          dispatched in the next turn, so that requests that have come meanwhile may be in it. Such a step is long
          beside what this costs.
        """
        if self._pending is None:
            return "overlap"
        ran = self._pending.ran
        full = ran is not None and sum(ran.lengths) >= self._scheduler.max_num_batched_tokens
        if ran is not None and full and ran.kind != "decode" and self._groups.are_several:
            return "read_only"
        return "read_first" if self._scheduler.awaits_text(admitting=self._paused is None) else "overlap"

    def _step(self) -> list[TokenDelta]:
        """Dispatch the next step, if there is something to run, and read what is under way.

        A step in which features fill something in late is dispatched in two halves: the tokens of the step before it
        settle its second half, and are read while its first half runs.
        """
        if self._idles and not self._has_requests:
            for feature in self.features.having(Feature.idle):
                feature.idle()
        batch = Batch() if self._paused == "keep" else self._scheduler.schedule(admitting=self._paused is None)
        handle = None
        if batch.chunks:
            if batch.admitted:
                self.on_begin([request.request_id for request in batch.admitted])
            handle = self._runner.dispatch(batch)
            self._counting.step(batch)
        else:
            self._runner.before_step()
        deltas = self._read_pending(handle)
        if handle is not None and handle.waiting:
            self._runner.sample_waiting(handle)
        return deltas

    def _read_pending(self, handle: Handle | None) -> list[TokenDelta]:
        """Read the step under way, if there is one. While it is read, `handle` is the one under way."""
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
        """The sizes that every step shares."""
        return self._runner.sizes

    def stats(self) -> EngineStats:
        """A snapshot of counters and gauges."""
        scheduler, runner, so_far = self._scheduler, self._runner, self._counting.so_far
        compiles = runner.device.compiles
        found = msgspec.structs.replace(
            so_far,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_preparing=len(self._requests) - scheduler.num_unfinished,
            num_preemptions=scheduler.stats.preemptions,
            num_pages=self._pool.num_pages - 1,
            num_free_pages=self._pool.num_free,
            page_size=self._pool.page_size,
            resident_bytes=self._process.memory_info().rss,
            prefix_cache_queries=scheduler.stats.prefix_queries,
            prefix_cache_hits=scheduler.stats.prefix_hits,
            steps_by_tokens=list(so_far.steps_by_tokens),
            scheduled_tokens=dict(runner.scheduled_tokens),
            padded_tokens=dict(runner.padded_tokens),
            compiles_foreseen=compiles.foreseen,
            compiles_unforeseen=compiles.unforeseen,
            compile_seconds=compiles.seconds,
            compiles_pending=compiles.pending,
            ready=True,
        )
        for feature in self.features.having(Feature.stats):
            feature.stats(found, self._scheduler.running, self._scheduler.waiting)
        return found

    def prefix_root(self, request: Request) -> PrefixNode:
        """The root of a request's cached prefixes."""
        return self._scheduler.prefix_root(request)

    @property
    def is_paused(self) -> bool:
        """It waits for `resume`."""
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
        for feature in self.features.having(Feature.reset):
            feature.reset(root_of(None, self._cache_generation))

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
        self._runner.device.change_weights(lambda weights: self.weights.exchange(weights, new))
        self.weight_version = version
        self.reset_prefix_cache()

    def keep_weights(self, file: BinaryIO) -> None:
        """Leave the weights in a file, for another engine of the same plan; this one runs no step any more."""
        self._runner.device.keep_weights(file)

    def close(self) -> None:
        """End the threads that compile and that prepare requests, and what waits for them. Any thread may call this."""
        self._runner.device.close()
        self._preparation.close()
        for feature in self.features.having(Feature.close):
            feature.close()

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
            request.status = Status.WAITING
            self._scheduler.add(request)
        return failed

    def _read(self, handle: Handle) -> list[TokenDelta]:
        deltas = [self._finish_read(delta) for reading in handle.readings for delta in reading.deliver()]
        logprobs = handle.logprobs()
        for result in handle.results():
            if result.request.status is Status.FINISHED:
                continue  # it ended while this step was already under way
            if result.num_reserved:
                self._scheduler.settle(result)
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

    def _finish_read(self, delta: TokenDelta) -> TokenDelta:
        """A request that is given no tokens has ended."""
        request = self._requests[delta.request_id]
        self._counting.prompt(request)
        self._forget(request)
        delta.num_cached_tokens, delta.first_scheduled_time = max(request.num_cached, 0), request.first_scheduled_time
        delta.num_preemptions, delta.padding = request.num_preemptions, request.padding
        return delta

    def _accept(self, result: Result, logprobs: Logprobs | None) -> TokenDelta:
        """The tokens that a step gave one request become its own, up to a stop."""
        request = result.request
        if request.num_output == 0:
            self._counting.prompt(request)
        delta, settled = self._results.accept(result, logprobs, self._pending)
        delta.weight_version = self._read_version
        self._scheduler.accept(request, delta.token_ids, settled)
        self._counting.so_far.generation_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            delta.num_preemptions, delta.padding = request.num_preemptions, request.padding
            for feature, extra in self.features.of(request, Feature.ended):
                feature.ended(request, extra, delta)
            self._forget(request)
        return delta

    def _forget(self, request: Request) -> None:
        for feature, extra in self.features.of(request, Feature.forget):
            feature.forget(request, extra)
        self._scheduler.finish(request)
        del self._requests[request.request_id]
        self._results.forget(request)


FULL_CHECK_SECONDS = 60.0
"""The whole pool is looked through at most this often (0.1 ms for each 1,000 pages), unless some of it is missing."""


class IdleCheck:
    """Logs an error if pages or states are held although no request is left, or if the pool contradicts itself.

    The engine goes on with what is left. A fault is reported once, and again when it changes.
    """

    def __init__(self, pool: PagePool, features: Features):
        self._pool = pool
        self._features = features
        self._last = -FULL_CHECK_SECONDS
        self._known: tuple[str, int] | None = None

    def run(self) -> None:
        """Check both; to be called when no request holds pages."""
        pool, now = self._pool, time.monotonic()
        lost = pool.num_pages - 1 - pool.num_free
        if lost == 0 and now - self._last < FULL_CHECK_SECONDS:
            return
        self._last = now
        try:
            pool.check([])
            for feature in self._features.having(Feature.check):
                feature.check()
            fault = None
        except AssertionError as error:
            fault = (str(error).partition("\n")[0], lost)
        if fault is not None and fault != self._known:
            logger.error(
                "the KV cache is broken, which is a fault of jaxllm: %s; although no request is left, %d of its %d "
                "pages are held, which no request can use until the engine is restarted",
                *fault,
                pool.num_pages - 1,
            )
        self._known = fault
