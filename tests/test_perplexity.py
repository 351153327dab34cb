"""Quality on real weights: what each way of keeping them costs, on a text that comes with jaxllm."""

from __future__ import annotations

import functools
import math

import pytest

from jaxllm.cli.bench.perplexity import EXPANDED, STORED, TEXT, measure, scheme_config
from jaxllm.config import EngineConfig
from jaxllm.llm import LLM
from jaxllm.requests.sampling import SamplingParams
from tests.weights.models import real_model

TOKENS, WINDOW = 1500, 512

LIMITS = {
    STORED: 0.1, "q8_0": 0.5, "q6k": 1, "q5k": 2, "q4k": 4, "int8": 1, "w8a8": 2, "int4": 30, "fp8": 6,
}  # fmt: skip
"""Percent above the float model's: a wrong scale anywhere costs far more.

The file has four bits a weight already, so that other grids of four bits cost more than they would on its original.
"""


@functools.cache
def perplexity(scheme: str, kv_cache_dtype: str = "auto") -> float:
    real_model("smollm2-135m")
    config = scheme_config(EngineConfig(model="smollm2-135m", kv_cache_dtype=kv_cache_dtype), scheme, WINDOW)
    return measure(config, TEXT.read_text(encoding="utf-8"), WINDOW, TOKENS)["perplexity"]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", LIMITS)
def test_perplexity_stays_near_that_of_float_weights(scheme):
    assert abs(perplexity(scheme) / perplexity(EXPANDED) - 1) * 100 < LIMITS[scheme]


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_quantized_pages_cost_a_percent_at_most(kv_cache_dtype):
    assert abs(perplexity(EXPANDED, kv_cache_dtype) / perplexity(EXPANDED) - 1) < 0.01


@pytest.mark.slow
def test_the_float_model_reads_the_text_as_it_should():
    """A wrong tokenizer, position or scale would be in the hundreds."""
    assert 15 < perplexity(EXPANDED) < 35


LLAMA_CPP = {"smollm2-135m": 22.5563, "gemma3-270m": 21.1402}
"""What `llama-perplexity -c 512` of llama-cpp-python 0.3.36 says of the same files and text."""


@pytest.mark.slow
@pytest.mark.parametrize("model", LLAMA_CPP)
def test_packed_files_read_a_text_as_well_as_in_llama_cpp(model):
    """It scores the second half of each window, in whose place the first token is the one that begins texts."""
    real_model(model)
    config = scheme_config(EngineConfig(model=model), STORED, WINDOW)
    with LLM(**config.model_dump(exclude_unset=True)) as llm:
        tokenizer = llm.get_tokenizer()
        ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"))
        begin = [tokenizer.bos_token_id] if ids[0] == tokenizer.bos_token_id else []
        starts = range(0, len(ids) - WINDOW + 1, WINDOW)
        windows = [[*begin, *ids[start + len(begin) : start + WINDOW]] for start in starts]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = llm.generate(windows, params, use_tqdm=False)
    scores = [
        output.prompt_logprobs[at][window[at]].logprob
        for window, output in zip(windows, outputs, strict=True)
        for at in range(WINDOW // 2 + 1, WINDOW)
    ]
    assert math.exp(-sum(scores) / len(scores)) == pytest.approx(LLAMA_CPP[model], rel=0.005)
