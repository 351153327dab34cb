"""The scheduler as a state machine, driven as the engine drives it: a step is scheduled before the last one is read."""

from __future__ import annotations

from unittest import mock

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from jaxllm.engine.core.request import Status
from jaxllm.engine.features.grammar import grammar
from jaxllm.engine.features.grammar.thinking_budget import Thinking
from jaxllm.engine.features.offload.pages import CacheRow
from jaxllm.models.config import LengthRule
from tests.engine.scheduler_driver import Driver

PREFIX = [1, 0, 2, 2, 0, 1, 1, 2, 0, 0, 1, 2]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        groups=st.sampled_from([[""], [""], ["a", "b"], ["", "a", "b", "c"]]),
        num_pages=st.integers(4, 14),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 12),
        caching=st.booleans(),
        stop=st.sampled_from([None, 0]),
        ways=st.one_of(
            st.fixed_dictionaries(
                {
                    "decode_steps": st.integers(1, 4),
                    "snapshots": st.sampled_from([None, 0, 1, 2, 4, 30]),
                    "page_size": st.sampled_from([1, 2, 4]),
                }
            ),
            st.fixed_dictionaries(
                {
                    "num_drafts": st.integers(1, 3),
                    "decode_steps": st.integers(1, 4),
                    "snapshots": st.sampled_from([None, 1, 2, 4, 30]),
                    "page_size": st.just(4),
                }
            ),
            st.fixed_dictionaries({"places": st.integers(1, 3), "page_size": st.just(2)}),
            st.fixed_dictionaries(
                {
                    "host_pages": st.integers(1, 40),
                    "decode_steps": st.integers(1, 3),
                    "page_size": st.sampled_from([1, 2, 4]),
                }
            ),
            st.fixed_dictionaries(
                {"host_pages": st.integers(1, 40), "num_drafts": st.integers(1, 3), "page_size": st.just(4)}
            ),
            st.fixed_dictionaries(
                {
                    "host_pages": st.integers(1, 40),
                    "snapshots": st.sampled_from([1, 2, 4, 30]),
                    "decode_steps": st.integers(1, 3),
                    "page_size": st.sampled_from([1, 2, 4]),
                }
            ),
            st.fixed_dictionaries(
                {
                    "host_pages": st.integers(1, 40),
                    "snapshots": st.sampled_from([1, 2, 4, 30]),
                    "num_drafts": st.integers(1, 3),
                    "page_size": st.just(4),
                }
            ),
        ),
    )
    def start(self, *, groups: list[str], ways: dict[str, int | None], **sizes) -> None:
        self.driver = Driver(**ways, **sizes)
        self.groups = groups

    @rule(
        shared=st.integers(0, len(PREFIX)),
        own=st.lists(st.integers(0, 2), max_size=8),
        max_tokens=st.integers(1, 12),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        salt=st.sampled_from([None, None, "a"]),
        score=st.sampled_from([False, False, False, True]),
        group=st.integers(0, 11),
        adapters=st.sets(st.integers(0, 4), max_size=3),
    )
    def add(self, shared: int, own: list[int], group: int, adapters: set[int], **options) -> None:
        prompt = (PREFIX[:shared] + own or [0])[: self.driver.max_model_len - 1]
        used = sorted(adapters)[: self.driver.adapters.count]
        self.driver.add(prompt, group=self.groups[group % len(self.groups)], adapters=used, **options)

    @precondition(lambda self: any(r.status is not Status.FINISHED for r in self.driver.requests))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        alive = [r for r in self.driver.requests if r.status is not Status.FINISHED]
        self.driver.abort(data.draw(st.sampled_from(alive)))

    @rule(times=st.integers(1, 5))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.driver.step()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.finish()
            self.driver.check_tokens()
            self.driver.core.close()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_a_request_whose_adapter_finds_no_place_waits_until_there_is_one():
    driver = Driver(num_pages=60, page_size=2, max_num_seqs=4, budget=64, places=2)
    for adapters in ((1,), (2, 1), (3,), ()):
        driver.add(PREFIX[:4], max_tokens=6, adapters=adapters)
    batch = driver.step()
    assert [request.request_id for request in batch.admitted] == ["r0", "r1"]
    assert driver.runner.entered == [0, 1], "the first adapter is there when the second request comes"
    driver.finish()
    driver.check_tokens()
    assert list(driver.done) == ["r0", "r1", "r2", "r3"]


def test_an_adapter_that_nobody_uses_keeps_its_place_until_another_needs_it():
    driver = Driver(num_pages=60, page_size=2, max_num_seqs=4, budget=64, places=2)
    entering = []
    for adapter in (1, 2, 1, 3, 1, 2):
        driver.add(PREFIX[:4], max_tokens=1, adapters=[adapter])
        driver.step()
        entering.append(len(driver.runner.entered))
        driver.finish()
    driver.check_tokens()
    assert entering == [1, 1, 0, 1, 0, 1], "the third took the place of the second, which was unused for longer"


def test_pages_that_were_given_away_are_found_again_in_host_memory():
    driver = Driver(num_pages=9, page_size=2, max_num_seqs=2, budget=4, host_pages=100)
    prompts = [[first, *PREFIX[1:]] for first in range(3)] * 2
    cached = []
    for prompt in prompts:
        cached.append(driver.add(prompt, max_tokens=3))
        driver.finish()
    driver.check_tokens()
    assert [request.num_cached for request in cached] == [0, 0, 0, 10, 10, 10]
    stats = driver.stats()
    assert stats.offload_hits > 0 and stats.offload_hits <= stats.prefix_cache_hits == 30
    assert stats.offload_queries <= stats.prefix_cache_queries


def test_a_preempted_request_goes_on_from_what_host_memory_has():
    driver = Driver(num_pages=9, page_size=2, max_num_seqs=2, budget=12, host_pages=100)
    for first in range(2):
        driver.add([first, *PREFIX[1:6]], max_tokens=8)
    driver.finish()
    driver.check_tokens()
    assert driver.scheduler.stats.preemptions > 0
    pairs = zip(driver.runner.batches, driver.runner.returned, strict=True)
    returning = [batch for batch, rows in pairs if rows]
    assert returning and all(chunk.start for batch in returning for chunk in batch.chunks)


def test_requests_share_prefixes_only_with_the_same_adapters():
    driver = Driver(num_pages=60, page_size=2, max_num_seqs=4, budget=64, places=2)
    for adapters in ((), (1,), (1,), (2,), (1, 2)):
        driver.add(PREFIX[:9], max_tokens=1, adapters=adapters)
        driver.finish()
    driver.check_tokens()
    assert [request.num_cached for request in driver.requests] == [0, 0, 8, 0, 0]


def test_a_small_pool_preempts_and_loses_nothing():
    driver = Driver(num_pages=9, page_size=2, max_num_seqs=4, budget=8)
    requests = [driver.add(PREFIX[start : start + 4], max_tokens=10) for start in range(4)]
    driver.finish()
    driver.check_tokens()
    assert driver.scheduler.stats.preemptions > 0
    assert sum(request.num_preemptions for request in requests) == driver.scheduler.stats.preemptions
    assert len(driver.done) == 4


def test_the_newest_request_gives_way_and_the_first_finishes_first():
    driver = Driver(num_pages=9, page_size=2, max_num_seqs=3, budget=64, caching=False)
    first, second, third = (driver.add([n, 1, 2, 0, 1], max_tokens=10) for n in range(3))
    waiting_at = []
    while first.status is not Status.FINISHED:
        driver.step()
        waiting_at.append([r.request_id for r in driver.scheduler.waiting])
    assert ["r2"] in waiting_at
    assert first.request_id not in {name for names in waiting_at for name in names}
    driver.finish()
    assert next(iter(driver.done)) == "r0"
    assert {second.status, third.status} == {Status.FINISHED}


def test_the_next_step_does_not_wait_for_the_last_token():
    driver = Driver(num_pages=20, page_size=2, max_num_seqs=2, budget=64)
    request = driver.add([1, 2, 0], max_tokens=8)
    starts = [[chunk.start for chunk in driver.step().chunks] for _ in range(4)]
    assert starts == [[0], [3], [4], [5]], "one more token of context each step"
    assert len(request.token_ids) == 3 + 3


def test_no_drafts_are_tried_in_a_step_that_a_thinking_budget_has_a_say_in():
    driver = Driver(num_pages=20, page_size=4, max_num_seqs=2, budget=64, num_drafts=3)
    _, thinks = driver.add([1, 2, 0], max_tokens=30), driver.add([2, 1], max_tokens=30)
    thinking = mock.Mock(spec=Thinking, left=4, over=False, forced=None)
    thinks.extras["grammar"] = grammar._GrammarState(thinking=thinking)
    batches = [driver.step() for _ in range(2)]
    assert [chunk.num_sampled for chunk in batches[1].chunks] == [4, 3], "one is under way, and three more may follow"
    thinking.left = 0
    batch = driver.scheduler.schedule()
    assert batch.late and not batch.most_ahead and [chunk.num_sampled for chunk in batch.chunks] == [1, 1]


def test_drafts_are_settled_before_a_request_is_counted_as_too_long():
    """LongRoPE recomputes a request that outgrows its first context: it must not be done before it has."""
    driver = Driver(num_pages=20, page_size=4, max_num_seqs=1, budget=64, num_drafts=3)
    driver.scheduler.ahead.length_rule = LengthRule(original_length=12, all_or_none=True)
    request = driver.add(PREFIX[:6], max_tokens=14)
    lengths = []
    while request.status is not Status.FINISHED:
        driver.step()
        lengths.append((request.rotary_len, len(request.token_ids)))
    assert max(length for rotary, length in lengths if rotary <= 12) == 12
    assert {rotary for rotary, _ in lengths} == {6, 13}
    driver.finish()
    driver.check_tokens()


def test_a_request_stops_being_scheduled_when_the_tokens_in_flight_reach_its_length():
    driver = Driver(num_pages=20, page_size=2, max_num_seqs=2, budget=64)
    driver.add([1, 2, 0], max_tokens=2)
    assert [len(driver.step().chunks) for _ in range(3)] == [1, 1, 0]
    driver.finish()
    assert len(driver.done["r0"]) == 5


def test_long_prompts_are_chunked_beside_decodes():
    driver = Driver(num_pages=60, page_size=2, max_num_seqs=4, budget=8)
    driver.add([1, 2, 0], max_tokens=20)
    driver.step()
    driver.add(PREFIX * 2, max_tokens=2)
    sizes = [[(c.request.request_id, c.length, c.num_sampled) for c in driver.step().chunks] for _ in range(4)]
    assert sizes == [
        [("r0", 1, 1), ("r1", 7, 0)],
        [("r0", 1, 1), ("r1", 7, 0)],
        [("r0", 1, 1), ("r1", 7, 0)],
        [("r0", 1, 1), ("r1", 3, 1)],
    ]


def test_a_prefix_is_shared_even_within_one_step():
    driver = Driver(num_pages=20, page_size=4, max_num_seqs=4, budget=64)
    first, second = driver.add([*PREFIX[:8], 1]), driver.add([*PREFIX[:8], 2, 2])
    batch = driver.step()
    assert [(c.start, c.length) for c in batch.chunks] == [(8, 2), (0, 9)] or [
        (c.start, c.length) for c in batch.chunks
    ] == [(0, 9), (8, 2)]
    assert (first.num_cached, second.num_cached) == (0, 8)
    driver.finish()
    driver.check_tokens()


def test_a_prompt_that_is_wholly_cached_still_runs_its_last_token():
    driver = Driver(num_pages=20, page_size=4, max_num_seqs=4, budget=64)
    driver.add(PREFIX[:8], max_tokens=1)
    driver.finish()
    again = driver.add(PREFIX[:8], max_tokens=1)
    chunk = driver.step().chunks[0]
    assert (chunk.start, chunk.length, again.num_cached) == (4, 4, 4)
    driver.finish()
    driver.check_tokens()
    assert (driver.scheduler.stats.prefix_queries, driver.scheduler.stats.prefix_hits) == (16, 4)


def test_a_follow_up_finds_the_tokens_generated_before_it():
    driver = Driver(num_pages=20, page_size=4, max_num_seqs=4, budget=64)
    driver.add(PREFIX[:6], max_tokens=7)
    driver.finish()
    follow_up = driver.add([*driver.done["r0"], 1, 1, 1])
    driver.finish()
    assert follow_up.num_cached == 12, "all but the last of 13 tokens were run"
    driver.check_tokens()


def test_priority_then_arrival_decides_who_is_admitted():
    driver = Driver(num_pages=60, page_size=2, max_num_seqs=1, budget=64)
    for priority in (0, 1, -1, 0):
        driver.add([1, 2], max_tokens=1, priority=priority)
    driver.finish()
    assert list(driver.done) == ["r2", "r0", "r3", "r1"]


def test_a_full_engine_decodes_several_tokens_a_step_although_others_wait():
    """With a place free, one token a step: whoever comes begins at once."""
    driver = Driver(num_pages=60, page_size=4, max_num_seqs=2, budget=64, decode_steps=3)
    for _ in range(3):
        driver.add([1, 2], max_tokens=9)
    steps = []
    while driver.scheduler.num_unfinished:
        batch = driver.step()
        steps.append((len(batch.chunks), batch.num_steps, len(driver.scheduler.waiting)))
    assert (2, 3, 1) in steps, "two run and one waits"
    assert all(count == 1 for running, count, waiting in steps if waiting and running < 2)
    driver.check_tokens()


def test_an_aborted_request_frees_its_pages_at_once():
    driver = Driver(num_pages=20, page_size=2, max_num_seqs=4, budget=4)
    running, waiting = driver.add(PREFIX, max_tokens=3), driver.add(PREFIX, max_tokens=3)
    driver.step()
    driver.abort(running)
    driver.abort(waiting)
    assert driver.pool.num_free == 19 and driver.scheduler.num_unfinished == 0
    driver.finish()


def test_states_of_sequences_are_found_again_with_their_prefix():
    driver = Driver(num_pages=30, page_size=4, max_num_seqs=4, budget=64, snapshots=8)
    driver.add(PREFIX[:10], max_tokens=1)
    driver.finish()
    again = driver.add(PREFIX[:10], max_tokens=1)
    chunk = driver.step().chunks[0]
    assert (chunk.start, chunk.length, again.num_cached) == (8, 2, 8)
    assert chunk.extras["states"].read > driver.scheduler.max_num_seqs, "the row behind those of the slots"
    driver.finish()
    driver.check_tokens()


def test_equal_prompts_wait_for_the_first_ones_state_and_share_it():
    driver = Driver(num_pages=30, page_size=4, max_num_seqs=4, budget=64, snapshots=8)
    for _ in range(3):
        driver.add(PREFIX[:10], max_tokens=3)
    assert [chunk.length for chunk in driver.step().chunks] == [10]
    assert sorted(chunk.length for chunk in driver.step().chunks) == [1, 2, 2]
    driver.finish()
    driver.check_tokens()


def test_a_state_is_kept_where_prompts_part():
    """The second prompt shows where; the third begins there."""
    driver = Driver(num_pages=40, page_size=2, max_num_seqs=4, budget=64, snapshots=8)
    for own in ([0] * 5, [1] * 5, [2] * 5):
        driver.add(PREFIX[:8] + own, max_tokens=1)
        driver.finish()
    assert [request.num_cached for request in driver.requests] == [0, 0, 8]
    driver.check_tokens()


def test_a_follow_up_goes_on_from_the_state_in_the_answer():
    driver = Driver(num_pages=40, page_size=4, max_num_seqs=4, budget=64, snapshots=8)
    driver.add(PREFIX[:6], max_tokens=12)
    driver.finish()
    assert driver.states is not None and driver.states.num_kept == 2, "the prompt's, and of the answer the last"
    follow_up = driver.add([*driver.done["r0"], 1, 1, 1])
    driver.finish()
    assert follow_up.num_cached == 16, "17 of 18 tokens were run"
    driver.check_tokens()


def test_with_drafts_too_a_follow_up_goes_on_from_the_last_full_page_of_the_answer():
    """Wherever the steps of its answer began and ended, which only the device knew in time."""
    for length in range(1, 30):
        driver = Driver(num_pages=40, page_size=4, max_num_seqs=4, budget=64, snapshots=8, num_drafts=3)
        driver.add(PREFIX[:6], max_tokens=length)
        driver.finish()
        follow_up = driver.add([*driver.done["r0"], 1, 1, 1])
        driver.finish()
        assert follow_up.num_cached == (6 + length - 1) // 4 * 4
        driver.check_tokens()


def test_a_state_goes_with_the_pages_of_its_prefix():
    driver = Driver(num_pages=7, page_size=2, max_num_seqs=1, budget=64, snapshots=8)
    for prompt in (PREFIX[:9], PREFIX[3:12]):
        driver.add(prompt, max_tokens=2)
        driver.finish()
    assert driver.states is not None and driver.states.num_kept < 4
    again = driver.add(PREFIX[:9], max_tokens=1)
    driver.finish()
    assert again.num_cached < 8
    driver.check_tokens()


def test_a_state_that_was_given_away_comes_back_into_a_row_where_others_find_it():
    driver = Driver(num_pages=40, page_size=4, max_num_seqs=2, budget=64, snapshots=2, host_pages=100)
    for prompt in (PREFIX[:10], [1] * 10, [2] * 10):
        driver.add(prompt, max_tokens=1)
        driver.finish()
    again = driver.add(PREFIX[:10], max_tokens=1)
    (chunk,) = driver.step().chunks
    (row,) = driver.runner.returned[-1]
    assert (
        row == CacheRow("state", chunk.extras["states"].read)
        and chunk.extras["states"].read > driver.scheduler.max_num_seqs
    )
    assert again.num_cached == driver.stats().offload_hits == 8
    driver.finish()
    driver.add(PREFIX[:10], max_tokens=1)
    second = driver.step()
    assert driver.runner.returned[-1] == [] and second.chunks[0].extras["states"].read == chunk.extras["states"].read
    driver.finish()
    driver.check_tokens()


def test_a_state_that_finds_no_row_comes_back_into_its_requests_slot():
    driver = Driver(num_pages=40, page_size=4, max_num_seqs=3, budget=64, snapshots=1, host_pages=100)
    for prompt in ([1] * 10, [2] * 10, PREFIX[:10]):
        driver.add(prompt, max_tokens=1)
        driver.finish()
    both = [driver.add([token] * 10, max_tokens=1) for token in (1, 2)]
    batch = driver.step()
    rows, slots = driver.runner.returned[-1], [chunk.request.slot for chunk in batch.chunks]
    assert rows == [CacheRow("state", 4), CacheRow("state", slots[1])]
    assert [request.num_cached for request in both] == [8, 8]
    driver.finish()
    driver.check_tokens()


def test_a_preempted_request_goes_on_from_the_last_state_of_its_answer():
    """It waits until all pages up to there have room: a part of them would be of no use."""
    driver = Driver(num_pages=9, page_size=2, max_num_seqs=2, budget=12, snapshots=4, host_pages=100)
    for prompt in (PREFIX[:6], [2] * 6):
        driver.add(prompt, max_tokens=9)
    chunks = []
    while driver.core.has_work:
        chunks += [(chunk.request.num_preemptions, chunk.start, chunk.length) for chunk in driver.step().chunks]
    assert driver.scheduler.stats.preemptions == 1
    assert next(chunk for chunk in chunks if chunk[0]) == (1, 8, 1), "it had nine tokens"
    driver.check_tokens()
