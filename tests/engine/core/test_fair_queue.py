"""Groups of requests take turns, and one that floods the engine keeps no other waiting."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from jaxllm.engine.core.encoder import EncoderScheduler
from jaxllm.engine.core.fair_queue import FairQueue, RecentGroups, divided, gives_way, in_turn
from jaxllm.engine.core.pages import PagePool
from jaxllm.engine.core.request import Request, Status
from jaxllm.engine.messages import EngineRequest
from jaxllm.requests.outputs import PoolingParams
from jaxllm.requests.sampling import SamplingParams
from tests.engine.scheduler_driver import Driver

FLOOD, QUIET = "flood", "quiet"


def request(name: str, group: str, arrival: float, *, length: int = 1, priority: int = 0) -> Request:
    message = EngineRequest(
        request_id=name,
        prompt_token_ids=[1] * length,
        sampling_params=SamplingParams(max_tokens=1),
        arrival_time=arrival,
        priority=priority,
        group=group,
    )
    return Request.from_message(message, 1000)


def taken(queue: FairQueue, count: int) -> list[Request]:
    """The next ones, as the scheduler takes them: each is charged by its prompt."""
    found = []
    for _ in range(count):
        first = queue.heads()[0]
        queue.charge(first, first.num_prompt)
        queue.remove(first)
        found.append(first)
    return found


def names(requests: list[Request]) -> str:
    return " ".join(request.request_id for request in requests)


def test_one_group_is_served_by_priority_and_arrival():
    queue = FairQueue()
    for name, arrival, priority in (("c", 3, 0), ("a", 1, 0), ("urgent", 9, -1), ("late", 0, 1), ("b", 2, 0)):
        queue.add(request(name, "", arrival, priority=priority))
    assert len(queue) == 5 and names(list(queue)) == "urgent a b c late"
    assert names(taken(queue, 5)) == "urgent a b c late" and not queue and not queue.heads()


def test_groups_take_turns_by_tokens():
    queue = FairQueue()
    for at in range(6):
        queue.add(request(f"long{at}", "long", at, length=30))
        queue.add(request(f"short{at}", "short", at, length=10))
    assert names(taken(queue, 8)) == "short0 long0 short1 short2 short3 long1 short4 short5"


def test_who_comes_into_a_flood_is_next_and_then_takes_turns():
    queue = FairQueue()
    for at in range(20):
        queue.add(request(f"f{at}", FLOOD, at, length=10))
    taken(queue, 5)
    queue.add(request("q0", QUIET, 100, length=30))
    assert names(taken(queue, 1)) == "q0"
    queue.add(request("q1", QUIET, 101, length=1))
    assert names(taken(queue, 4)) == "f5 f6 f7 q1", "what q0 took is not forgotten while others wait"


def test_nobody_saves_up_turns_by_sending_nothing():
    queue = FairQueue()
    for at in range(30):
        queue.add(request(f"f{at}", FLOOD, at, length=10))
    taken(queue, 20)
    for at in range(3):
        queue.add(request(f"q{at}", QUIET, 100 + at, length=10))
    assert names(taken(queue, 6)) == "q0 f20 q1 f21 q2 f22"


def test_a_turn_never_comes_before_a_priority():
    queue = FairQueue()
    queue.add(request("batch", QUIET, 0, priority=5))
    for at in range(3):
        queue.add(request(f"f{at}", FLOOD, at, length=100))
    assert names(taken(queue, 4)) == "f0 f1 f2 batch"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), min_size=1, max_size=60))
def test_groups_that_wait_all_the_time_are_served_alike(arrivals: list[tuple[str, int]]):
    """Two differ by no more than the two longest requests, as long as both have some waiting."""
    queue = FairQueue()
    for at, (group, length) in enumerate(arrivals):
        queue.add(request(str(at), group, at, length=length))
    served = dict.fromkeys({group for group, _ in arrivals}, 0)
    longest = max(length for _, length in arrivals)
    while queue:
        waiting = queue.groups
        [first] = taken(queue, 1)
        served[first.group] += first.num_prompt
        counts = [served[group] for group in waiting]
        assert max(counts) - min(counts) <= 2 * longest


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=2), st.integers(1, 300), min_size=1, max_size=6), st.integers(6, 500))
def test_what_there_is_is_divided_fairly(wanted: dict[str, int], total: int):
    shares = divided(wanted, total)
    assert shares.keys() == wanted.keys() and sum(shares.values()) <= total
    assert all(1 <= shares[group] <= wanted[group] for group in wanted)
    short = [group for group in wanted if shares[group] < wanted[group]]
    assert not short or sum(shares.values()) == total, "nothing is left while somebody wants more"
    assert all(shares[group] >= max(shares.values()) - 1 for group in short), "who gets less has as much as any other"


def test_groups_are_several_for_a_minute():
    now = [0.0]
    recent = RecentGroups(lambda: now[0])
    seen = []
    for at, group in [(0, "a"), (1, "a"), (30, "b"), (62, "a"), (91, "a"), (92, "a"), (93, "c")]:
        now[0] = at
        recent.note(group)
        seen.append(recent.are_several)
    assert seen == [False, False, True, True, False, False, True]
    now[0] = 200.0
    assert not recent.are_several


def test_a_group_gives_way_only_to_one_with_two_fewer_running():
    running = [request(f"f{at}", FLOOD, at) for at in range(3)]
    candidate = request("q", QUIET, 9)
    assert gives_way(running, candidate) is running[-1]
    assert gives_way([*running[:2], request("q0", QUIET, 8)], candidate) is None
    assert gives_way(running[:1], candidate) is None
    assert gives_way(running, request("q", QUIET, 9, priority=1)) is None, "the flood is more urgent"


def test_a_group_with_two_fewer_running_comes_before_its_turn():
    flood, quiet, third = (request(name, name, 9) for name in (FLOOD, QUIET, "third"))
    heads = [flood, third, quiet]
    running = [request(f"f{at}", FLOOD, at) for at in range(3)]
    assert in_turn(heads, running) == [third, quiet, flood]
    assert in_turn(heads, [*running, request("t0", "third", 1), request("t1", "third", 2)]) == [quiet, flood, third]
    assert in_turn(heads, running[:1]) == heads
    assert in_turn([flood], running) == [flood] and in_turn([], running) == []


def driver(**sizes: int) -> Driver:
    return Driver(**{"num_pages": 400, "page_size": 2, "max_num_seqs": 4, "budget": 16} | sizes)


def admitted(driver: Driver) -> list[str]:
    return [request.request_id for request in driver.step().admitted]


def test_a_quiet_group_gets_a_slot_in_the_next_step():
    engine = driver()
    flood = [engine.add([at % 3, 1, 2], max_tokens=30, group=FLOOD) for at in range(12)]
    for _ in range(5):
        engine.step()
    assert len(engine.scheduler.running) == 4
    quiet = engine.add([1, 0, 2], max_tokens=3, group=QUIET)
    assert admitted(engine) == [quiet.request_id]
    assert [request.num_preemptions for request in flood] == [0, 0, 0, 1] + [0] * 8, "the last that began gave way"
    assert flood[3].status is Status.WAITING
    engine.finish()
    engine.check_tokens()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 6),
    st.integers(2, 12),
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=25),
    st.integers(0, 25),
    st.integers(1, 20),
)
def test_whatever_a_flood_is_doing_another_group_runs_in_the_next_step(
    max_num_seqs: int, spare: int, flood: list[tuple[int, int]], steps: int, length: int
):
    """As long as there is memory: see below for where pages run out."""
    engine = driver(max_num_seqs=max_num_seqs, budget=max_num_seqs + spare)
    for at, (prompt, max_tokens) in enumerate(flood):
        engine.add([at % 3, 1, 2] * prompt, max_tokens=max_tokens, group=FLOOD)
    for _ in range(steps):
        engine.step()
    quiet = engine.add([2] * length, max_tokens=2, group=QUIET)
    assert quiet in engine.step().admitted
    engine.finish()
    engine.check_tokens()


def test_a_quiet_group_gets_a_slot_also_where_it_is_the_floods_turn():
    """It has been given more tokens than the flood lately, none of whose requests has ended since."""
    engine = driver()
    for at in range(12):
        engine.add([at % 3, 1, 2], max_tokens=60, group=FLOOD)
    for _ in range(5):
        engine.step()
    turns = []
    for _ in range(3):
        quiet = engine.add([1, 0, 2] * 4, max_tokens=2, group=QUIET)
        turns.append(engine.scheduler.waiting.heads()[0].group)
        assert admitted(engine) == [quiet.request_id]
        while quiet.status is not Status.FINISHED:
            engine.step()
    assert turns == [QUIET, FLOOD, FLOOD]
    engine.finish()
    engine.check_tokens()


def test_a_long_prompt_leaves_half_of_a_step_to_another_group():
    engine = driver(budget=8)
    engine.add([1, 2, 0] * 12, max_tokens=2, group=FLOOD)
    engine.step()
    engine.add([2, 1, 0], max_tokens=1, group=QUIET)
    sizes = [[(c.request.request_id, c.length, c.num_sampled) for c in engine.step().chunks] for _ in range(2)]
    assert sizes == [[("r0", 5, 0), ("r1", 3, 1)], [("r0", 8, 0)]]
    engine.finish()
    engine.check_tokens()


def test_two_long_prompts_of_two_groups_run_side_by_side():
    engine = driver(budget=8)
    for group, prompt in ((FLOOD, [1, 2, 0]), (QUIET, [2, 1, 0])):
        engine.add(prompt * 8, max_tokens=1, group=group)
    assert [[c.length for c in engine.step().chunks] for _ in range(6)] == [[4, 4]] * 6
    engine.finish()
    engine.check_tokens()


def test_short_prompts_of_two_groups_fill_a_step():
    """Each may have half of it, in as many prompts as there are; and what one has no use for is the other's."""
    engine = driver(budget=16, max_num_seqs=8)
    for at in range(6):
        engine.add([at % 3, 1], max_tokens=1, group=FLOOD)
    for at in range(2):
        engine.add([at % 3, 2], max_tokens=1, group=QUIET)
    chunks = engine.step().chunks
    assert [c.request.group for c in chunks].count(FLOOD) == 6 and [c.length for c in chunks] == [2] * 8
    engine.finish()
    engine.check_tokens()


def test_the_first_of_each_group_are_counted_in_turn():
    queue = FairQueue()
    for at, length in enumerate((3, 3, 3)):
        queue.add(request(f"a{at}", "a", at, length=length))
    for at, length in enumerate((9, 1)):
        queue.add(request(f"b{at}", "b", at, length=length))
    assert names(queue.first(9, 6)) == "b0 a0 a1" and names(queue.first(2, 6)) == "b0 a0"
    assert names(queue.first(9, 7)) == "b0 a0 a1 a2" and not queue.first(0, 9) and not FairQueue().first(3, 9)


def test_a_quiet_group_gets_pages_in_the_next_step():
    engine = driver(num_pages=9, max_num_seqs=8)
    flood = [engine.add([at % 3, 1, 2, 0], max_tokens=8, group=FLOOD) for at in range(6)]
    for _ in range(4):
        engine.step()
    assert engine.pool.num_free < 2 <= len(engine.scheduler.running)
    quiet = engine.add([2, 2, 2, 1], max_tokens=2, group=QUIET)
    assert admitted(engine) == [quiet.request_id]
    assert quiet.num_preemptions == 0 and sum(request.num_preemptions for request in flood) > 0
    engine.finish()
    engine.check_tokens()


def test_a_flood_of_the_same_group_is_as_it_was():
    """With one group, whatever it is called, each step is the same."""

    def steps(group: str) -> list[list[tuple[str, int, int]]]:
        engine = driver(num_pages=14, budget=8)
        for at in range(10):
            engine.add([at % 3, 1, 2] * (1 + at % 4), max_tokens=6, group=group)
        found = []
        while engine.core.has_work:
            found.append([(c.request.request_id, c.start, c.length) for c in engine.step().chunks])
        assert engine.scheduler.stats.preemptions > 0
        return found

    assert steps("") == steps(FLOOD)


def test_texts_of_an_encoder_take_turns():
    queue = EncoderScheduler(PagePool(1, 16, False), 2, 32, 32)
    for at in range(6):
        message = EngineRequest(
            request_id=f"f{at}", prompt_token_ids=[1] * 10, arrival_time=at, pooling=PoolingParams(), group=FLOOD
        )
        queue.add(Request.from_message(message, 32))
    first = queue.schedule()
    quiet = EngineRequest(
        request_id="q", prompt_token_ids=[1] * 10, arrival_time=9, pooling=PoolingParams(), group=QUIET
    )
    queue.add(Request.from_message(quiet, 32))
    second = queue.schedule()
    assert [[chunk.request.request_id for chunk in batch.chunks] for batch in (first, second)] == [
        ["f0", "f1"],
        ["q", "f2"],
    ]
