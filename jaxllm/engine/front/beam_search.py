"""Beam search over an engine that generates one token at a time; the prefix cache keeps each step cheap.

Every step asks the engine for the next token's candidates of each open beam. Scores and stopping are vLLM's: a beam's
score is the sum of its log-probabilities divided by length ** length_penalty, where the length counts prompt and
generated tokens without an end-of-sequence token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxllm.engine.detokenizer import Detokenizer
from jaxllm.engine.front.messages import TokenDelta
from jaxllm.errors import InvalidRequestError
from jaxllm.requests.outputs import CompletionOutput, Logprob
from jaxllm.requests.sampling import MAX_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    from jaxllm.engine.front.async_llm import AsyncLLM
    from jaxllm.text.tokenizer import Tokenizer

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
"""A step needs the 2 * width most likely tokens: up to half of them may end their beam."""

Candidates = Sequence[tuple[int, Logprob]]
"""One position's most likely tokens, best first."""


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """What to search for.

    Attributes:
        beam_width: beams that stay open after each step, from 1 to MAX_BEAM_WIDTH.
        max_tokens: longest text in tokens; beams still open there end with finish_reason "length".
        length_penalty: above 0 favours longer texts, below 0 shorter ones.
        ignore_eos: treat end-of-sequence as any other token.
        early_stopping: stop when beam_width beams have ended, even if an open one could still become better.

    Raises:
        InvalidRequestError: a value is out of range; `param` names the field.
    """

    beam_width: int
    max_tokens: int = 16
    length_penalty: float = 1.0
    ignore_eos: bool = False
    early_stopping: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            raise InvalidRequestError(
                f"beam_width is {self.beam_width}; it must be from 1 to {MAX_BEAM_WIDTH}", param="beam_width"
            )
        if self.max_tokens < 1:
            raise InvalidRequestError(f"max_tokens is {self.max_tokens}; it must be 1 or more", param="max_tokens")


@dataclass
class Beam:
    """One text of the search. `steps` holds each token's candidates with the token itself in front."""

    token_ids: list[int] = field(default_factory=list)
    steps: list[list[tuple[int, Logprob]]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None

    def extended(self, token: int, candidates: Candidates) -> Beam:
        value = dict(candidates)[token]
        step = [(token, value), *(entry for entry in candidates if entry[0] != token)]
        return Beam([*self.token_ids, token], [*self.steps, step], self.cumulative_logprob + value.logprob)


class BeamSearch:
    """The state of one search: `open` beams are to be given their candidates until it is `done`."""

    def __init__(self, params: BeamSearchParams, prompt_length: int, eos_token_ids: Collection[int]):
        self.open = [Beam()]
        self._ended: list[Beam] = []
        self._params = params
        self._prompt_length = prompt_length
        self._eos = frozenset(eos_token_ids)
        self._length = 0

    def advance(self, candidates: Sequence[Candidates]) -> None:
        """Go one token further; `candidates` has the 2 * beam_width most likely tokens after each open beam."""
        extended = []
        for beam, nexts in zip(self.open, candidates, strict=True):
            for token, _ in nexts[: 2 * self._params.beam_width]:
                longer = beam.extended(token, nexts)
                if token in self._eos and not self._params.ignore_eos:
                    longer.finish_reason = "stop"
                    self._ended.append(longer)
                else:
                    extended.append(longer)
        self.open = self._ranked(extended)[: self._params.beam_width]
        self._length += 1

    @property
    def done(self) -> bool:
        """Whether no further step is needed."""
        if not self.open or self._length >= self._params.max_tokens:
            return True
        width = self._params.beam_width
        if len(self._ended) < width:
            return False
        return self._params.early_stopping or self.score(self._ranked(self._ended)[width - 1]) >= max(
            map(self._bound, self.open)
        )

    def best(self, count: int) -> list[Beam]:
        """The `count` texts with the highest scores, best first."""
        for beam in self.open:
            beam.finish_reason = "length"
        return self._ranked([*self._ended, *self.open])[:count]

    def score(self, beam: Beam) -> float:
        length = self._prompt_length + len(beam.token_ids)
        length -= beam.token_ids[-1] in self._eos
        return beam.cumulative_logprob / length**self._params.length_penalty

    def _bound(self, beam: Beam) -> float:
        """The best score an open beam could reach, with every further token certain."""
        shortest = self._prompt_length + len(beam.token_ids)
        lengths = (shortest, self._prompt_length + self._params.max_tokens)
        return max(beam.cumulative_logprob / length**self._params.length_penalty for length in lengths)

    def _ranked(self, beams: list[Beam]) -> list[Beam]:
        return sorted(beams, key=self.score, reverse=True)


def step_params(search: BeamSearchParams, params: SamplingParams, first: bool) -> SamplingParams:
    """What a step asks the engine for; `params` says which log-probabilities the caller wants to see."""
    return SamplingParams(
        temperature=0,
        max_tokens=1,
        logprobs=max(2 * search.beam_width, params.logprobs or 0),
        prompt_logprobs=params.prompt_logprobs if first else None,
        detokenize=False,
    )


def completion(tokenizer: Tokenizer | None, prompt: Sequence[int], index: int, beam: Beam) -> CompletionOutput:
    """A finished beam as its caller sees it, with the candidates of each of its tokens."""
    return CompletionOutput(
        index=index,
        text=beam_text(tokenizer, prompt, beam, SamplingParams()),
        token_ids=beam.token_ids,
        cumulative_logprob=beam.cumulative_logprob,
        logprobs=[dict(step) for step in beam.steps],
        finish_reason=beam.finish_reason,
    )


async def beam_search(
    engine: AsyncLLM,
    search: BeamSearchParams,
    prompt_token_ids: list[int],
    params: SamplingParams,
    *,
    request_id: str,
    priority: int = 0,
    cache_salt: str | None = None,
) -> AsyncGenerator[tuple[int, TokenDelta], None]:
    """Yield (choice, delta) for the params.n best texts, each whole in one delta, like AsyncLLM.stream.

    Raises what AsyncLLM.stream raises. Closing the iterator, or cancelling, aborts what runs.
    """
    state = BeamSearch(search, len(prompt_token_ids), engine.info.eos_token_ids)
    first: TokenDelta | None = None
    step = 0
    while not state.done:
        asked = step_params(search, params, first=step == 0)
        runs = [
            _one_token(
                engine, [*prompt_token_ids, *beam.token_ids], asked, f"{request_id}-{step}-{at}", priority, cache_salt
            )
            for at, beam in enumerate(state.open)
        ]
        deltas = await _all(runs)
        first = first or deltas[0]
        state.advance([_delta_candidates(delta) for delta in deltas])
        step += 1
    assert first is not None
    for choice, beam in enumerate(state.best(params.n)):
        shown = None if params.logprobs is None else [entries[: params.logprobs + 1] for entries in beam.steps]
        yield (
            choice,
            TokenDelta(
                request_id=request_id,
                token_ids=beam.token_ids,
                text=beam_text(engine.tokenizer, prompt_token_ids, beam, params),
                logprobs=shown,
                prompt_logprobs=first.prompt_logprobs,
                finish_reason=beam.finish_reason,
                num_cached_tokens=first.num_cached_tokens,
                first_scheduled_time=first.first_scheduled_time,
            ),
        )


def beam_text(tokenizer: Tokenizer | None, prompt: Sequence[int], beam: Beam, params: SamplingParams) -> str:
    """The text of a beam, without the token that ended it."""
    if tokenizer is None or not params.detokenize:
        return ""
    detokenizer = Detokenizer(tokenizer.backend, prompt, skip_special_tokens=params.skip_special_tokens)
    ids = beam.token_ids[:-1] if beam.finish_reason == "stop" else beam.token_ids
    return "".join(detokenizer.add(token)[0] for token in ids) + detokenizer.flush()


async def _one_token(
    engine: AsyncLLM, ids: list[int], params: SamplingParams, request_id: str, priority: int, salt: str | None
) -> TokenDelta:
    stream = engine.stream(ids, params, request_id=request_id, priority=priority, cache_salt=salt)
    async with aclosing(stream) as deltas:
        async for _, delta in deltas:
            if delta.logprobs or delta.error is not None:
                return delta
    raise RuntimeError(f"the engine ended {request_id} without a token")


async def _all(runs: list) -> list[TokenDelta]:
    """Await all; when one fails, or the caller is cancelled, the others end too."""
    tasks = [asyncio.ensure_future(run) for run in runs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _delta_candidates(delta: TokenDelta) -> Candidates:
    if delta.error is not None or not delta.logprobs:
        raise RuntimeError(f"a step of the beam search failed: {delta.error}")
    return best_first(dict(delta.logprobs[0]))


def best_first(candidates: Mapping[int, Logprob]) -> Candidates:
    return sorted(candidates.items(), key=lambda entry: -entry[1].logprob)
