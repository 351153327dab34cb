"""What log-probabilities are of, of which tokens, and prompts that the prefix cache is not read for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, BeamSearchParams, InvalidRequestError, SamplingParams
from tests.reference.tiny import write_checkpoint
from tests.support.sizes import FIELDS

PROMPT = list(range(5, 30))
BIAS = {3: 4.0, 11: -2.0}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(write_checkpoint("llama_gqa", tmp_path_factory.mktemp("llama")), **FIELDS) as llm:
        yield llm


def first_step(llm: LLM, **params: Any) -> dict[int, float]:
    given = {"max_tokens": 1, "detokenize": False, "logprobs": 20, "logit_bias": BIAS, "seed": 1} | params
    [output] = llm.generate([PROMPT], SamplingParams(**given), use_tqdm=False)
    return {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x - x.max()).sum()) - x.max()


def chosen_by(logits: np.ndarray, temperature: float, top_k: int) -> np.ndarray:
    """The logits of what is sampled from."""
    changed = logits.copy()
    for token, bias in BIAS.items():
        changed[token] += bias
    if temperature == 0:
        return changed
    changed /= temperature
    return np.where(changed >= np.sort(changed)[-top_k], changed, -np.inf)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def test_each_mode_gives_what_it_says(llm: LLM, mode: str, temperature: float) -> None:
    logits = llm.logits([PROMPT], use_tqdm=False)[0][-1].astype(np.float64)
    values = chosen_by(logits, temperature, 5) if mode.startswith("processed") else logits
    values = log_softmax(values) if mode.endswith("logprobs") else values
    found = first_step(llm, logprobs_mode=mode, temperature=temperature, top_k=5)
    assert len(found) in ((5,) if np.isinf(values).any() else (20, 21))
    for token, value in found.items():
        assert value == pytest.approx(values[token], abs=1e-4)
    assert sorted(found.values())[-1] == pytest.approx(values.max(), abs=1e-4)


def test_requests_of_every_mode_share_a_step(llm: LLM) -> None:
    modes = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
    params = {"temperature": 0.7, "top_k": 5, "seed": 1, "max_tokens": 1, "logprobs": 20, "logit_bias": BIAS}
    asked = [SamplingParams(**params, logprobs_mode=mode, detokenize=False) for mode in modes]
    together = llm.generate([PROMPT] * 4, asked, use_tqdm=False)
    for mode, output in zip(modes, together, strict=True):
        found = {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}
        assert found == pytest.approx(first_step(llm, logprobs_mode=mode, temperature=0.7, top_k=5), abs=1e-5)


def test_the_engines_setting_is_the_default_and_beams_are_searched_by_raw_ones(llm: LLM, tmp_path: Any) -> None:
    search = BeamSearchParams(beam_width=2, max_tokens=3)
    with LLM(write_checkpoint("llama_gqa", tmp_path), **FIELDS, logprobs_mode="processed_logits") as other:
        expected = first_step(llm, logprobs_mode="processed_logits", temperature=0.7)
        assert first_step(other, temperature=0.7) == pytest.approx(expected, abs=1e-5)
        raw = first_step(llm, temperature=0.7)
        assert first_step(other, logprobs_mode="raw_logprobs", temperature=0.7) == pytest.approx(raw, abs=1e-5)
        beams = [one.beam_search([PROMPT], search)[0].outputs[0].token_ids for one in (llm, other)]
        assert beams[0] == beams[1]


def test_a_whole_vocabulary_is_raw(tmp_path: Any) -> None:
    with LLM(write_checkpoint("llama_gqa", tmp_path), **FIELDS, max_logprobs=-1) as llm:
        whole = first_step(llm, logprobs=-1)
        assert len(whole) == llm.info.vocab_size
        with pytest.raises(InvalidRequestError, match="logprobs_mode is 'raw_logits'; it must be 'raw_logprobs' with"):
            first_step(llm, logprobs=-1, logprobs_mode="raw_logits")


@pytest.mark.parametrize("count", [None, 0, 3])
def test_tokens_that_are_asked_for_come_at_each_token_of_the_prompt(llm: LLM, count: int | None) -> None:
    asked = (7, PROMPT[3], 90)
    params = {"max_tokens": 1, "detokenize": False}
    wanted = SamplingParams(**params, prompt_logprobs=count, prompt_logprob_token_ids=asked)
    plain = SamplingParams(**params, prompt_logprobs=count or 0)
    found, whole, likely = (
        output.prompt_logprobs
        for output in llm.generate(
            [PROMPT] * 3, [wanted, SamplingParams(**params, prompt_logprobs=-1), plain], use_tqdm=False
        )
    )
    assert found[0] is None and len(found) == len(PROMPT)
    for step, every, top in zip(found[1:], whole[1:], likely[1:], strict=True):
        assert list(step) == list(dict.fromkeys([*top, *asked]))
        for token, entry in step.items():
            assert entry.logprob == pytest.approx(every[token].logprob, abs=1e-5)
            assert entry.rank == (top[token].rank if token in top else None)


def test_a_prompt_may_be_computed_anew(llm: LLM) -> None:
    def cached(**params: Any) -> int:
        asked = SamplingParams(max_tokens=1, detokenize=False, **params)
        return llm.generate([PROMPT], asked, use_tqdm=False)[0].num_cached_tokens

    llm.reset_prefix_cache()
    assert cached(skip_reading_prefix_cache=True) == 0
    assert cached() > 0  # it was written all the same
    assert cached(skip_reading_prefix_cache=True) == 0


def test_vllms_name_of_the_thinking_budget() -> None:
    assert SamplingParams(thinking_token_budget=7) == SamplingParams(max_thinking_tokens=7)
    assert SamplingParams(thinking_token_budget=-1) == SamplingParams()
    with pytest.raises(InvalidRequestError, match=r"max_thinking_tokens is 3; it must be thinking_token_budget \(7\)"):
        SamplingParams(thinking_token_budget=7, max_thinking_tokens=3)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"logprobs_mode": "logits"}, "logprobs_mode is 'logits'; it must be one of raw_logprobs, processed_logprobs"),
        ({"prompt_logprobs": 19, "prompt_logprob_token_ids": [1, 2]}, "prompt_logprobs is 19; it must be at most 18"),
        ({"prompt_logprob_token_ids": range(21)}, "prompt_logprob_token_ids is '21 ids'; it must be at most 20"),
        ({"prompt_logprob_token_ids": [10**6]}, "prompt_logprob_token_ids has token id 1000000"),
        ({"skip_reading_prefix_cache": 1}, "skip_reading_prefix_cache is 1; it must be True or False"),
    ],
)
def test_what_cannot_be_given_is_refused_by_name(llm: LLM, params: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        llm.generate([PROMPT], SamplingParams(max_tokens=1, **params), use_tqdm=False)
    assert said in str(error.value)
