"""A request goes where its prefix is, and otherwise to who has the least to do."""

from __future__ import annotations

from jaxllm import SamplingParams
from jaxllm.engine.messages import EngineRequest
from jaxllm.engine.scale.routing import MOST_AHEAD, Replica, nodes_of, prefix_first

PAGE = 4
names = iter(range(10**6))


def request(tokens: list[int], salt: str | None = None) -> EngineRequest:
    return EngineRequest(
        request_id=str(next(names)), prompt_token_ids=tokens, sampling_params=SamplingParams(n=1), cache_salt=salt
    )


def make(count: int, num_pages: int = 1000) -> list[Replica]:
    return [Replica(n, num_pages=num_pages, page_size=PAGE, step_tokens=32) for n in range(count)]


def send(replicas: list[Replica], sent: EngineRequest) -> int:
    chosen = prefix_first(sent, replicas)
    chosen.begin(sent, nodes_of(sent, PAGE))
    return chosen.number


def test_a_number_stands_for_a_page_and_all_before_it() -> None:
    whole = nodes_of(request(list(range(10))), PAGE)
    assert len(whole) == 2  # full pages only
    assert nodes_of(request([*range(4), 9, 9, 9, 9]), PAGE)[0] == whole[0]
    assert nodes_of(request([9, *range(1, 8)]), PAGE)[1] != whole[1]
    assert nodes_of(request(list(range(8)), "salt"), PAGE)[0] != whole[0]
    assert nodes_of(request([1, 2]), PAGE) == []


def test_a_conversation_stays_where_it_began() -> None:
    replicas = make(3)
    prompts = {name: [name * 100 + at for at in range(12)] for name in range(1, 7)}
    homes = {name: send(replicas, request(prompt)) for name, prompt in prompts.items()}
    assert sorted(homes.values()) == [0, 0, 1, 1, 2, 2]
    for turn in range(5):
        for name, prompt in prompts.items():
            prompt += [turn] * 8
            assert send(replicas, request(list(prompt))) == homes[name]


def test_new_prompts_go_where_there_is_the_least_to_do() -> None:
    replicas = make(2)
    long = request(list(range(320)))  # ten steps
    assert send(replicas, long) == 0
    assert [send(replicas, request([1000 + at])) for at in range(5)] == [1] * 5
    replicas[0].computed(long.request_id)  # its prompt is computed: one sequence is left
    assert send(replicas, request([2000])) == 0


def test_a_prefix_does_not_make_a_busy_engine_busier_without_end() -> None:
    replicas = make(2)
    prompt = list(range(16))
    homes = [send(replicas, request([*prompt, 100 + at])) for at in range(40)]
    assert homes[: int(MOST_AHEAD)] == [homes[0]] * int(MOST_AHEAD)
    assert abs(homes.count(0) - homes.count(1)) <= MOST_AHEAD


def test_what_has_ended_is_no_load() -> None:
    [replica] = make(1)
    sent = [request([1] * 8) for _ in range(3)]
    for one in sent:
        replica.begin(one, nodes_of(one, PAGE))
    assert replica.load == 3 + 8 / 32  # the first computes what the others share
    replica.end([one.request_id for one in sent])
    assert replica.load == 0
    replica.end(["unknown"])
    assert replica.matched(nodes_of(sent[0], PAGE)) == 2
    replica.forget()
    assert replica.matched(nodes_of(sent[0], PAGE)) == 0


def test_no_more_is_remembered_than_there_are_pages() -> None:
    [replica] = make(1, num_pages=4)
    first, second = request(list(range(12))), request(list(range(100, 112)))
    for one in (first, second):
        replica.begin(one, nodes_of(one, PAGE))
    assert replica.matched(nodes_of(second, PAGE)) == 3
    assert replica.matched(nodes_of(first, PAGE)) == 1  # its beginning is remembered the longest
