"""Arrays of a prompt's log-probabilities against the same, sorted and ranked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxllm.requests.outputs import PromptScores

VOCAB = 11


def by_hand(row: np.ndarray, token: int, count: int) -> list[tuple[int, float, int]]:
    order = sorted(range(VOCAB), key=lambda i: -row[i])
    rank = 1 + sum(value > row[token] for value in row)
    return [(token, row[token], rank), *((i, row[i], at) for at, i in enumerate(order[:count], 1) if i != token)]


def filled(tokens: list[int], rows: np.ndarray, count: int) -> PromptScores:
    whole = count == -1
    scores = PromptScores.empty(tokens, VOCAB if whole else 1 + count, whole=whole)
    if whole:
        scores.logprobs[:] = rows
        return scores.finish()
    for at, (row, token) in enumerate(zip(rows, tokens[1:], strict=True)):
        order = np.argsort(-row)[:count]
        scores.ids[at] = [token, *order]
        scores.logprobs[at] = [row[token], *row[order]]
        scores.ranks[at] = [1 + (row > row[token]).sum(), *range(1, count + 1)]
    return scores.finish()


@pytest.mark.parametrize("count", [0, 1, 4, -1])
def test_steps(count):
    rng = np.random.default_rng(count + 1)
    tokens = rng.integers(VOCAB, size=6).tolist()
    rows = np.log(rng.dirichlet(np.ones(VOCAB), size=5)).astype(np.float32)
    scores = filled(tokens, rows, count)
    first, *steps = scores.steps()
    assert first is None and len(scores) == 6
    for step, row, token in zip(steps, rows, tokens[1:], strict=True):
        expected = by_hand(row, token, VOCAB if count == -1 else count)
        assert [(i, lp.rank) for i, lp in step] == [(i, rank) for i, _, rank in expected]
        np.testing.assert_allclose([lp.logprob for _, lp in step], [value for _, value, _ in expected], rtol=1e-6)


def test_one_token_is_predicted_by_nothing():
    assert list(PromptScores.empty([5], 4, whole=False).finish().steps()) == [None]
    assert list(PromptScores.empty([5], VOCAB, whole=True).finish().steps()) == [None]


def test_candidates_that_a_small_vocabulary_lacks_are_left_out():
    scores = PromptScores.empty([1, 2], 4, whole=False)
    scores.ids[0], scores.ranks[0] = [2, 7, 2, 0], [2, 1, 2, 3]
    scores.logprobs[0] = [-1.0, -0.5, -1.0, -math.inf]
    _, step = scores.finish().steps()
    assert step is not None and [i for i, _ in step] == [2, 7]


def test_steps_are_made_one_at_a_time():
    """So that no more than a position of a whole vocabulary is ever objects."""
    rows = np.zeros((3, VOCAB), np.float32)
    steps = filled([0, 1, 2, 3], rows, -1).steps()
    assert next(steps) is None and len(next(steps) or ()) == VOCAB
