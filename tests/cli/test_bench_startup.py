"""When answers are at their full speed."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest

from jaxllm.cli.bench.server import Answer, full_speed_since


def answers(*seconds: float, begin: float = 3.0) -> list[Answer]:
    """One after the other."""
    return [Answer(*times) for times in pairwise(accumulate(seconds, initial=begin))]


@pytest.mark.parametrize(
    ("seconds", "since"),
    [
        ((0.8,) * 6, 3.0),
        ((1.5, 0.8, 0.8, 0.9, 0.8, 0.8, 0.8), 4.5),
        ((4, 4, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8), 11.0),
        ((0.8, 4, 4, 4, 4, 0.8, 0.8, 0.8, 0.8, 0.8), 19.8),  # quick only while nothing was compiled beside it
        ((0.82, 0.84, 0.82, 0.8, 0.8, 0.8, 0.8, 0.8), 3.0),  # all may be a little slow
        ((0.8, 0.8, 0.8, 0.8, 2, 0.8), 3.0),  # what happens once is another program's
        ((0.8,), 3.0),
    ],
)
def test_it_is_where_no_slower_time_follows(seconds, since):
    assert full_speed_since(answers(*seconds)) == pytest.approx(since)
