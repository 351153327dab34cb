"""What is read off hidden states: scores of tokens, and in place of sampling sums, single states and logits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.engine.core.feature import EVERYTHING, Built, Feature, Fields, Plan, Ran, Reading, Traced, TracedStep
from jaxllm.engine.core.handle import SampledRow, on_host
from jaxllm.engine.core.keys import Key
from jaxllm.engine.core.packing import Packing
from jaxllm.engine.core.request import Chunk, Request, Status
from jaxllm.engine.core.sampler import Logprobs, row_logprobs, token_logprobs
from jaxllm.engine.core.sizes import Buckets, StepSizes
from jaxllm.engine.core.slots import Slots
from jaxllm.engine.core.step import StepFunctions
from jaxllm.engine.messages import EngineRequest, TokenDelta
from jaxllm.pallas_kernels import StepMetadata
from jaxllm.requests.outputs import PoolingParams, PromptScores, ScoresInProgress
from jaxllm.requests.sampling import MAX_LOGPROBS

ROW_IDS = 64
"""Tokens whose logits one row of a step gives; a request that asks for more takes several rows."""
SCORING = {-1: "score_all", 0: "score_given"}
"""The steps that score a prompt's tokens by `prompt_logprobs`: all of the vocabulary, nothing but the given ones."""


def _read_key(word: str, size: int) -> Key:
    return Key("read", size, frozenset({word}))


SUMS = _read_key("sums", 0)


@dataclass
class _ScoreState:
    begin: int
    asked: tuple[int, ...] = ()
    """Tokens whose log-probabilities are wanted at each token of the prompt, besides the most likely ones'."""
    scores: ScoresInProgress | None = None
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
    asked_by = ("prompt_logprobs", "wants_vocabulary", "skip_reading_prefix_cache")
    words = ("score", "score_given", "score_all", "score_asked", "unembed")

    def plan(self, buckets: Buckets) -> Plan:
        keys = [] if buckets.encodes else [_read_key(word, buckets.head[-1]) for word in self.words[:3]]
        return Plan(late=keys)

    def uses(self, key: Key, uses: Any) -> Any:
        return uses._replace(takes=("weights",)) if key.variant == {"unembed"} else uses

    def build(self, key: Key, maker: StepFunctions) -> Built:
        """`(parts, ints) -> (Logprobs,)` of given tokens, or `[R, V]` of all; or see `unembed`."""
        (word,), rows = key.variant, key.size
        if word == "unembed":

            def unembed(parts: dict[str, Any], states: jax.Array, normed: jax.Array) -> Any:
                model = maker.model(parts)
                return (model.logits(jnp.where(normed[0], states, model.norm(states))),)

            return Built(unembed, [maker.state.hidden(rows), maker.state.ints(1)])
        packing = score_packing(rows, asked=word == "score_asked")
        score: Any = {
            "score": lambda logits, x, sums: token_logprobs(logits, x["target"], sums),
            # the most likely ones would have to be searched for
            "score_given": lambda logits, x, sums: token_logprobs(logits, x["target"], sums, count=0),
            "score_all": lambda logits, _, sums: logits - sums.log_sum_exp(logits)[:, None],
            "score_asked": lambda logits, x, sums: row_logprobs(sums, logits, x["target"], x["asked"]),
        }[word]

        def step(parts: dict[str, Any], ints: jax.Array) -> Any:
            x, model = packing.unpack(ints), maker.model(parts)
            return (score(model.logits(parts["hidden"][x["hidden_row"]]), x, model.kernels.sums),)

        return Built(step, [maker.state.ints(packing.size)])

    def prepare(self, request: Request, asked: EngineRequest) -> _ScoreState:
        count = request.params.prompt_logprobs
        whole = count == -1
        extra = _ScoreState(asked.scores_from, () if whole else tuple(request.params.prompt_logprob_token_ids))
        if count is not None:
            width = self.around.sizes.vocab_size if whole else 1 + count + len(extra.asked)
            extra.scores = PromptScores.empty(request.token_ids[extra.begin - 1 :], width, whole=whole)
        return extra

    def needs(self, request: Request, extra: _ScoreState) -> Iterable[Key]:
        if extra.scores is not None:
            yield self._key(request)
        if request.params.wants_vocabulary:
            yield _read_key("score_all", self.around.device.most_rows)

    def _key(self, request: Request) -> Key:
        asked, count = request.extras[self.name].asked, request.params.prompt_logprobs or 0
        return _read_key("score_asked" if asked else SCORING.get(count, "score"), self.around.device.most_rows)

    def first_read(self, request: Request, extra: _ScoreState) -> int:
        if request.params.skip_reading_prefix_cache:
            return 0
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
        wanted, size = [row for row in ran.sampled if row.request.params.wants_vocabulary], self.around.device.most_rows
        for start in range(0, len(wanted), size):
            yield self._vocabulary(wanted[start : start + size])

    def _score(self, key: Key, stretches: list[Stretch]) -> Reading:
        ints, x = score_packing(key.size, asked=key.variant == {"score_asked"}).new()
        places, at = [], 0
        for request, positions, row in stretches:
            rows = slice(at, at + len(positions))
            x["hidden_row"][rows] = np.arange(row, row + len(positions))
            x["target"][rows] = request.token_ids[positions.start : positions.stop]
            if tokens := request.extras[self.name].asked:
                x["asked"][rows] = [*[-1] * (MAX_LOGPROBS - len(tokens)), *tokens]
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
        """The logits `[n, V]` of states `[n, E]`, normed first unless `normed`; waits for the devices."""
        size = self.around.device.most_rows
        states = states[:size]
        padded = np.zeros((size, states.shape[1]), self.around.device.hidden_dtype)
        padded[: len(states)] = states
        found = self.around.device.run(_read_key("unembed", size), padded, np.array([normed], np.int32))
        return np.asarray(found)[: len(states)]


def score_packing(rows: int, *, asked: bool = False) -> Packing:
    """`rows` rows of hidden states, and the token whose log-probability each is asked for, or several `asked` for."""
    return Packing(hidden_row=(rows,), target=(rows,), **({"asked": (rows, MAX_LOGPROBS)} if asked else {}))


def _store(extra: _ScoreState, positions: range, found: slice, result: Any) -> None:
    scores, rows = extra.scores, slice(positions.start - extra.begin, positions.stop - extra.begin)
    assert scores is not None, "only prompts that are scored have stretches"
    if not isinstance(result, Logprobs):
        scores.logprobs[rows] = np.asarray(result)[found]
        return
    host = Logprobs(*(array[found] for array in on_host(result)))
    others = scores.ids.shape[1] - 1 - len(extra.asked)
    columns = [*range(others), *range(MAX_LOGPROBS - len(extra.asked), MAX_LOGPROBS)]
    scores.ids[rows] = np.column_stack([scores.tokens[rows], host.top_ids[:, columns]])
    scores.logprobs[rows] = np.column_stack([host.chosen, host.top[:, columns]])
    scores.ranks[rows, 0] = host.rank
    scores.ranks[rows, 1 : 1 + others] = np.arange(1, others + 1)


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


@dataclass
class _PoolingState:
    params: PoolingParams
    second_text: int
    """The place at which the second of two texts begins; 0 where there is one."""
    values: np.ndarray | None = None

    def add(self, values: np.ndarray, first: bool) -> None:
        """Sums of further chunks add up, logits of further tokens follow; the first begin anew after a preemption."""
        if first or self.values is None:
            self.values = values.copy()
        elif self.params.of_tokens:
            self.values = np.concatenate([self.values, values])
        else:
            self.values += values

    def bytes_of(self, num_prompt: int) -> bytes:
        assert self.values is not None, "the last values have come"
        values = self.values / num_prompt if self.params.kind == "mean" else self.values
        return values.astype("<f4").tobytes()


class _Row(NamedTuple):
    request: Request
    width: int
    first: bool = True
    last: bool = True


class PoolingFeature(Feature):
    """Its requests run backbones only. An encoder is told besides where each of its texts goes on as a second one."""

    name = "pooling"
    on = ("encode",)
    always = True
    asked_by = ("pooling",)
    words = ("sums", "token_logits")

    def plan(self, buckets: Buckets) -> Plan:
        logits = [_read_key("token_logits", rows) for rows in (buckets.head if buckets.encodes else buckets.head[-1:])]
        if buckets.encodes:
            return Plan(first=logits or [SUMS])
        return Plan(late=[SUMS, *logits])

    def uses(self, key: Key, uses: Any) -> Any:
        return uses._replace(takes=("hidden",)) if key == SUMS else uses

    def build(self, key: Key, maker: StepFunctions) -> Built:
        """`(parts, ints) -> ([max_num_seqs, E],)` sums of hidden states, or `([R, n + 1],)` logits of tokens and the
        logarithm of the sum of all tokens' exponentials; float32.
        """
        seqs, most = maker.sizes.max_num_seqs, maker.sizes.max_num_batched_tokens
        packing = _logits_packing(key.size)

        def sums(parts: dict[str, Any], owner: jax.Array) -> Any:
            return (jax.ops.segment_sum(parts["hidden"].astype(jnp.float32), owner, seqs + 1)[:-1],)

        def logits(parts: dict[str, Any], ints: jax.Array) -> Any:
            x = packing.unpack(ints)
            model = maker.model(parts)
            found = model.logits(parts["hidden"][x["hidden_row"]])
            norm = model.kernels.sums.log_sum_exp(found)
            return (jnp.column_stack([jnp.take_along_axis(found, x["token_ids"], axis=1), norm]),)

        return Built(sums, [maker.state.ints(most)]) if key == SUMS else Built(logits, [maker.state.ints(packing.size)])

    def prepare(self, request: Request, asked: EngineRequest) -> _PoolingState | None:
        return None if asked.pooling is None else _PoolingState(asked.pooling, asked.second_text)

    def needs(self, request: Request, extra: _PoolingState) -> Iterable[Key]:
        return [_read_key("token_logits", self.around.device.most_rows) if extra.params.of_tokens else SUMS]

    def first_read(self, request: Request, extra: _PoolingState) -> int:
        return 0 if extra.params.kind in ("mean", "cls") else EVERYTHING

    def apart(self, request: Request, extra: _PoolingState, tokens: range) -> bool:
        return True

    def fields(self, key: Key, sizes: StepSizes) -> dict[str, tuple[int, ...]]:
        return {"second_text": (min(key.size, sizes.max_num_seqs),)}

    def pack(self, key: Key, x: Fields, chunks: Sequence[Chunk]) -> tuple[np.ndarray, ...]:
        x["second_text"][: len(chunks)] = [chunk.request.extras[self.name].second_text for chunk in chunks]
        return ()

    def traced(self, step: TracedStep) -> Traced:
        return _Texts(step.x["second_text"])

    def read(self, ran: Ran) -> Iterable[Reading]:
        sums: list[_Row] = []
        logits: list[tuple[Request, int]] = []
        sizes = self.around.sizes
        owner = np.full(sizes.max_num_batched_tokens, sizes.max_num_seqs, np.int32)
        for chunk, row in ran.chunks:
            request, begins, ends = chunk.request, chunk.start == 0, chunk.num_sampled > 0
            extra, end = request.extras.get(self.name), row + chunk.length
            kind = None if extra is None else extra.params.kind
            if extra is not None and extra.params.of_tokens:
                if ends:
                    logits.append((request, end - 1))
            elif kind == "mean":
                owner[row:end] = len(sums)
                sums.append(_Row(request, sizes.hidden_size, begins, ends))
            elif (kind == "cls" and begins) or (kind == "last" and ends):
                owner[row if kind == "cls" else end - 1] = len(sums)
                sums.append(_Row(request, sizes.hidden_size))
        found = [self._reading(sums, self.around.device.run(SUMS, owner))] if sums else []
        return [*found, *(self._logits(logits) if logits else ())]

    def _logits(self, wanted: list[tuple[Request, int]]) -> Iterable[Reading]:
        size = self.around.device.most_rows
        pieces = [
            (_Row(request, len(ids[start:end]), start == 0, end >= len(ids)), row, ids[start:end])
            for request, row in wanted
            for ids in [request.extras[self.name].params.token_ids or range(self.around.sizes.vocab_size)]
            for start in range(0, len(ids), ROW_IDS)
            for end in [start + ROW_IDS]
        ]
        for start in range(0, len(pieces), size):
            part = pieces[start : start + size]
            ints, x = _logits_packing(size).new()
            for index, (_, row, ids) in enumerate(part):
                x["hidden_row"][index] = row
                x["token_ids"][index, : len(ids)] = ids
            result = self.around.device.run(_read_key("token_logits", size), ints)
            yield self._reading([row for row, _, _ in part], result)

    def _reading(self, rows: list[_Row], result: Any) -> Reading:
        def deliver() -> Iterable[TokenDelta]:
            for values, (request, width, first, last) in zip(np.asarray(result), rows, strict=False):
                if request.status is Status.FINISHED:
                    continue
                extra = request.extras[self.name]
                norm = values[-1] if extra.params.kind == "logprobs" else 0
                extra.add(values[:width] - norm, first)
                if last:
                    pooled = extra.bytes_of(request.num_prompt)
                    yield TokenDelta(request_id=request.request_id, pooled=pooled, finish_reason="stop")

        return Reading(result, deliver)


class _Texts(Traced):
    def __init__(self, second: Any):
        self._second = second

    def metadata(self, meta: StepMetadata, slots: Slots) -> StepMetadata:
        return with_token_types(meta, self._second)


def with_token_types(meta: StepMetadata, second: Any) -> StepMetadata:
    """Tell layers which of two texts each token is of: the second begins at `second` `[S]`; 0 where there is none."""
    begins = second[jnp.minimum(meta.seq_ids, len(second) - 1)]
    return replace(meta, token_types=((begins > 0) & (meta.positions >= begins)).astype(jnp.int32))


def _logits_packing(rows: int) -> Packing:
    return Packing(hidden_row=(rows,), token_ids=(rows, ROW_IDS))
