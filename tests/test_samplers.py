"""DRY, top-n-sigma, typical sampling, XTC and repetition detection in whole engines: alone, together, with drafts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from tests.engine.features.test_chain import dry_penalties
from tests.reference.tiny import tiny_prompt, write_checkpoint
from tests.research.processors import by_hand
from tests.support.sizes import FIELDS, few_pages

COUNT = 24
FEW = [5, 6, 7, 8, 9, 10]
DRY = {"dry_multiplier": 3.0, "dry_base": 1.3, "dry_allowed_length": 1, "dry_sequence_breakers": []}
CHOICES: list[dict[str, Any]] = [
    DRY | {"temperature": 0},
    DRY | {"temperature": 0.7, "top_k": 20, "dry_penalty_last_n": 6},
    {"top_n_sigma": 1.0, "temperature": 1.3},
    {"typical_p": 0.7, "top_p": 0.9, "min_p": 0.02},
    {"xtc_probability": 0.5, "xtc_threshold": 0.01, "temperature": 0.8},
    DRY
    | {"xtc_probability": 0.5, "xtc_threshold": 0.02, "top_n_sigma": 2.0, "typical_p": 0.9, "presence_penalty": 1.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0},
]


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": COUNT, "ignore_eos": True, "seed": 4} | fields)


def tokens(llm: LLM, prompts: list[list[int]], chosen: list[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, chosen, use_tqdm=False)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama_gqa", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, **FIELDS) as llm:
        yield llm


@pytest.fixture(scope="module")
def case(llm: LLM) -> tuple[list[list[int]], list[SamplingParams], list[list[int]]]:
    """Prompts that repeat themselves, what is asked of each, and its answer alone."""
    dice = np.random.default_rng(6)
    prompts = [dice.choice(FEW[:3], dice.integers(4, 40)).tolist() for _ in CHOICES]
    asked = [params(**fields) for fields in CHOICES]
    return prompts, asked, [tokens(llm, [p], [q])[0] for p, q in zip(prompts, asked, strict=True)]


def test_dry_chooses_what_numpy_chooses(llm: LLM) -> None:
    """Of a text that would go round in circles; twice, so that the second time the prompt is found in the cache."""
    prompt = FEW[:3] * 9

    def then(logits: np.ndarray, text: list[int]) -> np.ndarray:
        found = logits.astype(np.float64)
        for token, penalty in dry_penalties(text, len(text), set(), DRY).items():
            found[token] -= penalty
        return found

    expected = by_hand(llm, prompt, COUNT, {}, then)
    assert expected != by_hand(llm, prompt, COUNT, {})
    for _ in range(2):
        assert tokens(llm, [prompt], [params(**DRY, temperature=0)]) == [expected]


def test_together_with_unlike_requests(llm: LLM, case: Any) -> None:
    prompts, asked, alone = case
    assert len({tuple(answer) for answer in alone}) == len(alone)
    assert tokens(llm, prompts, asked) == alone
    assert tokens(llm, prompts[::-1], asked[::-1]) == alone[::-1]


@pytest.mark.parametrize(
    "way",
    [
        {"decode_steps": 4},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    ],
    ids=["several tokens a step", "drafts"],
)
def test_several_tokens_a_step_and_drafts_change_no_token(path: Path, case: Any, way: dict[str, Any]) -> None:
    prompts, asked, alone = case
    with LLM(path, **FIELDS, **way) as other:
        assert tokens(other, prompts, asked) == alone
        if "speculative_config" in way:
            assert sum(other.stats().accepted_by_position) > 0


def test_preemption_changes_no_token(path: Path, case: Any) -> None:
    prompts, asked, alone = case
    with few_pages(20), LLM(path, **FIELDS) as other:
        assert tokens(other, prompts * 2, asked * 2) == alone * 2
        assert other.stats().num_preemptions > 0


def test_a_request_that_uses_none_runs_what_it_ran_before(path: Path) -> None:
    prompt = tiny_prompt("llama_gqa")[:20]
    with LLM(path, **FIELDS) as other:
        tokens(other, [prompt], [params(temperature=0.5, top_p=0.9)])
        executables = other._client()._loop._core._runner.device._executables  # type: ignore[union-attr]
        executables.wait()
        assert not any("chaining" in str(key) for key in executables._compiles)
        tokens(other, [prompt], [params(temperature=0.5, top_n_sigma=1.0)])
        assert any("chaining" in str(key) for key in executables._compiles)


def test_temperature_zero_takes_the_likeliest_token_whatever_is_cut_off(llm: LLM) -> None:
    prompt = tiny_prompt("llama_gqa")[:12]
    cuts = {"top_n_sigma": 0.1, "typical_p": 0.1, "xtc_probability": 1.0, "xtc_threshold": 0.0}
    plain, cut_off = params(temperature=0), params(temperature=0, **cuts)
    assert cut_off.greedy
    harmless = params(**cuts, **DRY, temperature=0, dry_penalty_last_n=0)
    first, *others = tokens(llm, [prompt] * 3, [plain, cut_off, harmless])
    assert others == [first, first]


@pytest.mark.parametrize("way", [{}, {"decode_steps": 4}], ids=["a token a step", "several"])
def test_an_answer_that_goes_round_in_circles_is_ended(path: Path, way: dict[str, Any]) -> None:
    """Of the same token again and again as many are told as the pattern takes, and not those that a step had more."""
    asked = {"max_pattern_size": 2, "min_pattern_size": 2, "min_count": 3}
    always, needs = {"allowed_token_ids": [6], "temperature": 0}, {"repetition_detection": asked}
    chosen = [
        params(**always, **needs), params(**always, **needs, min_tokens=9), params(**always),
        params(**always, **needs, max_tokens=6), params(**always, **needs, max_tokens=7),
    ]  # fmt: skip
    with LLM(path, **FIELDS, **way) as other:
        ended = [output.outputs[0] for output in other.generate([FEW] * 5, chosen, use_tqdm=False)]
    assert [(len(one.token_ids), one.finish_reason, one.stop_reason) for one in ended] == [
        (6, "repetition", "repetition_detected"), (9, "repetition", "repetition_detected"), (COUNT, "length", None),
        (6, "length", None), (6, "repetition", "repetition_detected"),
    ]  # fmt: skip
