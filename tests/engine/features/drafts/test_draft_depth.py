"""How many tokens are tried ahead."""

from __future__ import annotations

import pytest

from jaxllm.engine.features.drafts.rules import DraftDepth, DraftRecord


def tries(takes: list[int], steps: int, most: int = 4) -> tuple[list[int], int]:
    """Depths of each of `steps` steps, where try number i brings `takes[i]` at most, and the last as often as asked."""
    record, depths, count = DraftRecord(most), [], 0
    for _ in range(steps):
        depth = record.depth(most)
        depths.append(depth)
        if depth:
            record.settle(min(depth, takes[min(count, len(takes) - 1)]))
            count += 1
        else:
            record.passed()
    return depths, count


def test_a_text_that_repeats_itself_is_tried_at_full_depth():
    assert tries([4], 20)[0] == [4] * 20


def test_a_text_that_does_not_is_tried_ever_less_and_not_deeply():
    depths, count = tries([0], 100)
    assert (count <= 26 and depths[-1] == 0) or depths[-5:].count(0) == 4
    assert set(depths[40:]) == {0, 1}
    assert depths[40:].count(1) <= 13


def test_one_that_begins_to_repeat_itself_is_soon_at_full_depth_again():
    record = DraftRecord(4)
    while record.depth(4):
        record.settle(0)
    steps = 0
    while record.depth(4) < 4:
        depth = record.depth(4)
        record.settle(depth) if depth else record.passed()
        steps += 1
        assert steps < 20
    assert steps < 12


@pytest.mark.parametrize(("running", "most"), [(1, 4), (8, 4), (9, 2), (20, 2), (21, 4), (40, 0), (99, 0)])
def test_many_requests_may_have_other_depths(running, most):
    assert DraftDepth(4, [(9, 20, 2), (33, 4096, 0)]).with_running(running) == most
