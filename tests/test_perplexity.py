"""Quality on real weights: what each way of keeping them costs, on a text that comes with jaxllm."""

from __future__ import annotations

import functools
import math
from typing import Literal

import pytest

from jaxllm.cli.bench.comparing import EXPANDED, STORED, TEXT, measure, scheme_config
from jaxllm.config import EngineConfig
from jaxllm.llm import LLM
from jaxllm.requests.sampling import SamplingParams
from tests.weights.models import real_model

TOKENS, WINDOW = 2500, 512
"""As in the tables of benchmarks/results/quantization.md."""

LIMITS: dict[str, dict[str, float]] = {
    "smollm2-135m": {
        STORED: 0.5, "q8_0": 0.5, "q6k": 1, "q5k": 2, "q4k": 4, "int8": 1, "w8a8": 2, "int4": 30, "fp8": 6,
        "kv_int8": 1, "kv_fp8": 1,
    },
    "gemma3-270m": {STORED: 0.5, "q8_0": 0.5, "q6k": 1, "q4k": 4, "w8a8": 2, "fp8": 4, "kv_int8": 1, "kv_fp8": 1},
}  # fmt: skip
"""Percent above the float model's: a wrong scale anywhere costs far more.

The C++ kernels round inputs of packed weights to eight bits, so that even those of the file differ by 0.3.
The files have four or five bits a weight already, so that other grids cost more than they would on their originals.
"""
LIMITED = [(model, scheme) for model, limits in LIMITS.items() for scheme in limits]


@functools.cache
def perplexity(model: str, scheme: str, cpu_kernels: Literal["auto", "off"] = "auto") -> float:
    real_model(model)
    config = scheme_config(EngineConfig(model=model, cpu_kernels=cpu_kernels), scheme, WINDOW)
    return measure(config, TEXT.read_text(encoding="utf-8"), WINDOW, TOKENS)["perplexity"]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "scheme"), LIMITED)
def test_perplexity_stays_near_that_of_float_weights(model, scheme):
    assert abs(perplexity(model, scheme) / perplexity(model, EXPANDED) - 1) * 100 < LIMITS[model][scheme]


@pytest.mark.slow
@pytest.mark.parametrize("model", LIMITS)
def test_packed_weights_are_those_they_expand_to_where_no_input_is_rounded(model):
    packed, expanded = (perplexity(model, scheme, cpu_kernels="off") for scheme in (STORED, EXPANDED))
    assert packed == pytest.approx(expanded, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("model", LIMITS)
def test_the_float_model_reads_the_text_as_it_should(model):
    """A wrong tokenizer, position or scale would be in the hundreds."""
    assert 15 < perplexity(model, EXPANDED) < 35


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
