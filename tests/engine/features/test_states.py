"""The rows that states of cached prefixes are kept in."""

from __future__ import annotations

import pytest

from jaxllm.engine.features.states import Found, StateCache


def kept(cache: StateCache, *nodes: int) -> dict[int, int]:
    """Keep a state for each node, in steps of their own; the row of each."""
    rows = {}
    for node in nodes:
        rows[node] = cache.reserve()
        assert cache.keep(node, rows[node])
        cache.begin_step()
    return rows


def test_the_longest_prefix_with_a_state_is_found():
    cache = StateCache(10, 4)
    rows = kept(cache, 1, 3)
    assert cache.find([1, 2, 3, 4]) == Found(3, rows[3], awaited=False)
    assert cache.find([1, 2]) == Found(1, rows[1], awaited=False)
    assert cache.find([7]) == cache.find([]) == Found(0, 0, awaited=False)


def test_a_state_can_be_read_from_the_next_step_on():
    cache = StateCache(1, 4)
    cache.keep(1, cache.reserve())
    assert cache.find([1]).awaited and cache.find([1]).depth == 0
    cache.begin_step()
    assert not cache.find([1]).awaited and cache.find([1]).depth == 1


def test_the_least_recently_used_state_gives_way():
    cache = StateCache(1, 2)
    rows = kept(cache, 1, 2)
    cache.use(1)
    assert cache.reserve() == rows[2]
    assert cache.find([1]).depth == 1 and cache.find([2]).depth == 0


def test_what_a_step_is_yet_to_keep_gives_way_to_nothing():
    cache = StateCache(1, 1)
    cache.keep(1, cache.reserve())
    assert cache.reserve() == 0
    cache.begin_step()
    assert cache.reserve() == 1


def test_one_state_is_kept_for_one_prefix():
    cache = StateCache(1, 2)
    rows = kept(cache, 5)
    second = cache.reserve()
    assert not cache.keep(5, second)
    cache.check([])
    assert cache.find([5]).row == rows[5]


def test_an_outdone_state_stays_where_others_went_on_from_it():
    cache = StateCache(1, 3)
    kept(cache, 1, 2)
    cache.use(1)
    cache.discard(1)
    cache.discard(2)
    cache.discard(9)
    assert cache.num_kept == 1 and cache.find([1]).depth == 1


def test_check_sees_a_row_that_was_lost():
    cache = StateCache(1, 2)
    row = cache.reserve()
    cache.check([row])
    with pytest.raises(AssertionError, match="a row of states was lost"):
        cache.check([])


def test_one_step_writes_no_row_twice():
    """The page of a prefix may be given away in the step that keeps its state, where another page holds it as well."""
    cache = StateCache(1, 1)
    row = cache.reserve()
    cache.keep(1, row)
    cache.forget(1)
    assert cache.reserve() == 0
    cache.check([])
    cache.begin_step()
    assert cache.reserve() == row


def test_one_step_writes_no_row_that_it_reads():
    """Kernels run the sequences of a step beside each other."""
    cache = StateCache(1, 2)
    rows = kept(cache, 1, 2)
    cache.use(1)
    cache.use(2)
    assert cache.reserve() == 0 and cache.num_kept == 2
    cache.forget(1)
    assert cache.reserve() == 0
    cache.check([])
    cache.begin_step()
    assert cache.reserve() == rows[1]


def test_whoever_copies_states_is_told_of_each_that_is_kept_and_forgotten():
    """Of those that are forgotten, whether the row has the state; an outdone one is not worth it."""
    cache, told = StateCache(1, 2), []
    cache.on_keep = lambda row, node: told.append(("kept", row, node))
    cache.on_forget = lambda row, node, is_of_use: told.append(("forgotten", row, node, is_of_use))
    rows = kept(cache, 1, 2)
    assert told == [("kept", rows[1], 1), ("kept", rows[2], 2)]
    cache.reserve()
    cache.discard(2)
    cache.keep(3, cache.reserve())
    cache.forget(3)
    assert told[2:] == [
        ("forgotten", rows[1], 1, True),
        ("forgotten", rows[2], 2, False),
        ("kept", rows[2], 3),
        ("forgotten", rows[2], 3, False),
    ]
