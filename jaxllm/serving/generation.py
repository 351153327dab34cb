"""One HTTP request's sequences: the engine streams of its prompts, merged, measured, and stopped together."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import msgspec

from jaxllm.engine.front.beams import BeamSearchParams
from jaxllm.engine.front.streams import Gain, Stream
from jaxllm.engine.messages import EngineRequest, TokenDelta
from jaxllm.errors import EngineDeadError, QueueFullError
from jaxllm.requests.outputs import Logprob
from jaxllm.requests.prompt_scores import PromptScores
from jaxllm.requests.sampling import SamplingParams
from jaxllm.serving.generation_settings import GenerationSettings
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.request_metrics import SequenceTimer
from jaxllm.serving.served_model import ServedModel

OPENING_SECONDS = 0.1
"""How long a stream's first byte may wait, so that a refusal by the engine still gets its own status code."""

Step = Sequence[tuple[int, Logprob]]
"""One token's candidates as the engine gives them: the chosen token first, then the most likely ones."""


@dataclass
class Usage:
    """Tokens of one request: cached ones are part of the prompt's, those of the reasoning of the completion's."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )


@dataclass
class Clock:
    """When a request's first sequence began to run, and when its first and its last token so far came; seconds."""

    scheduled: float | None = None
    first: float | None = None
    last: float | None = None

    def on_delta(self, delta: TokenDelta) -> None:
        now = time.time()
        self.scheduled = self.scheduled or delta.first_scheduled_time
        if delta.token_ids:
            self.first, self.last = self.first or now, now


@dataclass
class Prompt:
    """One tokenized prompt and the parameters of its sequences; `text` is what an echo shows.

    With `beam_search` the sequences are searched for instead of sampled.
    """

    token_ids: list[int]
    params: SamplingParams
    text: str = ""
    beam_search: BeamSearchParams | None = None


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
    deltas: list[TokenDelta] = field(default_factory=list)
    """What it was collected from."""

    def add(self, delta: TokenDelta) -> None:
        self.deltas.append(delta)
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    @property
    def mean_logprob(self) -> float:
        return sum(step[0][1].logprob for step in self.logprobs) / max(len(self.logprobs), 1)


class Generation:
    """An async context: entering starts every sequence, leaving aborts those that have not finished.

    Choice index of sequence j of prompt i is i * n + j, n being those that are generated: best_of, where the request
    sets it. Entering raises what the engine says at once: QueueFullError,
    EngineDeadError, InvalidRequestError. With `prompt_only` the prompts are scored and the one generated token dropped.
    With `goes_on` it belongs to a request that was accepted before, which is the one that ServedModel.running has.
    """

    def __init__(
        self,
        model: ServedModel,
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
        self._model = model
        self._prompt_only = prompt_only
        self._goes_on = goes_on
        self._unfinished = set(range(self.num_choices))
        self.clock = Clock()
        self._timers = [
            SequenceTimer(model.metrics, time.time(), len(prompt.token_ids), prompt.params.max_tokens)
            for prompt in prompts
            for _ in range(self.n)
        ]
        self._stream: Stream | None = None
        self._opening: list[Gain] = []
        self._failure: Exception | None = None
        self._completion_tokens = 0
        self._cached_tokens: dict[int, int] = {}

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    async def __aenter__(self) -> Generation:
        self._model.check_accepting(goes_on=self._goes_on)
        if not self._goes_on:
            self._model.running.add(self)
        try:
            requests = [
                EngineRequest(
                    request_id=self.id,
                    prompt_token_ids=prompt.token_ids,
                    sampling_params=prompt.params,
                    priority=self._request.priority,
                    cache_salt=self._request.cache_salt,
                )
                for prompt in self.prompts
            ]
            searches = [prompt.beam_search for prompt in self.prompts if prompt.beam_search is not None]
            self._stream = self._model.engine.run(requests, searches=searches).__enter__()
            for _ in self.prompts:
                self._model.metrics.observe("request_params_n", self.num_returned)
            self._opening = await self._next(OPENING_SECONDS)
            if self._failure is not None and not self._opening:
                raise self._failure
        except BaseException as error:
            self._failure = error if isinstance(error, Exception) else None
            if isinstance(error, QueueFullError):
                self._model.metrics.count_rejected()
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._model.running.discard(self)
        if self._stream is None:
            return  # it never began
        self._stream.__exit__()
        reason = "abort" if self._failure is None else "error"
        for index in self._unfinished:
            self._timers[index].on_delta(TokenDelta(request_id=self.id, finish_reason=reason))
        for start in range(0, self.num_choices, self.n):
            longest = max(timer.num_tokens for timer in self._timers[start : start + self.n])
            self._model.metrics.observe("request_max_num_generation_tokens", longest)

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

    def abort(self) -> None:
        """Stop now: every unfinished choice ends with finish_reason "abort", which its client sees."""
        if self._stream is not None:
            self._stream.abort()

    def usage(self) -> Usage:
        """Tokens of all gains handed out so far; a prompt counts once whatever n is."""
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self._completion_tokens,
            cached_tokens=sum(self._cached_tokens.values()),
        )

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
            self.clock.on_delta(delta)
            if self._prompt_only:
                delta = msgspec.structs.replace(delta, token_ids=[], text="", logprobs=None)
                gains[at] = index, delta
            self._timers[index].on_delta(delta)
            if delta.finish_reason is not None:
                self._unfinished.discard(index)
        return gains

    def _counted(self, gains: list[Gain]) -> list[Gain]:
        for index, delta in gains:
            self._completion_tokens += len(delta.token_ids)
            self._cached_tokens.setdefault(index // self.n, delta.num_cached_tokens)
        return gains


def _failure(delta: TokenDelta) -> APIError:
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
