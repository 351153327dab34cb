"""Tokens tried ahead by models whose layers keep a state of each sequence: the answers are those without, and what is
kept of a state is that of the tokens that were taken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from tests.reference.tiny import write_checkpoint
from tests.support.sizes import FIELDS, few_pages
from tests.test_drafts import FEW, NGRAMS, assert_equal, random_params, told

MODELS = ("qwen3_5", "lfm2", "falcon_h1", "qwen3_next", "mamba2", "granite4", "nemotron_h")
"""Each kind of state, by itself and beside attention, and whatever families do otherwise about it."""


@pytest.fixture(scope="module", params=MODELS)
def directory(request, tmp_path_factory) -> str:
    return str(write_checkpoint(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def plain(directory) -> Iterator[LLM]:
    with LLM(directory, **FIELDS, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting(directory) -> Iterator[LLM]:
    with LLM(directory, **FIELDS, speculative_config=NGRAMS) as llm:
        yield llm


def requests_of(count: int, seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    dice = np.random.default_rng(seed)
    prompts = [dice.choice([*FEW, 8, 9], dice.integers(1, 50)).tolist() for _ in range(count)]
    return prompts, [random_params(dice) for _ in prompts]


def test_answers_are_those_without_drafts_whatever_a_request_asks_for(plain, drafting):
    prompts, params = requests_of(8, 7)
    expected = told(plain.generate(prompts, params, use_tqdm=False))
    before = drafting.stats()
    for _ in range(2):  # the second time a prompt goes on from a state that was kept
        assert_equal(told(drafting.generate(prompts, params, use_tqdm=False)), expected)
    alone = [told(drafting.generate([p], q, use_tqdm=False))[0] for p, q in zip(prompts[:3], params, strict=False)]
    assert_equal(alone, expected[:3])
    stats = drafting.stats()
    assert stats.prefix_cache_hits > before.prefix_cache_hits
    taken, tried = sum(stats.accepted_by_position), stats.num_draft_tokens
    assert 0 < taken < tried, "some are taken, and some refused"


def test_an_answer_goes_on_from_the_state_that_drafts_have_left(plain, drafting):
    """A chat's next turn begins where the last full page of its answer ended, in the middle of what a step tried."""
    params = SamplingParams(temperature=1, seed=3, max_tokens=29, ignore_eos=True, allowed_token_ids=FEW)
    for length in range(17, 25):
        prompt = [9, *(FEW * 10)][:length]
        (answer,) = told(drafting.generate([prompt], params, use_tqdm=False))
        turn = prompt + answer[0] + [8, 9]
        known = len(prompt) + len(answer[0]) - 1
        (output,) = drafting.generate([turn], params, use_tqdm=False)
        assert output.num_cached_tokens == known // 8 * 8
        assert_equal(told([output]), told(plain.generate([turn], params, use_tqdm=False)))


def test_choices_of_a_prompt_go_on_from_one_state(plain, drafting):
    params = SamplingParams(n=5, temperature=1, seed=2, max_tokens=30, ignore_eos=True, allowed_token_ids=FEW)
    prompt = FEW * 7
    expected = told(plain.generate([prompt], params, use_tqdm=False))
    assert len({tuple(tokens) for tokens, *_ in expected}) == 5
    assert_equal(told(drafting.generate([prompt], params, use_tqdm=False)), expected)


def check_preempted(directory: str, config: dict[str, Any], plain: LLM) -> None:
    """With few pages requests are preempted in the middle of drafts, and get the answers of `plain`."""
    prompts = [np.random.default_rng(i).choice(FEW, 3 + i).tolist() for i in range(12)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=40, allowed_token_ids=FEW) for i in range(12)]
    expected = told(plain.generate(prompts, params, use_tqdm=False))
    with few_pages(20), LLM(directory, **FIELDS, speculative_config=config) as llm:
        for _ in range(2):
            assert_equal(told(llm.generate(prompts, params, use_tqdm=False)), expected)
        assert llm.stats().num_preemptions > 0 < sum(llm.stats().accepted_by_position)


def test_with_few_pages_requests_are_preempted_in_the_middle_of_drafts(tmp_path):
    directory = str(write_checkpoint("lfm2", tmp_path))
    with LLM(directory, **FIELDS, enable_prefix_caching=False) as plain:
        check_preempted(directory, NGRAMS, plain)


@pytest.mark.parametrize("differently", [{"method": "suffix"}, {"num_speculative_tokens": 7}])
def test_other_sources_of_drafts(tmp_path, differently):
    """Of answers that were given before, and nearly as many tokens as a page has."""
    directory = str(write_checkpoint("lfm2", tmp_path))
    prompts, params = requests_of(12, 9)
    with LLM(directory, **FIELDS) as plain:
        expected = told(plain.generate(prompts, params, use_tqdm=False))
    with LLM(directory, **FIELDS, decode_steps=4, speculative_config=NGRAMS | differently) as llm:
        for _ in range(2):
            assert_equal(told(llm.generate(prompts, params, use_tqdm=False)), expected)
        assert sum(llm.stats().accepted_by_position) > 0


def test_a_draft_model_of_attention_alone_drafts_for_one_with_states(tmp_path):
    directory, draft = str(write_checkpoint("lfm2", tmp_path / "a")), str(write_checkpoint("gpt2", tmp_path / "b"))
    prompts, params = requests_of(12, 4)
    with LLM(directory, **FIELDS) as plain:
        expected = told(plain.generate(prompts, params, use_tqdm=False))
    with LLM(directory, **FIELDS, speculative_config={"num_speculative_tokens": 3, "model": draft}) as llm:
        for _ in range(2):
            assert_equal(told(llm.generate(prompts, params, use_tqdm=False)), expected)
        stats = llm.stats()
    assert 0 < sum(stats.accepted_by_position) < stats.num_draft_tokens
