"""Beam search against brute force: exhaustive where the beam holds everything, a plain re-telling where it does not."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from jaxllm.engine.doors.beams import MAX_BEAM_WIDTH, BeamSearch, BeamSearchParams
from jaxllm.errors import InvalidRequestError
from jaxllm.requests.outputs import Logprob

EOS = 0
Ranked = list[tuple[tuple[int, ...], float]]


def next_logprobs(ids: tuple[int, ...], vocab: int) -> list[float]:
    """A random but fixed distribution after every sequence."""
    weights = [random.Random(hash((ids, token))).random() + 0.02 for token in range(vocab)]
    return [math.log(weight / sum(weights)) for weight in weights]


def logprob(ids: tuple[int, ...], vocab: int) -> float:
    return sum(next_logprobs(ids[:at], vocab)[token] for at, token in enumerate(ids))


def score(ids: tuple[int, ...], vocab: int, prompt: int, penalty: float) -> float:
    length = prompt + len(ids) - (ids[-1] == EOS)
    return logprob(ids, vocab) / length**penalty


def search(params: BeamSearchParams, vocab: int, prompt: int) -> tuple[Ranked, int]:
    """The texts found, best first, and the steps it took."""
    state = BeamSearch(params, prompt, [EOS])
    steps = 0
    while not state.done:
        candidates = []
        for beam in state.open:
            values = next_logprobs(tuple(beam.token_ids), vocab)
            best = sorted(range(vocab), key=lambda token: -values[token])
            candidates.append([(token, Logprob(values[token])) for token in best])
        state.advance(candidates)
        steps += 1
    return [(tuple(beam.token_ids), state.score(beam)) for beam in state.best(params.beam_width)], steps


def exhaustive(vocab: int, depth: int, prompt: int, penalty: float) -> Ranked:
    """Every text that ends, and every one of full length that does not."""
    texts = []
    for length in range(1, depth + 1):
        for ids in itertools.product(range(vocab), repeat=length):
            if EOS not in ids[:-1] and (ids[-1] == EOS or length == depth):
                texts.append((ids, score(ids, vocab, prompt, penalty)))
    return sorted(texts, key=lambda entry: -entry[1])


def plain(params: BeamSearchParams, vocab: int, prompt: int) -> Ranked:
    """vLLM's loop, told without any early end: all candidates, the best stay open."""
    penalty = params.length_penalty
    opened: list[tuple[int, ...]] = [()]
    ended: list[tuple[int, ...]] = []
    for _ in range(params.max_tokens):
        longer = []
        for ids in opened:
            values = next_logprobs(ids, vocab)
            for token in sorted(range(vocab), key=lambda t: -values[t])[: 2 * params.beam_width]:
                ends = token == EOS and not params.ignore_eos
                (ended if ends else longer).append((*ids, token))
        opened = sorted(longer, key=lambda ids: -score(ids, vocab, prompt, penalty))[: params.beam_width]
    scored = [(ids, score(ids, vocab, prompt, penalty)) for ids in [*ended, *opened]]
    return sorted(scored, key=lambda entry: -entry[1])[: params.beam_width]


def same(found: Ranked, expected: Ranked) -> None:
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    assert [value for _, value in found] == pytest.approx([value for _, value in expected])


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("prompt", [1, 7])
def test_equals_exhaustive_search_where_the_beam_holds_everything(penalty: float, prompt: int) -> None:
    params = BeamSearchParams(beam_width=8, max_tokens=3, length_penalty=penalty)
    found, _ = search(params, vocab=3, prompt=prompt)
    same(found, exhaustive(3, 3, prompt, penalty)[:8])


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("penalty", [-2.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_ending_early_changes_nothing(width: int, penalty: float, ignore_eos: bool) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=6, length_penalty=penalty, ignore_eos=ignore_eos)
    for prompt in (1, 2, 5):
        found, _ = search(params, vocab=7, prompt=prompt)
        same(found, plain(params, vocab=7, prompt=prompt))


def test_early_stopping_takes_fewer_steps() -> None:
    patient = BeamSearchParams(beam_width=2, max_tokens=12, length_penalty=3.0)
    hasty = BeamSearchParams(beam_width=2, max_tokens=12, length_penalty=3.0, early_stopping=True)
    (_, long), (_, short) = search(patient, vocab=4, prompt=1), search(hasty, vocab=4, prompt=1)
    assert short < long


def test_one_beam_is_greedy_search() -> None:
    ((ids, _),), _ = search(BeamSearchParams(beam_width=1, max_tokens=4, ignore_eos=True), vocab=6, prompt=1)
    greedy: tuple[int, ...] = ()
    while len(greedy) < 4:
        values = next_logprobs(greedy, 6)
        greedy = (*greedy, values.index(max(values)))
    assert ids == greedy


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"beam_width": 0}, "beam_width"), ({"beam_width": MAX_BEAM_WIDTH + 1}, "beam_width"),
     ({"beam_width": 2, "max_tokens": 0}, "max_tokens")],
)  # fmt: skip
def test_refusals(fields: dict[str, int], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        BeamSearchParams(**fields)
    assert refused.value.param == param
