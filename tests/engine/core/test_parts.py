"""A step in parts: whose tokens are in which, and what comes of them together."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllm.engine.core.handle import Handle, SampledRow
from jaxllm.engine.core.request import Batch, Chunk, Request
from jaxllm.engine.core.runner import evenly, joined, parts_of
from jaxllm.engine.core.sampler import Logprobs, Sampled
from jaxllm.requests.sampling import SamplingParams


def chunks(*lengths: int) -> list[Chunk]:
    return [Chunk(Request(str(i), [1], 1, SamplingParams(), 0.0), 0, n, 1) for i, n in enumerate(lengths)]


def lengths(parts: list[list[Chunk]]) -> list[list[int]]:
    return [[chunk.length for chunk in part] for part in parts]


@pytest.mark.parametrize(
    ("given", "most", "expected"),
    [
        ((5, 1, 1, 6), 2, [[5, 1], [1, 6]]),
        ((1,) * 5, 2, [[1, 1], [1, 1, 1]]),
        ((1,) * 5, 3, [[1, 1], [1], [1, 1]]),
        ((1,), 3, [[1]]),
        ((1, 100), 2, [[1], [100]]),
        ((100, 1, 1), 3, [[100], [1, 1]]),
    ],
)
def test_runs_of_about_as_many_tokens(given: tuple[int, ...], most: int, expected: list[list[int]]) -> None:
    assert lengths(evenly(chunks(*given), most)) == expected


@pytest.mark.parametrize(
    ("given", "most", "late", "expected"),
    [
        ((1, 1, 1, 1), 1, False, [[1, 1, 1, 1]]),
        ((1, 1, 1, 1), 2, False, [[1, 1], [1, 1]]),
        ((1, 1, 1, 1), 2, True, [[1, 1, 1, 1]]),
        ((1, 1, 8), 2, False, [[1, 1], [8]]),
        ((1, 1, 8, 9), 3, False, [[1, 1], [8], [9]]),
        ((8, 9), 2, False, [[8], [9]]),
    ],
)
def test_decodes_are_a_part_of_their_own(
    given: tuple[int, ...], most: int, late: bool, expected: list[list[int]]
) -> None:
    batch = Batch(chunks=chunks(*given), num_decodes=given.count(1), late=late)
    parts = parts_of(batch, most)
    assert lengths([part.chunks for part in parts]) == expected
    assert [part.num_decodes for part in parts] == [part.count(1) for part in expected]


def part(tokens: list[int], used: int, logprobs: bool) -> Handle:
    """A decode of `used` requests, padded."""
    rows = [SampledRow(chunk.request, i) for i, chunk in enumerate(chunks(*[1] * used))]
    values = np.array(tokens, np.float32)
    of_tokens = Logprobs(values, values, values[:, None], values[:, None])  # type: ignore[arg-type]
    return Handle(rows, Sampled(np.array(tokens), of_tokens if logprobs else None))  # type: ignore[arg-type]


def test_each_result_finds_its_row_of_the_log_probabilities_of_all_parts() -> None:
    whole = joined([part([5, 6, 0, 0], 2, True), part([7, 0], 1, False), part([8, 9], 2, True)])
    assert [result.tokens for result in whole.results()] == [[5], [6], [7], [8], [9]]
    found = whole.logprobs()
    assert found is not None
    assert [int(found.chosen[whole.results()[i].row]) for i in (0, 1, 3, 4)] == [5, 6, 8, 9]
