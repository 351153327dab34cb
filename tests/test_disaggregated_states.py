"""Prompts of models with recurrent layers that one engine computes and another goes on with: their states go along."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, AsyncLLM, SamplingParams
from jaxllm.engine.messages import PagesAt
from jaxllm.engine.offload import page_listener
from tests.reference.tiny import tiny_config, write_checkpoint
from tests.sizes import FIELDS, PAGE, few_pages
from tests.test_disaggregated import (
    GREEDY,
    ONE,
    SAMPLED,
    compute,
    deltas,
    engine,
    expected,
    inside,
    said,
    stats,
    wait_for,
    with_giver,
)

VOCAB = tiny_config("lfm2")["vocab_size"]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(3, VOCAB, length).tolist()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("lfm2", tmp_path_factory.mktemp("model") / "lfm2")


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


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1, 5 * PAGE - 1, 5 * PAGE, 5 * PAGE + 1, 100])
def test_tokens_are_those_of_one_engine(
    alone: LLM, producer: AsyncLLM, consumer: AsyncLLM, length: int, params: SamplingParams
) -> None:
    prompt = prompt_of(length, seed=params.top_k)
    before = stats(consumer)
    found = deltas(consumer, prompt, params, pages_at=compute(producer, prompt))
    after = stats(consumer)
    pages = (length - 1) // PAGE
    assert said(found) == expected(alone, prompt, params)
    assert found[0].num_cached_tokens == pages * PAGE
    assert after.num_pulled_pages - before.num_pulled_pages == pages + (pages > 0), "and the state"
    assert after.num_failed_pulls == before.num_failed_pulls
    assert after.offload_hits - before.offload_hits == pages * PAGE


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2", "falcon_h1"])
def test_other_models(name: str, tmp_path: Path) -> None:
    """The gated delta rule, and state spaces, with attention and without."""
    directory, prompt = write_checkpoint(name, tmp_path / name), prompt_of(45)
    with LLM(str(directory), **FIELDS) as llm:
        wanted = expected(llm, prompt, GREEDY)
    with engine(directory, "kv_producer") as producer, engine(directory, "kv_consumer") as consumer:
        found = deltas(consumer, prompt, GREEDY, pages_at=compute(producer, prompt))
        assert stats(consumer).num_failed_pulls == 0
    assert said(found) == wanted and found[0].num_cached_tokens == 40


def test_only_what_is_not_here_is_fetched(alone: LLM, producer: AsyncLLM, consumer: AsyncLLM) -> None:
    """The earlier turns of a conversation, and then the same prompt again."""
    prompt = prompt_of(70, seed=3)
    deltas(consumer, prompt[:41], GREEDY)
    before = stats(consumer).num_pulled_pages
    found = deltas(consumer, prompt, GREEDY, pages_at=compute(producer, prompt))
    assert said(found) == expected(alone, prompt, GREEDY) and found[0].num_cached_tokens == 64
    assert stats(consumer).num_pulled_pages - before == 8 - 5 + 1
    again = deltas(consumer, prompt, SAMPLED, pages_at=compute(producer, prompt))
    assert said(again) == expected(alone, prompt, SAMPLED) and stats(consumer).num_pulled_pages - before == 4


def test_a_cache_salt_goes_along(alone: LLM, producer: AsyncLLM, consumer: AsyncLLM) -> None:
    prompt = prompt_of(30, seed=5)
    deltas(producer, prompt, ONE, hands_on=True, cache_salt="ours")
    transfer = producer.info.transfer
    assert transfer is not None
    source = PagesAt(transfer.host, transfer.port)
    for salt, cached in (("theirs", 0), ("ours", 24)):
        found = deltas(consumer, prompt, GREEDY, pages_at=source, cache_salt=salt)
        assert said(found) == expected(alone, prompt, GREEDY) and found[0].num_cached_tokens == cached


def test_states_that_have_lost_their_place_are_still_given(alone: LLM, directory: Path, consumer: AsyncLLM) -> None:
    """The producer's devices hold one prompt: what it hands on is in host memory."""
    prompts = [prompt_of(100, seed=60 + number) for number in range(3)]
    with few_pages(20), engine(directory, "kv_producer") as producer:
        sources = [compute(producer, prompt) for prompt in prompts]
        for prompt, source in zip(prompts, sources, strict=True):
            found = deltas(consumer, prompt, GREEDY, pages_at=source)
            assert said(found) == expected(alone, prompt, GREEDY) and found[0].num_cached_tokens == 96


@pytest.mark.parametrize("given", [0, 1, 5])
def test_a_producer_that_dies_while_it_gives(
    alone: LLM, directory: Path, consumer: AsyncLLM, given: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the state has come, after it, or among the pages: the prompt is computed, and nothing is left over."""
    prompt = prompt_of(90, seed=8 + given)
    failed = stats(consumer).num_failed_pulls
    with engine(directory, "kv_producer") as producer:
        source = compute(producer, prompt)
        listener = inside(producer, lambda core: core._tiers.peers._listener)
        give = listener._give

        def die(digests: Sequence[bytes]) -> Iterator[Any]:
            for number, page in enumerate(give(digests)):
                if number == given + 1:  # a part is sent once the next one is there
                    listener.close()
                yield page

        with_giver(producer, die, monkeypatch)
        monkeypatch.setattr(page_listener, "PART_BYTES", 1)
        found = deltas(consumer, prompt, GREEDY, pages_at=source)
        assert stats(consumer).num_failed_pulls == failed + 1
        again = deltas(consumer, prompt, SAMPLED, pages_at=source)
    assert said(found) == expected(alone, prompt, GREEDY) and found[0].num_cached_tokens == 0
    assert said(again) == expected(alone, prompt, SAMPLED) and again[0].num_cached_tokens == 88
    wait_for(lambda: inside(consumer, lambda core: core.load) == (0, 0))
    inside(consumer, lambda core: core._scheduler.states).check([])


def test_pages_whose_state_is_gone_are_not_fetched(
    alone: LLM, directory: Path, consumer: AsyncLLM, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = prompt_of(60, seed=9)
    before = stats(consumer).num_pulled_pages
    with engine(directory, "kv_producer") as producer:
        source = compute(producer, prompt)
        tiers = inside(producer, lambda core: core._tiers)
        tiers.wait()
        for digest, page in tiers._host.items():
            if page.nbytes == inside(consumer, lambda core: core._tiers.peers.pulls.state_bytes):
                del tiers._host._pages[digest]
        found = deltas(consumer, prompt, GREEDY, pages_at=source)
    assert said(found) == expected(alone, prompt, GREEDY) and found[0].num_cached_tokens == 0
    assert stats(consumer).num_pulled_pages == before and "it has 0 of the 8 pages" in caplog.text


def test_nothing_is_fetched_where_host_memory_has_no_room_for_all_of_it(
    alone: LLM, directory: Path, producer: AsyncLLM, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = prompt_of(100, seed=10)
    source = compute(producer, prompt)
    sizes = inside(producer, lambda core: core._runner._copies._blocks)
    room = 5 * sizes["page"].nbytes + sizes["state"].nbytes
    with engine(directory, "kv_consumer", kv_offload_memory=room) as consumer:
        found = deltas(consumer, prompt, GREEDY, pages_at=source)
        assert stats(consumer).num_pulled_pages == 0
    assert said(found) == expected(alone, prompt, GREEDY) and "has room for 6 of its 13 pages" in caplog.text
