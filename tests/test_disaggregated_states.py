"""Prompts of models with recurrent layers that one engine computes and another goes on with: their states go along."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxllm import LLM, AsyncLLM, SamplingParams
from tests.reference.tiny import write_checkpoint
from tests.support.sizes import FIELDS, PAGE
from tests.support.two_servers import (
    GREEDY,
    SAMPLED,
    check_a_salt_goes_along,
    check_only_the_rest_is_fetched,
    check_tokens,
    check_what_has_lost_its_place_is_given,
    compute,
    deltas,
    engine,
    engines_of,
    expected,
    inside,
    prompt_of,
    said,
    stats,
    wait_for,
    with_death,
)

directory, alone, producer, consumer = engines_of("lfm2")


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1, 5 * PAGE - 1, 5 * PAGE, 5 * PAGE + 1, 100])
def test_tokens_are_those_of_one_engine(
    alone: LLM, producer: AsyncLLM, consumer: AsyncLLM, length: int, params: SamplingParams
) -> None:
    before, after = check_tokens(alone, producer, consumer, length, params, states=1)
    assert after.offload_hits - before.offload_hits == (length - 1) // PAGE * PAGE


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
    check_only_the_rest_is_fetched(alone, producer, consumer, states=1)


def test_a_cache_salt_goes_along(alone: LLM, producer: AsyncLLM, consumer: AsyncLLM) -> None:
    check_a_salt_goes_along(alone, producer, consumer)


def test_states_that_have_lost_their_place_are_still_given(alone: LLM, directory: Path, consumer: AsyncLLM) -> None:
    check_what_has_lost_its_place_is_given(alone, directory, consumer)


@pytest.mark.parametrize("given", [0, 1, 5])
def test_a_producer_that_dies_while_it_gives(
    alone: LLM, directory: Path, consumer: AsyncLLM, given: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the state has come, after it, or among the pages: the prompt is computed, and nothing is left over."""
    prompt = prompt_of(90, seed=8 + given)
    failed = stats(consumer).num_failed_pulls
    with engine(directory, "kv_producer") as producer:
        source = compute(producer, prompt)
        with_death(producer, given + 1, monkeypatch)  # a part is sent once the next one is there
        found = deltas(consumer, prompt, GREEDY, pages_at=source)
        assert stats(consumer).num_failed_pulls == failed + 1
        again = deltas(consumer, prompt, SAMPLED, pages_at=source)
    assert said(found) == expected(alone, prompt, GREEDY) and found[0].num_cached_tokens == 0
    assert said(again) == expected(alone, prompt, SAMPLED) and again[0].num_cached_tokens == 88
    wait_for(lambda: inside(consumer, lambda core: core.load) == (0, 0))
    inside(consumer, lambda core: core.features["states"].cache).check([])


def test_pages_whose_state_is_gone_are_not_fetched(
    alone: LLM, directory: Path, consumer: AsyncLLM, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = prompt_of(60, seed=9)
    before = stats(consumer).num_pulled_pages
    with engine(directory, "kv_producer") as producer:
        source = compute(producer, prompt)
        tiers = inside(producer, lambda core: core.features["offload"].tiers)
        tiers.wait()
        for digest, page in tiers._host._kept.items():
            if page.nbytes == inside(consumer, lambda core: core.features["offload"].tiers.peers.pulls.state_bytes):
                del tiers._host._kept[digest]
        found = deltas(consumer, prompt, GREEDY, pages_at=source)
    assert said(found) == expected(alone, prompt, GREEDY) and found[0].num_cached_tokens == 0
    assert stats(consumer).num_pulled_pages == before and "it has 0 of the 8 pages" in caplog.text


def test_nothing_is_fetched_where_host_memory_has_no_room_for_all_of_it(
    alone: LLM, directory: Path, producer: AsyncLLM, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = prompt_of(100, seed=10)
    source = compute(producer, prompt)
    sizes = inside(producer, lambda core: core.features["offload"].copies._blocks)
    room = 5 * sizes["page"].nbytes + sizes["state"].nbytes
    with engine(directory, "kv_consumer", kv_offload_memory=room) as consumer:
        found = deltas(consumer, prompt, GREEDY, pages_at=source)
        assert stats(consumer).num_pulled_pages == 0
    assert said(found) == expected(alone, prompt, GREEDY) and "has room for 6 of its 13 pages" in caplog.text
