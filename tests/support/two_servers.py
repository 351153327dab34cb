"""Two engines of which one computes prompts for the other, and what holds of every model that both have."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, AsyncLLM, SamplingParams
from jaxllm.engine.core.loop import EngineCore
from jaxllm.engine.features.offload import page_listener
from jaxllm.engine.messages import EngineRequest, EngineStats, PagesAt, TokenDelta
from tests.reference.tiny import write_checkpoint
from tests.support.sizes import FIELDS, PAGE, few_pages

TRANSFER: dict[str, Any] = {"kv_offload_memory": "64MiB", "cluster_secret": "s"}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_k=20, seed=7, max_tokens=12, ignore_eos=True)
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
SECONDS = 60


@contextmanager
def engine(directory: Path, role: str, *, kv: dict[str, Any] | None = None, **fields: Any) -> Iterator[AsyncLLM]:
    """In the end nothing runs, and no page is held."""
    config = {"kv_role": role, "kv_port": 0} | (kv or {})
    own = FIELDS | TRANSFER | {"kv_transfer_config": config, "engine_process": False}
    running = AsyncLLM(model=str(directory), **own | fields)
    try:
        yield running
        wait_for(lambda: inside(running, lambda core: core.load == (0, 0) and not core._requests))
        inside(running, lambda core: core._pool.check([]))
        pulls = inside(running, lambda core: core.features["offload"].tiers.peers.pulls)
        if pulls is not None:
            wait_for(lambda: not pulls._coming and not pulls._running)
    finally:
        running.shutdown()


def inside(running: AsyncLLM, ask: Callable[[EngineCore], Any]) -> Any:
    return running._streams.client.ask(ask)  # type: ignore[attr-defined]


def deltas(running: AsyncLLM, prompt: Sequence[int], params: SamplingParams, **more: Any) -> list[TokenDelta]:
    request = EngineRequest(request_id=uuid.uuid4().hex, prompt_token_ids=list(prompt), sampling_params=params, **more)

    async def collect() -> list[TokenDelta]:
        with running.run([request]) as stream:
            return [delta async for gains in stream.arrivals() for _, delta in gains]

    return asyncio.run(collect())


def said(found: list[TokenDelta]) -> list[int]:
    return [token for delta in found for token in delta.token_ids]


def compute(producer: AsyncLLM, prompt: Sequence[int]) -> PagesAt:
    """What a server of prompts does, and says."""
    deltas(producer, prompt, ONE, hands_on=True)
    transfer = producer.info.transfer
    assert transfer is not None
    return PagesAt(transfer.host, transfer.port, len(prompt) // PAGE)


def stats(running: AsyncLLM) -> EngineStats:
    return inside(running, lambda core: core.stats())


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(0, 90, length).tolist()


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def engines_of(name: str) -> tuple[Any, Any, Any, Any]:
    """The fixtures `directory`, `alone`, `producer` and `consumer` of a model, for a module to have by these names.

    `alone` is the oracle: one engine without a prefix cache.
    """

    @pytest.fixture(scope="module")
    def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_checkpoint(name, tmp_path_factory.mktemp("model") / name)

    @pytest.fixture(scope="module")
    def alone(directory: Path) -> Iterator[LLM]:
        with LLM(str(directory), **FIELDS, enable_prefix_caching=False) as llm:
            yield llm

    @pytest.fixture(scope="module")
    def producer(directory: Path) -> Iterator[AsyncLLM]:
        with engine(directory, "kv_producer") as running:
            yield running

    @pytest.fixture(scope="module")
    def consumer(directory: Path) -> Iterator[AsyncLLM]:
        with engine(directory, "kv_consumer") as running:
            yield running

    return directory, alone, producer, consumer


def expected(alone: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    return list(alone.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)


def with_giver(producer: AsyncLLM, give: Callable[..., Iterator[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    listener = inside(producer, lambda core: core.features["offload"].tiers.peers.listener)
    monkeypatch.setattr(listener, "_give", give)


def with_death(producer: AsyncLLM, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The producer gives a page, or a state, at a time, and is gone when it comes to the one numbered `at`."""
    listener = inside(producer, lambda core: core.features["offload"].tiers.peers.listener)
    give = listener._give

    def die(digests: Sequence[bytes]) -> Iterator[Any]:
        for number, page in enumerate(give(digests)):
            if number == at:
                listener.close()
            yield page

    with_giver(producer, die, monkeypatch)
    monkeypatch.setattr(page_listener, "PART_BYTES", 1)


def check_tokens(
    alone: LLM, producer: AsyncLLM, consumer: AsyncLLM, length: int, params: SamplingParams, *, states: int
) -> tuple[EngineStats, EngineStats]:
    """Tokens are those of one engine, and all full pages have come, with so many `states`; what was counted."""
    prompt = prompt_of(length, seed=params.top_k)
    before = stats(consumer)
    found = deltas(consumer, prompt, params, pages_at=compute(producer, prompt))
    after = stats(consumer)
    pages = (length - 1) // PAGE  # the last token is computed again, for its logits
    assert said(found) == expected(alone, prompt, params)
    assert found[0].num_cached_tokens == pages * PAGE
    assert after.num_pulled_pages - before.num_pulled_pages == pages + states * (pages > 0)
    assert after.num_failed_pulls == before.num_failed_pulls
    return before, after


def check_only_the_rest_is_fetched(alone: LLM, producer: AsyncLLM, consumer: AsyncLLM, *, states: int) -> None:
    """A prompt whose beginning both know, as the earlier turns of a conversation; and then the same prompt again."""
    prompt = prompt_of(70, seed=3)
    deltas(consumer, prompt[:41], GREEDY)
    before = stats(consumer).num_pulled_pages
    found = deltas(consumer, prompt, GREEDY, pages_at=compute(producer, prompt))
    assert said(found) == expected(alone, prompt, GREEDY) and found[0].num_cached_tokens == 64
    assert stats(consumer).num_pulled_pages - before == 8 - 5 + states
    again = deltas(consumer, prompt, SAMPLED, pages_at=compute(producer, prompt))
    assert said(again) == expected(alone, prompt, SAMPLED)
    assert stats(consumer).num_pulled_pages - before == 3 + states


def check_a_salt_goes_along(alone: LLM, producer: AsyncLLM, consumer: AsyncLLM) -> None:
    prompt = prompt_of(30, seed=5)
    deltas(producer, prompt, ONE, hands_on=True, cache_salt="ours")
    transfer = producer.info.transfer
    assert transfer is not None
    source = PagesAt(transfer.host, transfer.port)
    for salt, cached in (("theirs", 0), ("ours", 24)):
        found = deltas(consumer, prompt, GREEDY, pages_at=source, cache_salt=salt)
        assert said(found) == expected(alone, prompt, GREEDY) and found[0].num_cached_tokens == cached


def check_what_has_lost_its_place_is_given(alone: LLM, directory: Path, consumer: AsyncLLM) -> None:
    """The producer's devices hold one prompt: what it hands on is in host memory."""
    prompts = [prompt_of(100, seed=60 + number) for number in range(3)]
    with few_pages(20), engine(directory, "kv_producer") as producer:
        sources = [compute(producer, prompt) for prompt in prompts]
        for prompt, source in zip(prompts, sources, strict=True):
            found = deltas(consumer, prompt, GREEDY, pages_at=source)
            assert said(found) == expected(alone, prompt, GREEDY) and found[0].num_cached_tokens == 96
