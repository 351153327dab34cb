"""One HTTP request's sequences: the engine streams of its prompts, merged, measured, and stopped together."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import msgspec

from jaxllm.chat.parser import Step
from jaxllm.chat.prompt import AnswerSettings, Prompt
from jaxllm.engine.doors.streams import Gain, Stream
from jaxllm.engine.messages import EngineRequest, TokenDelta
from jaxllm.errors import EngineDeadError
from jaxllm.requests.outputs import PromptScores, WeightVersionSpan, extend_versions
from jaxllm.serving.call import Call
from jaxllm.serving.hand_over import HandedOn, HandOver, check_hand_over
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.records import Clock, ModelCall, Phases
from jaxllm.serving.request_metrics import SequenceTimer
from jaxllm.serving.served_model import stopped

OPENING_SECONDS = 0.1
"""How long a stream's first byte may wait, so that a refusal by the engine still gets its own status code."""


@dataclass(frozen=True, kw_only=True)
class GenerationSettings(AnswerSettings):
    """What a request asks of the server besides.

    Attributes:
        priority: lower runs earlier.
        request_id: the caller's own, part of the answer's id.
        cache_salt: only requests with the same salt share cached prefixes.
        lora: how strongly adapters are used, by their numbers; None where the caller says nothing of them.
        hand_over: the prompt is computed for another server, or was computed by one.
    """

    priority: int = 0
    request_id: str | None = None
    cache_salt: str | None = None
    lora: Mapping[int, float] | None = None
    hand_over: HandOver | None = None


@dataclass
class Usage:
    """Tokens of one request: cached ones are part of the prompt's, those of the reasoning of the completion's."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    drafted_tokens: int = 0
    """Tried ahead."""
    taken_tokens: int = 0
    """Those of them that were what the model chose."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
            self.drafted_tokens + other.drafted_tokens,
            self.taken_tokens + other.taken_tokens,
        )


def note_version(spans: list[WeightVersionSpan], delta: TokenDelta) -> None:
    """Note which weights made the tokens of a delta; those of a beam search do not say."""
    if delta.token_ids and delta.weight_version:
        extend_versions(spans, delta.weight_version, len(delta.token_ids))


@dataclass
class Choice:
    """One finished sequence."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Step] = field(default_factory=list)
    prompt_logprobs: PromptScores | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[WeightVersionSpan] = field(default_factory=list)
    deltas: list[TokenDelta] = field(default_factory=list)
    """What it was collected from."""

    def add(self, delta: TokenDelta) -> None:
        self.deltas.append(delta)
        self.text += delta.text
        self.token_ids += delta.token_ids
        note_version(self.weight_versions, delta)
        self.logprobs += delta.logprobs or []
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    @property
    def mean_logprob(self) -> float:
        return sum(step[0][1].logprob for step in self.logprobs) / max(len(self.logprobs), 1)


class Generation:
    """An async context: entering starts every sequence, leaving aborts those that have not finished.

    Choice index of sequence j of prompt i is i * n + j, n being those that are generated: best_of, where the request
    sets it. Entering raises what the engine says at once: QueueFullError, EngineDeadError, InvalidRequestError; and 429
    where it may use more tokens than its key has left. With `prompt_only` the prompts are scored and the one generated
    token dropped. With `goes_on` it belongs to a request that was accepted before, which is the one that
    ServedModel.running has.

    Raises InvalidRequestError for a priority that its tenant may not have, for adapters that are not there, and where
    its prompt cannot be handed to another server, or taken from one.
    """

    def __init__(
        self,
        call: Call,
        prompts: list[Prompt],
        request: GenerationSettings,
        prefix: str,
        *,
        prompt_only: bool = False,
        goes_on: bool = False,
    ):
        self.id = prefix + (request.request_id or uuid.uuid4().hex)
        self.prompts = prompts
        self.n = prompts[0].params.n
        self.num_returned = request.n
        self.created = int(time.time())
        self._request = request
        self._call = call
        self._model = model = call.model
        self._adapters = call.adapter_uses(request.lora)
        self._hand_over = request.hand_over
        if request.hand_over is not None:
            check_hand_over(request.hand_over, model.engine.info.transfer, prompts, self._adapters)
        self._priority = call.tenant.priority(request.priority)
        self._prompt_only = prompt_only
        self._goes_on = goes_on
        self._unfinished = set(range(self.num_choices))
        arrival = time.time()
        self._timers = [
            SequenceTimer(model.metrics, arrival, len(prompt.token_ids), prompt.params.max_tokens)
            for prompt in prompts
            for _ in range(self.n)
        ]
        self._asked = ModelCall(operation="generate", model=model.names[0], clock=Clock(arrival))
        self._entered = AsyncExitStack()
        self._stream: Stream | None = None
        self._opening: list[Gain] = []
        self._failure: Exception | None = None
        self._ended_by = stopped()
        """What an abort is told as."""
        self._completion_tokens = 0
        self._cached_tokens: dict[int, int] = {}
        self._drafted_tokens = self._taken_tokens = 0
        self._finish_reasons: dict[int, str] = {}
        self._texts = [""] * self.num_choices
        """Of the choices, where the request's record is to have them."""
        self._keeps_texts = call.record is not None and call.record.keeps_texts

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    async def __aenter__(self) -> Generation:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(
                self._call.asking(self, self._asked, self._most_tokens, goes_on=self._goes_on)
            )
            tenant = self._call.tenant
            requests = [
                EngineRequest(
                    request_id=self.id,
                    prompt_token_ids=prompt.token_ids,
                    sampling_params=prompt.params,
                    priority=self._priority,
                    cache_salt=tenant.cache_salt(self._request.cache_salt),
                    group=tenant.group,
                    adapters=self._adapters,
                    hands_on=self._hand_over is not None and self._hand_over.hands_on,
                    pages_at=None if self._hand_over is None else self._hand_over.pages_at,
                )
                for prompt in self.prompts
            ]
            searches = [prompt.beam_search for prompt in self.prompts if prompt.beam_search is not None]
            self._stream = stack.enter_context(self._model.engine.run(requests, searches=searches))
            stack.callback(self._end)
            for _ in self.prompts:
                self._model.metrics.observe("request_params_n", self.num_returned)
            self._opening = await self._next(OPENING_SECONDS)
            if self._failure is not None and not self._opening:
                raise self._failure
            self._entered = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._entered.aclose()

    def _end(self) -> None:
        """Note how it has ended; sequences that have not finished end now."""
        reason = "abort" if self._failure in (None, self._ended_by) else "error"
        for index in self._unfinished:
            self._timers[index].on_delta(TokenDelta(request_id=self.id, finish_reason=reason))
        for start in range(0, self.num_choices, self.n):
            longest = max(timer.num_tokens for timer in self._timers[start : start + self.n])
            self._model.metrics.observe("request_max_num_generation_tokens", longest)
        asked = self._asked
        asked.num_answers = self.num_choices
        asked.prompt_tokens = self._prompt_tokens
        asked.params = self.prompts[0].params
        asked.completion_tokens = sum(timer.num_tokens for timer in self._timers)
        asked.cached_tokens = sum(self._cached_tokens.values())
        asked.finish_reasons = [self._finish_reasons.get(index, reason) for index in range(self.num_choices)]
        if self._keeps_texts:
            asked.answers = self._texts
            if self._model.engine.tokenizer is not None:
                asked.prompts = [self._model.tokenizer.decode(prompt.token_ids, False) for prompt in self.prompts]

    async def arrivals(self, timeout: float | None = None) -> AsyncIterator[list[Gain]]:
        """Events in the order they came, as many as there are; an empty list after `timeout` seconds of silence.

        Raises what stopped the engine's streams before their end.
        """
        if self._opening:
            opening, self._opening = self._opening, []
            yield self._counted(opening)
        while self._unfinished:
            if self._failure is not None:
                raise self._failure
            gains = await self._next(timeout)
            if gains or self._failure is None:
                yield self._counted(gains)

    def abort(self, error: APIError) -> None:
        """Stop now; what reads the answer gets the error after what has come of it."""
        self._ended_by = error
        if self._stream is not None:
            self._stream.abort()

    def usage(self) -> Usage:
        """Tokens of all gains handed out so far; a prompt counts once whatever n is."""
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            cached_tokens=sum(self._cached_tokens.values()),
            drafted_tokens=self._drafted_tokens,
            taken_tokens=self._taken_tokens,
        )

    @property
    def handed_on(self) -> HandedOn | None:
        """Where another server finds the pages of the prompt; None where that was not asked for."""
        info = self._model.engine.info
        if self._hand_over is None or not self._hand_over.hands_on or info.transfer is None:
            return None
        return HandedOn(info.transfer, len(self.prompts[0].token_ids) // info.page_size)

    def phases(self) -> Phases:
        """Where its time has gone so far."""
        return self._asked.clock.phases(self.num_choices)

    @property
    def _prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def _most_tokens(self) -> int:
        """That the request may use."""
        return self._prompt_tokens + self.n * sum(prompt.params.max_tokens or 0 for prompt in self.prompts)

    async def _next(self, timeout: float | None) -> list[Gain]:
        """What came, up to the first event that tells of a failure, which it leaves in `_failure`."""
        assert self._stream is not None
        try:
            gains = await self._stream.next(timeout)
        except EngineDeadError as error:
            self._failure = error
            return []
        for at, (index, delta) in enumerate(gains):
            if delta.error is not None:
                self._failure = _failure(delta)
                return gains[:at]
            if delta.finish_reason == "abort":
                self._failure = self._ended_by
                return gains[:at]
            self._asked.clock.on_delta(delta)
            if self._prompt_only:
                delta = msgspec.structs.replace(delta, token_ids=[], text="", logprobs=None)
                gains[at] = index, delta
            self._timers[index].on_delta(delta)
            if self._keeps_texts:
                self._texts[index] += delta.text
            if delta.finish_reason is not None:
                self._unfinished.discard(index)
                self._finish_reasons[index] = delta.finish_reason
        return gains

    def _counted(self, gains: list[Gain]) -> list[Gain]:
        for index, delta in gains:
            self._completion_tokens += len(delta.token_ids)
            self._cached_tokens.setdefault(index // self.n, delta.num_cached_tokens)
            self._drafted_tokens += delta.num_drafted
            self._taken_tokens += delta.num_taken
        return gains


def _failure(delta: TokenDelta) -> Exception:
    if delta.is_dead:
        return EngineDeadError(f"{delta.error}; another engine of the model would answer the same request")
    if delta.invalid:
        return APIError(400, f"{delta.error}", code="request_failed")
    return APIError(500, f"the request failed: {delta.error}", type="server_error", code="request_failed")


async def collect(generation: Generation) -> list[Choice]:
    """Run to the end and return every choice; of best_of choices the n with the highest mean log-probability."""
    choices = [Choice(index) for index in range(generation.num_choices)]
    async for gains in generation.arrivals():
        for index, delta in gains:
            choices[index].add(delta)
    if generation.num_returned == generation.n:
        return choices
    best: list[Choice] = []
    for start in range(0, len(choices), generation.n):
        ranked = sorted(choices[start : start + generation.n], key=lambda choice: -choice.mean_logprob)
        best += ranked[: generation.num_returned]
    for index, choice in enumerate(best):
        choice.index = index
    return best
