"""Log-probabilities of a prompt's tokens, and of whole vocabularies; logits of states that the host sends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.engine.core.feature import EVERYTHING, Built, Feature, Plan, Ran, Reading
from jaxllm.engine.core.handle import SampledRow, on_host
from jaxllm.engine.core.keys import Key
from jaxllm.engine.core.packing import Packing
from jaxllm.engine.core.request import Request, Status
from jaxllm.engine.core.sampler import Logprobs, token_logprobs
from jaxllm.engine.core.sizes import Buckets
from jaxllm.engine.core.step import StepFunctions
from jaxllm.engine.messages import EngineRequest, TokenDelta
from jaxllm.requests.outputs import PromptScores, ScoresInProgress

SCORING = {-1: "score_all", 0: "score_given"}
"""The steps that score a prompt's tokens by `prompt_logprobs`: all of the vocabulary, nothing but the given ones."""


def _read_key(word: str, size: int) -> Key:
    return Key("read", size, frozenset({word}))


@dataclass
class _ScoreState:
    begin: int
    """The first token of the prompt that the scores are of."""
    scores: ScoresInProgress | None = None
    """Those of the prompt, where they are asked for."""
    vocabulary: list[np.ndarray] = field(default_factory=list)
    """Log-probabilities [V] at each token that a step gave, until its caller is told."""


class Stretch(NamedTuple):
    """Tokens of a request that are to be scored; the hidden state before the first of them is in `row`."""

    request: Request
    positions: range
    row: int


class ScoresFeature(Feature):
    """Its steps read hidden states that a backbone has left; they change nothing on the devices."""

    name = "scores"
    asked_by = ("prompt_logprobs", "wants_vocabulary")
    words = ("score", "score_given", "score_all", "unembed")

    def plan(self, buckets: Buckets) -> Plan:
        keys = [] if buckets.encodes else [_read_key(word, buckets.head[-1]) for word in self.words[:3]]
        return Plan(late=keys)

    def uses(self, key: Key, uses: Any) -> Any:
        return uses._replace(takes=("weights",)) if key.variant == {"unembed"} else uses

    def build(self, key: Key, maker: StepFunctions) -> Built:
        """`(parts, ints) -> (Logprobs,)` of given tokens, or `[R, V]` of all; or `(parts, states, normed) ->
        ([R, V],)`, the logits of states that the host sends: those that are not `normed` pass the last norm first.
        """
        (word,), rows = key.variant, key.size
        if word == "unembed":

            def unembed(parts: dict[str, Any], states: jax.Array, normed: jax.Array) -> Any:
                model = maker.model(parts)
                return (model.logits(jnp.where(normed[0], states, model.norm(states))),)

            return Built(unembed, [maker.state.hidden(rows), maker.state.ints(1)])
        packing = score_packing(rows)
        score: Any = {
            "score": token_logprobs,
            "score_given": partial(token_logprobs, count=0),  # the most likely ones would have to be searched for
            "score_all": lambda logits, _, sums: logits - sums.log_sum_exp(logits)[:, None],
        }[word]

        def step(parts: dict[str, Any], ints: jax.Array) -> Any:
            x, model = packing.unpack(ints), maker.model(parts)
            return (score(model.logits(parts["hidden"][x["hidden_row"]]), x["target"], model.kernels.sums),)

        return Built(step, [maker.state.ints(packing.size)])

    def prepare(self, request: Request, asked: EngineRequest) -> _ScoreState:
        count, extra = request.params.prompt_logprobs, _ScoreState(asked.scores_from)
        if count is not None:
            whole = count == -1
            width = self.around.sizes.vocab_size if whole else 1 + count
            extra.scores = PromptScores.empty(request.token_ids[extra.begin - 1 :], width, whole=whole)
        return extra

    def needs(self, request: Request, extra: _ScoreState) -> Iterable[Key]:
        if extra.scores is not None:
            yield self._key(request)
        if request.params.wants_vocabulary:
            yield _read_key("score_all", self.around.device.most_rows)

    def _key(self, request: Request) -> Key:
        """The step that scores a prompt's tokens."""
        return _read_key(SCORING.get(request.params.prompt_logprobs or 0, "score"), self.around.device.most_rows)

    def first_read(self, request: Request, extra: _ScoreState) -> int:
        return EVERYTHING if extra.scores is None else extra.begin - 1

    def apart(self, request: Request, extra: _ScoreState, tokens: range) -> bool:
        return request.params.wants_vocabulary or (extra.scores is not None and tokens.start < request.num_prompt - 1)

    def read(self, ran: Ran) -> Iterable[Reading]:
        """Requests of one kind share the rows of a step."""
        by_key: dict[Key, list[Stretch]] = defaultdict(list)
        for chunk, row in ran.chunks:
            request, extra = chunk.request, chunk.request.extras.get(self.name)
            if extra is None or extra.scores is None:
                continue
            first = max(chunk.start + 1, extra.begin)
            positions = range(first, min(chunk.start + chunk.length, request.num_prompt - 1) + 1)
            if positions:
                by_key[self._key(request)].append(Stretch(request, positions, row + first - 1 - chunk.start))
        for key, stretches in by_key.items():
            for part in together(stretches, key.size):
                yield self._score(key, part)
        wanted = [row for row in ran.sampled if row.request.params.wants_vocabulary]
        for start in range(0, len(wanted), self.around.device.most_rows):
            yield self._vocabulary(wanted[start : start + self.around.device.most_rows])

    def _score(self, key: Key, stretches: list[Stretch]) -> Reading:
        ints, x = score_packing(key.size).new()
        places, at = [], 0
        for request, positions, row in stretches:
            rows = slice(at, at + len(positions))
            x["hidden_row"][rows] = np.arange(row, row + len(positions))
            x["target"][rows] = request.token_ids[positions.start : positions.stop]
            places.append(rows)
            at = rows.stop
        result = self.around.device.run(key, ints)

        def deliver() -> Iterable[TokenDelta]:
            for (request, positions, _), rows in zip(stretches, places, strict=True):
                if request.status is not Status.FINISHED:
                    _store(request.extras[self.name], positions, rows, result)
            return ()

        return Reading(result, deliver)

    def _vocabulary(self, wanted: list[SampledRow]) -> Reading:
        """Log-probabilities of the whole vocabulary for the rows whose requests want them."""
        ints, x = score_packing(self.around.device.most_rows).new()
        x["hidden_row"][: len(wanted)] = [row.row for row in wanted]
        result = self.around.device.run(_read_key("score_all", self.around.device.most_rows), ints)

        def deliver() -> Iterable[TokenDelta]:
            for (request, _), values in zip(wanted, np.asarray(result), strict=False):
                request.extras[self.name].vocabulary.append(values)
            return ()

        return Reading(result, deliver)

    def said(self, request: Request, extra: _ScoreState, delta: TokenDelta) -> None:
        if request.num_output == 0:
            delta.prompt_logprobs = None if extra.scores is None else extra.scores.finish()
        if extra.vocabulary:
            rows, extra.vocabulary = extra.vocabulary, []
            delta.vocabulary = np.stack(rows[: len(delta.token_ids)]).astype("<f4").tobytes()

    def unembed(self, states: np.ndarray, normed: bool) -> np.ndarray:
        """The logits `[n, V]` of states `[n, E]`, as many as a step takes at a time: fewer rows than given are left.

        States pass the last norm first unless they are `normed`. Waits for the devices.
        """
        size = self.around.device.most_rows
        states = states[:size]
        padded = np.zeros((size, states.shape[1]), self.around.device.hidden_dtype)
        padded[: len(states)] = states
        found = self.around.device.run(_read_key("unembed", size), padded, np.array([normed], np.int32))
        return np.asarray(found)[: len(states)]


def score_packing(rows: int) -> Packing:
    """`rows` rows of hidden states, and the token whose log-probability each is asked for."""
    return Packing(hidden_row=(rows,), target=(rows,))


def _store(extra: _ScoreState, positions: range, found: slice, result: Any) -> None:
    """Keep a prompt's scores: their first row is of the first token that is scored."""
    scores, rows = extra.scores, slice(positions.start - extra.begin, positions.stop - extra.begin)
    assert scores is not None, "only prompts that are scored have stretches"
    if not isinstance(result, Logprobs):
        scores.logprobs[rows] = np.asarray(result)[found]
        return
    host = Logprobs(*(array[found] for array in on_host(result)))
    others = scores.ids.shape[1] - 1
    scores.ids[rows] = np.column_stack([scores.tokens[rows], host.top_ids[:, :others]])
    scores.logprobs[rows] = np.column_stack([host.chosen, host.top[:, :others]])
    scores.ranks[rows, 0] = host.rank
    scores.ranks[rows, 1:] = np.arange(1, others + 1)


def together(stretches: list[Stretch], size: int) -> Iterator[list[Stretch]]:
    """The same, cut where need be, in lists of up to `size` tokens.

    Worked example, size 4: stretches of 3 and 6 tokens are given as [3, 1], [4] and [1].
    """
    part, left = [], size
    for request, positions, row in stretches:
        while positions:
            now, positions = positions[:left], positions[left:]
            part.append(Stretch(request, now, row))
            row, left = row + len(now), left - len(now)
            if not left:
                yield part
                part, left = [], size
    if part:
        yield part
