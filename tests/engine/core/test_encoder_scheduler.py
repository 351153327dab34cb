"""Which texts share a step: whole ones, in order, and none forgotten."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.engine.core.encoder import EncoderScheduler
from jaxllm.engine.core.pages import PagePool
from jaxllm.engine.core.request import Request, Status
from jaxllm.engine.messages import EngineRequest
from jaxllm.requests.outputs import PoolingParams

SEQS, TOKENS = 4, 32


def scheduler() -> EncoderScheduler:
    return EncoderScheduler(PagePool(1, 16, False), SEQS, TOKENS, TOKENS)


def text(name: str, length: int, arrival: float, priority: int = 0) -> Request:
    message = EngineRequest(
        request_id=name, prompt_token_ids=[1] * length, arrival_time=arrival, priority=priority, pooling=PoolingParams()
    )
    request = Request.from_message(message, TOKENS)
    request.status = Status.WAITING
    return request


def names(queue: EncoderScheduler) -> list[str]:
    return [chunk.request.request_id for chunk in queue.schedule().chunks]


def test_shorter_texts_fill_a_step_and_the_one_passed_over_is_the_next_steps_first():
    queue = scheduler()
    for i, length in enumerate((20, 30, 8, 4, 1)):
        queue.add(text("abcde"[i], length, i))
    assert names(queue) == ["a", "c", "d"]
    assert names(queue) == ["b", "e"]


def test_priority_comes_before_arrival():
    queue = scheduler()
    queue.add(text("late", 20, 1))
    queue.add(text("urgent", 20, 2, priority=-1))
    assert names(queue) == ["urgent"] and names(queue) == ["late"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, TOKENS), max_size=60), st.data())
def test_every_text_runs_once_and_whole(lengths: list[int], data: st.DataObject):
    """Whatever is aborted on the way, waiting or running."""
    queue, ran, aborted = scheduler(), [], set()
    requests = [text(str(i), length, i) for i, length in enumerate(lengths)]
    for request in requests:
        queue.add(request)
    while queue.num_unfinished:
        batch = queue.schedule()
        assert batch.chunks and len(batch.chunks) <= SEQS and batch.num_tokens <= TOKENS
        assert all(c.start == 0 and c.length == c.request.num_prompt and c.num_sampled == 1 for c in batch.chunks)
        ran += [chunk.request.request_id for chunk in batch.chunks]
        if queue.waiting and data.draw(st.booleans()):
            victim = data.draw(st.sampled_from(list(queue.waiting)))
            aborted.add(victim.request_id)
            queue.finish(victim)
        for chunk in batch.chunks:
            queue.finish(chunk.request)
    assert len(ran) == len(set(ran)) and {*ran} | aborted == {r.request_id for r in requests} and not {*ran} & aborted
    queue.pool.check([])
