"""Tokens that are tried ahead: with them a request's answer is, token for token, the one that it has without."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, ConfigError, RequestOutput, SamplingParams
from tests.reference.tiny import write_checkpoint
from tests.support.sizes import FIELDS, few_pages

MODELS = ("llama_gqa", "gemma3_linear_rope", "deepseek_v3")
NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
FEW = [5, 6, 7]
"""With so few tokens to choose from a text soon says again what it has said."""


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


def random_params(dice: np.random.Generator) -> SamplingParams:
    fields: dict[str, Any] = {
        "temperature": float(dice.choice([0, 0.3, 1])), "seed": int(dice.integers(2**40)),
        "max_tokens": int(dice.integers(9, 40)), "ignore_eos": bool(dice.integers(2)),
    }  # fmt: skip
    if dice.integers(4):
        fields["allowed_token_ids"] = FEW
    others = {
        "top_k": 2, "top_p": 0.8, "min_p": 0.1, "presence_penalty": 0.4, "frequency_penalty": 0.2, "logprobs": 3,
        "repetition_penalty": 1.2, "repeat_last_n": 5, "logit_bias": {6: 1.5}, "stop_token_ids": [7], "min_tokens": 9,
        "logprob_token_ids": [5, 7],
    }  # fmt: skip
    chosen = dice.choice(list(others), size=dice.integers(4), replace=False)
    return SamplingParams(**fields, **{name: others[name] for name in chosen})


def told(outputs: list[RequestOutput]) -> list[Any]:
    """Everything about the answers that a caller sees."""
    return [(c.token_ids, c.finish_reason, c.stop_reason, c.logprobs) for o in outputs for c in o.outputs]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    for (tokens, *others, logprobs), (right, *rest, exact) in zip(found, expected, strict=True):
        assert (tokens, *others) == (right, *rest)
        for row, exact_row in zip(logprobs or [], exact or [], strict=True):
            rank = {token: (lp.logprob, lp.rank) for token, lp in row.items()}
            assert rank == {token: (pytest.approx(lp.logprob, abs=1e-4), lp.rank) for token, lp in exact_row.items()}


def test_answers_are_those_without_drafts_whatever_a_request_asks_for(plain, drafting):
    dice = np.random.default_rng(7)
    prompts = [dice.choice([*FEW, 8, 9], dice.integers(1, 50)).tolist() for _ in range(24)]
    params = [random_params(dice) for _ in prompts]
    expected = told(plain.generate(prompts, params, use_tqdm=False))
    for _ in range(2):  # the second time many a prompt's pages are cached
        assert_equal(told(drafting.generate(prompts, params, use_tqdm=False)), expected)
    alone = [told(drafting.generate([p], q, use_tqdm=False))[0] for p, q in zip(prompts[:6], params, strict=False)]
    assert_equal(alone, expected[:6])
    stats = drafting.stats()
    accepted = stats.accepted_by_position
    assert accepted == sorted(accepted, reverse=True)
    assert 0 < accepted[2] <= accepted[0] <= stats.num_drafts
    assert sum(accepted) < stats.num_draft_tokens <= 3 * stats.num_drafts


def test_a_text_that_repeats_itself_takes_fewer_steps(directory, plain, drafting):
    prompt, params = FEW * 3, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, allowed_token_ids=[6])
    steps = []
    for llm in (plain, drafting):
        before = llm.stats().num_steps
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert output.outputs[0].token_ids == [6] * 64
        steps.append(llm.stats().num_steps - before)
    assert steps[0] >= 64
    assert steps[1] <= 24, "four tokens a step, but for the first ones and the last"


def test_requests_that_wait_for_others_to_end_do_not_keep_these_from_trying_ahead(drafting):
    """Of sixteen at a time eight wait until the first eight have ended: two rounds, each of them as short as one."""
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, allowed_token_ids=[6])
    before = drafting.stats().num_steps
    drafting.generate([FEW * 3] * 16, params, use_tqdm=False)
    assert drafting.stats().num_steps - before <= 64


def test_with_few_pages_requests_are_preempted_in_the_middle_of_drafts(directory, plain):
    dice = np.random.default_rng(2)
    prompts = [dice.choice(FEW, dice.integers(1, 20)).tolist() for _ in range(16)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=48, allowed_token_ids=FEW) for i in range(16)]
    expected = told(plain.generate(prompts, params, use_tqdm=False))
    with few_pages(20), LLM(directory, **FIELDS, speculative_config=NGRAMS) as llm:
        assert_equal(told(llm.generate(prompts, params, use_tqdm=False)), expected)
        stats = llm.stats()
    assert stats.num_preemptions > 0 < sum(stats.accepted_by_position)


def test_the_end_of_the_context_is_reached_and_not_passed(plain, drafting):
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, allowed_token_ids=FEW)
    prompts = [FEW * 20, FEW * 41, [5] * 127]
    expected = told(plain.generate(prompts, params, use_tqdm=False))
    found = told(drafting.generate(prompts, params, use_tqdm=False))
    assert found == expected
    assert [len(tokens) for tokens, *_ in found] == [68, 5, 1]


SUFFIX = {"method": "suffix", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
ANSWERS = SamplingParams(temperature=1, seed=3, max_tokens=40, ignore_eos=True)
"""Any of so many tokens that a text of its own would hardly ever repeat itself."""


@pytest.fixture(scope="module")
def recalling(tmp_path_factory) -> Iterator[LLM]:
    directory = str(write_checkpoint("llama_gqa", tmp_path_factory.mktemp("recalling")))
    with LLM(directory, **FIELDS, speculative_config=SUFFIX) as llm:
        yield llm


def num_steps(
    llm: LLM, prompt: list[int], params: SamplingParams, cache_salt: str | None = None
) -> tuple[list[int], int]:
    """The answer, and in how many steps it came."""

    async def run() -> RequestOutput:
        return [output async for output in llm.asynchronous().generate(prompt, params, cache_salt=cache_salt)][-1]

    before, output = llm.stats().num_steps, asyncio.run(run())
    return output.outputs[0].token_ids, llm.stats().num_steps - before


def test_an_answer_that_was_given_before_takes_fewer_steps(recalling):
    answer, first = num_steps(recalling, [5, 6], ANSWERS)
    again, second = num_steps(recalling, [5, 6], ANSWERS)
    assert again == answer
    assert second < 20 < 36 < first, "four tokens a step, but for the first ones"
    salted, third = num_steps(recalling, [7, 6], replace(ANSWERS, seed=4), cache_salt="mine")
    assert num_steps(recalling, [7, 6], replace(ANSWERS, seed=4)) == (salted, pytest.approx(third, abs=6))


def test_an_answer_that_was_predicted_takes_fewer_steps(recalling, tmp_path):
    directory = str(write_checkpoint("llama_gqa", tmp_path))
    params = replace(ANSWERS, seed=8)
    with LLM(directory, **FIELDS, speculative_config=SUFFIX | {"method": "ngram"}) as llm:
        answer, first = num_steps(llm, [5, 6], params)
        assert num_steps(llm, [5, 6], params)[1] == pytest.approx(first, abs=6)  # nothing is remembered of answers
        changed = [*answer[:20], 99, *answer[21:]]
        again, second = num_steps(llm, [5, 6], replace(params, predicted_token_ids=changed))
    assert again == answer
    assert second < 20 < 36 < first


def test_requests_that_recall_others_get_the_same_answers(recalling):
    dice = np.random.default_rng(5)
    prompts = [dice.choice([*FEW, 8, 9], dice.integers(1, 50)).tolist() for _ in range(40)]
    params = [random_params(dice) for _ in prompts]
    expected = None
    for _ in range(3):
        found = told(recalling.generate(prompts, params, use_tqdm=False))
        if expected is not None:
            assert_equal(found, expected)
        expected = found


@pytest.mark.slow
@pytest.mark.parametrize("source", ["ngram", "suffix", "draft_model"])
def test_a_thousand_answers_are_those_without_drafts(tmp_path, source):
    directory = str(write_checkpoint("llama_gqa", tmp_path))
    config: dict[str, Any] = {"method": source, "num_speculative_tokens": 3}
    config |= {"model": directory} if source == "draft_model" else {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    dice = np.random.default_rng(11)
    prompts = [dice.choice([*FEW, 8, 9], dice.integers(1, 50)).tolist() for _ in range(1000)]
    params = [random_params(dice) for _ in prompts]
    with LLM(directory, **FIELDS) as plain, LLM(directory, **FIELDS, speculative_config=config) as drafting:
        expected = told(plain.generate(prompts, params, use_tqdm=False))
        assert_equal(told(drafting.generate(prompts, params, use_tqdm=False)), expected)
        assert sum(drafting.stats().accepted_by_position) > 1000


@pytest.mark.slow
def test_at_temperature_one_every_answer_is_as_likely_as_the_model_says(tmp_path):
    """5,000 answers of four tokens, each one of three: 81 different ones, against their probabilities (chi-squared)."""
    directory = str(write_checkpoint("llama_gqa", tmp_path / "model"))
    draft = str(write_checkpoint("gpt2", tmp_path / "draft"))
    params = [
        SamplingParams(temperature=1, seed=seed, max_tokens=4, ignore_eos=True, allowed_token_ids=FEW)
        for seed in range(5000)
    ]
    config = {"model": draft, "num_speculative_tokens": 3}
    with LLM(directory, **FIELDS, speculative_config=config) as llm:
        outputs = llm.generate([[5, 9, 6]] * len(params), params, use_tqdm=False)
        assert llm.stats().num_draft_tokens > 5000
    found: dict[tuple[int, ...], int] = {}
    for output in outputs:
        answer = tuple(output.outputs[0].token_ids)
        found[answer] = found.get(answer, 0) + 1
    answers = list(itertools.product(FEW, repeat=4))
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    with LLM(directory, **FIELDS) as llm:
        scored = llm.generate([[5, 9, 6, *answer] for answer in answers], asked, use_tqdm=False)
    statistic = 0.0
    for answer, output in zip(answers, scored, strict=True):
        probability = 1.0
        for token, row in zip(answer, (output.prompt_logprobs or [])[3:], strict=True):
            shares = {i: math.exp(row[i].logprob) for i in FEW}
            probability *= shares[token] / sum(shares.values())
        expected = probability * len(params)
        statistic += (found.get(answer, 0) - expected) ** 2 / expected
    assert sum(found.values()) == len(params) and set(found) <= set(answers)
    assert statistic < 130, "80 degrees of freedom: one in three thousand is above"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_speculative_tokens": 0}, "it must be 1 or more"),
        ({"method": "ngram"}, "speculative_config.num_speculative_tokens is missing"),
        ({"method": "psychic", "num_speculative_tokens": 3}, "'ngram'"),
        ({"num_speculative_tokens": 3, "prompt_lookup_min": 4, "prompt_lookup_max": 2}, "prompt_lookup_min is 4"),
        (
            {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 4, 3], [4, 8, 1]]},
            r"holds \[4, 8, 1\]: accepted are",
        ),
        (
            {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 4, 5]]},
            "with 0 to num_speculative_tokens tokens",
        ),
        ({"num_speculative_tokens": 3, "draft_depth": 2}, "unknown setting 'speculative_config.draft_depth'"),
        ({"num_speculative_tokens": 8}, "num_speculative_tokens is 8: it must be less than block_size, which is 8"),
        ('{"num_speculative_tokens": 3', "JSON object"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(tmp_path, config, message):
    directory = str(write_checkpoint("llama_gqa", tmp_path))
    with pytest.raises(ConfigError, match=message) as error:
        LLM(directory, **FIELDS, speculative_config=config)
    assert "\n" not in str(error.value)
