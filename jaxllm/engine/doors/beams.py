"""Beam search over an engine that generates one token at a time; the prefix cache keeps each step cheap.

Every step asks the engine for the next token's candidates of each open beam. Scores and stopping are vLLM's: a beam's
score is the sum of its log-probabilities divided by length ** length_penalty, where the length counts prompt and
generated tokens without an end-of-sequence token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from jaxllm.engine.doors.streams import Gain, Stream, Streams
from jaxllm.engine.messages import EngineRequest, TokenDelta
from jaxllm.errors import InvalidRequestError
from jaxllm.requests.outputs import Logprob
from jaxllm.requests.sampling import LOGPROBS_MODES, MAX_LOGPROBS, SamplingParams
from jaxllm.text.detokenizer import Detokenizer
from jaxllm.text.tokenizer import Tokenizer

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
"""A step needs the 2 * width most likely tokens: up to half of them may end their beam."""

Candidates = Sequence[tuple[int, Logprob]]
"""One position's most likely tokens, best first."""


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """The parameters of a search.

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
        """No further step is needed."""
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


class Run:
    """One request's search, step by step."""

    def __init__(
        self, request: EngineRequest, search: BeamSearchParams, eos_token_ids: Collection[int], indices: range
    ):
        self.indices = indices
        """Its choices' indices in the stream."""
        self.width = search.beam_width
        self.ended = False
        self._request = request
        self._params = search
        self._search = BeamSearch(search, len(request.prompt_token_ids), eos_token_ids)
        self._answers: dict[int, TokenDelta] = {}
        self._first: TokenDelta | None = None
        self._padding = 0.0

    def step(self) -> list[EngineRequest]:
        """The next requests to the engine: one token after each open beam."""
        request, asked = self._request, self._request.sampling_params
        params = SamplingParams(
            temperature=0,
            max_tokens=1,
            logprobs=max(2 * self._params.beam_width, asked.logprobs or 0),
            logprobs_mode=LOGPROBS_MODES[0],
            prompt_logprobs=asked.prompt_logprobs if self._first is None else None,
            detokenize=False,
        )
        return [
            msgspec.structs.replace(
                request, prompt_token_ids=[*request.prompt_token_ids, *beam.token_ids], sampling_params=params
            )
            for beam in self._search.open
        ]

    def answer(self, beam: int, delta: TokenDelta) -> bool:
        """Take the token of one open beam; whether that was the last of the step."""
        self._answers[beam] = delta
        self._padding += delta.padding
        if len(self._answers) < len(self._search.open):
            return False
        deltas = [self._answers[at] for at in range(len(self._answers))]
        self._answers = {}
        self._first = self._first or deltas[0]
        self._search.advance([_best_first(delta) for delta in deltas])
        self.ended = self._search.done
        return True

    def results(self, tokenizer: Tokenizer | None) -> list[TokenDelta]:
        """The best texts, each whole in one delta; the first has the padding of the whole search."""
        params, first = self._request.sampling_params, self._first
        assert first is not None
        return [
            TokenDelta(
                request_id=self._request.request_id,
                token_ids=beam.token_ids,
                text=_text(tokenizer, self._request.prompt_token_ids, beam, params),
                logprobs=None if params.logprobs is None else [step[: params.logprobs + 1] for step in beam.steps],
                prompt_logprobs=first.prompt_logprobs,
                finish_reason=beam.finish_reason,
                num_cached_tokens=first.num_cached_tokens,
                first_scheduled_time=first.first_scheduled_time,
                padding=0.0 if rank else self._padding,
            )
            for rank, beam in enumerate(self._search.best(params.n))
        ]


class BeamStream(Stream):
    """A stream of the params.n best texts of each request, each whole in one delta; requests are searched side by side.

    A request of which a step fails or is aborted ends so, all its choices.
    """

    def __init__(
        self,
        streams: Streams,
        requests: Sequence[EngineRequest],
        searches: Sequence[BeamSearchParams],
        eos_token_ids: Collection[int],
        *,
        loop: asyncio.AbstractEventLoop | None = None,
    ):
        super().__init__(streams, (), loop=loop)
        self._runs: list[Run] = []
        for request, search in zip(requests, searches, strict=True):
            indices = range(self.num_unfinished, self.num_unfinished + request.sampling_params.n)
            self._runs.append(Run(request, search, eos_token_ids, indices))
            self.num_unfinished += len(indices)
        self._asked: list[tuple[Run, int]] = []
        """Whose the sequences are: a run, and which of its open beams."""

    def _begin(self) -> None:
        self._ask(self._runs, room=sum(run.width for run in self._runs))

    def _take(self) -> list[Gain]:
        gains: list[Gain] = []
        for index, delta in self._drain():
            run, beam = self._asked[index]
            if run.ended:
                continue
            if not delta.logprobs:  # it failed, or was aborted
                run.ended = True
                gains += [(choice, delta) for choice in run.indices]
            elif run.answer(beam, delta) and not run.ended:
                self._ask([run])
            elif run.ended:
                gains += zip(run.indices, run.results(self._streams.tokenizer), strict=True)
        self.num_unfinished -= len(gains)
        return gains

    def _ask(self, runs: Sequence[Run], *, room: int = 0) -> None:
        start, steps = len(self._asked), [(run, run.step()) for run in runs]
        self._asked += [(run, beam) for run, requests in steps for beam in range(len(requests))]
        sequences = [request for _, requests in steps for request in requests]
        self._streams.add(self, list(enumerate(sequences, start)), room=room)


def _text(tokenizer: Tokenizer | None, prompt: Sequence[int], beam: Beam, params: SamplingParams) -> str:
    """The text of a beam, without the token that ended it."""
    if tokenizer is None or not params.detokenize:
        return ""
    detokenizer = Detokenizer(tokenizer.backend, prompt, skip_special_tokens=params.skip_special_tokens)
    ids = beam.token_ids[:-1] if beam.finish_reason == "stop" else beam.token_ids
    return "".join(detokenizer.add(token)[0] for token in ids) + detokenizer.flush()


def _best_first(delta: TokenDelta) -> Candidates:
    assert delta.logprobs is not None
    return sorted(dict(delta.logprobs[0]).items(), key=lambda entry: -entry[1].logprob)
