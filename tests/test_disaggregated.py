"""A prompt that one engine computes and another goes on with gives what one engine gives, whatever comes of its pages.

Tiny random models at float32; two engines in this process, whose pages go over TCP.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxllm import LLM, AsyncLLM, SamplingParams
from jaxllm.engine.messages import EngineRequest, PagesAt
from jaxllm.errors import ConfigError
from tests.reference.tiny import save_checkpoint, tiny_config, tiny_weights, write_checkpoint
from tests.support.sizes import FIELDS, PAGE, few_pages
from tests.support.two_servers import (
    GREEDY,
    SAMPLED,
    SECONDS,
    TRANSFER,
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
    with_giver,
)

directory, alone, producer, consumer = engines_of("llama_gqa")


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE - 1, 5 * PAGE, 5 * PAGE + 1, 100])
def test_tokens_are_those_of_one_engine(
    alone: LLM, producer: AsyncLLM, consumer: AsyncLLM, length: int, params: SamplingParams
) -> None:
    before, after = check_tokens(alone, producer, consumer, length, params, states=0)
    assert after.num_pulls - before.num_pulls == (length > PAGE)


@pytest.mark.parametrize("name", ["gemma3_linear_rope", "deepseek_v3"])
def test_other_models(name: str, tmp_path: Path) -> None:
    """Sliding windows, and a latent."""
    directory, prompt = write_checkpoint(name, tmp_path / name), prompt_of(45)
    with LLM(str(directory), **FIELDS) as llm:
        wanted = expected(llm, prompt, GREEDY)
    with engine(directory, "kv_producer") as producer, engine(directory, "kv_consumer") as consumer:
        found = deltas(consumer, prompt, GREEDY, pages_at=compute(producer, prompt))
    assert said(found) == wanted and found[0].num_cached_tokens == 40


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_quantized_pages(directory: Path, dtype: str) -> None:
    prompt = prompt_of(45)
    with LLM(str(directory), **FIELDS, kv_cache_dtype=dtype) as llm:
        wanted = expected(llm, prompt, GREEDY)
    both = [engine(directory, role, kv_cache_dtype=dtype) for role in ("kv_producer", "kv_consumer")]
    with both[0] as producer, both[1] as consumer:
        found = deltas(consumer, prompt, GREEDY, pages_at=compute(producer, prompt))
    assert said(found) == wanted and found[0].num_cached_tokens == 40


def test_a_draft_models_pages_come_along(directory: Path, tmp_path: Path) -> None:
    weights = {name: 1.1 * array for name, array in tiny_weights("llama_gqa").items()}
    draft = save_checkpoint(tiny_config("llama_gqa"), weights, tmp_path / "llama_gqa")
    fields = {"speculative_config": {"model": str(draft), "num_speculative_tokens": 2}}
    prompt = prompt_of(45)
    with LLM(str(directory), **FIELDS) as llm:
        wanted = expected(llm, prompt, GREEDY)
    with engine(directory, "kv_producer", **fields) as producer, engine(directory, "kv_consumer", **fields) as consumer:
        found = deltas(consumer, prompt, GREEDY, pages_at=compute(producer, prompt))
        assert stats(consumer).num_draft_tokens > 0
    assert said(found) == wanted and found[0].num_cached_tokens == 40


def test_either_way_between_two_engines_of_both_roles(alone: LLM, directory: Path) -> None:
    with engine(directory, "kv_both") as one, engine(directory, "kv_both") as other:
        for number, (first, second) in enumerate([(one, other), (other, one)]):
            prompt = prompt_of(40, seed=number + 50)
            found = deltas(second, prompt, GREEDY, pages_at=compute(first, prompt))
            assert said(found) == expected(alone, prompt, GREEDY) and found[0].num_cached_tokens == 32
        assert [stats(running).num_given_pages for running in (one, other)] == [4, 4]


def test_only_what_is_not_here_is_fetched(alone: LLM, producer: AsyncLLM, consumer: AsyncLLM) -> None:
    check_only_the_rest_is_fetched(alone, producer, consumer, states=0)


def test_choices_of_a_request_fetch_its_pages_once(alone: LLM, producer: AsyncLLM, consumer: AsyncLLM) -> None:
    from dataclasses import replace

    prompt = prompt_of(60, seed=4)
    before = stats(consumer).num_pulled_pages
    source = compute(producer, prompt)
    found = deltas(consumer, prompt, replace(SAMPLED, n=3), pages_at=source)
    assert len(found) >= 3 and stats(consumer).num_pulled_pages - before == 7
    (choices,) = (alone.generate([prompt], replace(SAMPLED, n=3), use_tqdm=False)[0].outputs,)
    assert sorted(said(found)) == sorted(token for choice in choices for token in choice.token_ids)


def test_a_cache_salt_goes_along(alone: LLM, producer: AsyncLLM, consumer: AsyncLLM) -> None:
    failed = stats(consumer).num_failed_pulls
    check_a_salt_goes_along(alone, producer, consumer)
    assert stats(consumer).num_failed_pulls == failed + 1


def test_pages_that_have_lost_their_place_are_still_given(alone: LLM, directory: Path, consumer: AsyncLLM) -> None:
    check_what_has_lost_its_place_is_given(alone, directory, consumer)


def test_a_producer_that_dies_while_it_gives(
    alone: LLM, directory: Path, consumer: AsyncLLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(90, seed=8)
    with engine(directory, "kv_producer") as producer:
        source = compute(producer, prompt)
        with_death(producer, 4, monkeypatch)
        found = deltas(consumer, prompt, GREEDY, pages_at=source)
        again = deltas(consumer, prompt, SAMPLED, pages_at=source)
    assert said(found) == expected(alone, prompt, GREEDY) and said(again) == expected(alone, prompt, SAMPLED)
    assert 0 < found[0].num_cached_tokens < 88, "what had come is used"
    lines = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1 and "did not come" in lines[0]


def test_a_stream_goes_on_while_pages_come_and_a_pull_may_be_cancelled(
    alone: LLM, directory: Path, producer: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, may_give = threading.Event(), threading.Event()

    def wait(digests: Sequence[bytes]) -> Iterator[Any]:
        asked.set()
        may_give.wait(SECONDS)
        return iter(())

    prompt, other = prompt_of(90, seed=9), prompt_of(20, seed=9)
    source = compute(producer, prompt)
    with_giver(producer, wait, monkeypatch)
    with engine(directory, "kv_consumer") as consumer:

        async def run() -> list[int]:
            request = EngineRequest(
                request_id="waits", prompt_token_ids=prompt, sampling_params=GREEDY, pages_at=source
            )
            with consumer.run([request]) as waiting:
                assert await asyncio.to_thread(asked.wait, SECONDS)
                found = [
                    token
                    async for _, delta in consumer.stream(other, GREEDY, request_id="other")
                    for token in delta.token_ids
                ]
                assert not await waiting.next(0.05), "it still waits for its pages"
                assert stats(consumer).num_preparing == 1
                return found  # leaving aborts the request

        assert asyncio.run(run()) == expected(alone, other, GREEDY)
        pulls = inside(consumer, lambda core: core.features["offload"].tiers.peers.pulls)
        wait_for(lambda: not pulls._running)
        assert not may_give.is_set() and stats(consumer).num_failed_pulls == 0
    may_give.set()


def test_a_producer_that_says_nothing_is_not_waited_for_longer_than_that(
    alone: LLM, directory: Path, producer: AsyncLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    may_give = threading.Event()

    def wait(digests: Sequence[bytes]) -> Iterator[Any]:
        may_give.wait(SECONDS)
        return iter(())

    prompt = prompt_of(90, seed=10)
    source = compute(producer, prompt)
    with_giver(producer, wait, monkeypatch)
    with engine(directory, "kv_consumer", kv={"kv_timeout": 0.3}) as consumer:
        found = deltas(consumer, prompt, GREEDY, pages_at=source)
        assert said(found) == expected(alone, prompt, GREEDY) and found[0].num_cached_tokens == 0
        assert stats(consumer).num_failed_pulls == 1 and "its 0.3 seconds (kv_timeout) were over" in caplog.text
    may_give.set()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"cluster_secret": "another"}, "its cluster_secret is another"),
        ({"kv_cache_dtype": "int8"}, "its pages are of another model, or were made with other settings"),
        ({"block_size": 16}, "its pages are of another model, or were made with other settings"),
    ],
    ids=str,
)
def test_settings_that_do_not_agree(
    directory: Path, producer: AsyncLLM, fields: dict[str, Any], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = prompt_of(40, seed=11)
    with engine(directory, "kv_consumer", **fields) as consumer:
        found = deltas(consumer, prompt, GREEDY, pages_at=compute(producer, prompt))
        assert len(said(found)) == 12 and found[0].num_cached_tokens == 0
        assert stats(consumer).num_failed_pulls == 1 and stats(consumer).num_pulled_pages == 0
    assert problem in caplog.text


def test_other_weights_are_another_model(producer: AsyncLLM, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = {name: 1.1 * array for name, array in tiny_weights("llama_gqa").items()}
    other = save_checkpoint(tiny_config("llama_gqa"), weights, tmp_path / "llama_gqa")
    prompt = prompt_of(40, seed=12)
    with LLM(str(other), **FIELDS) as llm:
        wanted = expected(llm, prompt, GREEDY)
    with engine(other, "kv_consumer") as consumer:
        found = deltas(consumer, prompt, GREEDY, pages_at=compute(producer, prompt))
        assert stats(consumer).num_pulled_pages == 0
    assert said(found) == wanted and "of another model" in caplog.text


def test_a_request_fails_where_it_is_to_fail(directory: Path, producer: AsyncLLM, alone: LLM) -> None:
    prompt = prompt_of(40, seed=13)
    with engine(directory, "kv_consumer", kv={"kv_load_failure_policy": "fail"}) as consumer:
        (failed,) = deltas(consumer, prompt, GREEDY, pages_at=PagesAt("127.0.0.1", 9))
        assert failed.finish_reason == "error" and failed.error is not None
        assert "the pages of its prompt did not come from 127.0.0.1:9" in failed.error and not failed.invalid
        found = deltas(consumer, prompt, GREEDY, pages_at=compute(producer, prompt))
        assert said(found) == expected(alone, prompt, GREEDY) and found[0].num_cached_tokens == 32


def test_requests_beside_each_other_and_preempted(directory: Path, alone: LLM) -> None:
    prompts = [prompt_of(60, seed=100 + number) for number in range(10)]
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True)
    wanted = [expected(alone, prompt, params) for prompt in prompts]
    with (
        engine(directory, "kv_producer") as producer,
        few_pages(20),
        engine(directory, "kv_consumer") as consumer,
    ):
        sources = [compute(producer, prompt) for prompt in prompts]

        async def run() -> list[list[int]]:
            requests = [
                EngineRequest(request_id=str(i), prompt_token_ids=prompt, sampling_params=params, pages_at=source)
                for i, (prompt, source) in enumerate(zip(prompts, sources, strict=True))
            ]
            found: list[list[int]] = [[] for _ in prompts]
            with consumer.run(requests) as stream:
                async for gains in stream.arrivals():
                    for index, delta in gains:
                        found[index] += delta.token_ids
            return found

        assert asyncio.run(run()) == wanted
        assert stats(consumer).num_preemptions > 0 and stats(consumer).num_failed_pulls == 0


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"kv_offload_memory": None}, "kv_transfer_config is set, and kv_offload_memory is not"),
        ({"kv_transfer_config": {}}, "kv_role"),
        ({"kv_transfer_config": {"kv_role": "kv_prefill"}}, "kv_role .*'kv_producer', 'kv_consumer' or 'kv_both'"),
        ({"kv_transfer_config": {"kv_role": "kv_both", "kv_connector": "NixlConnector"}}, "kv_connector .*'jaxllm'"),
        ({"kv_transfer_config": {"kv_role": "kv_both", "kv_ip": "0.0.0.0"}}, "kv_ip .*reach this machine"),
        ({"kv_transfer_config": {"kv_role": "kv_both", "kv_timeout": 0}}, "kv_timeout"),
        ({"kv_transfer_config": {"kv_role": "kv_both", "kv_ip": "203.0.113.1"}}, "203.0.113.1 .* cannot listen"),
        ({"data_parallel_size": 2}, "data_parallel_size is 2: one engine listens at a port"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_cannot_work_are_refused_in_a_line(directory: Path, fields: dict[str, Any], line: str) -> None:
    given = FIELDS | TRANSFER | {"kv_transfer_config": {"kv_role": "kv_both"}} | fields
    with pytest.raises(ConfigError, match=line) as refused:
        LLM(str(directory), **given)
    assert "\n" not in str(refused.value)


def test_models_without_pages_are_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_offload_memory is 64 MiB, and this model"):
        LLM(
            str(write_checkpoint("bert", tmp_path)), dtype="float32", skip_tokenizer_init=True, **TRANSFER,
            kv_transfer_config={"kv_role": "kv_both"},
        )  # fmt: skip
