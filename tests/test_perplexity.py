"""Quality on real weights: what each way of keeping them costs, on a text that comes with jaxllm."""

from __future__ import annotations

import functools

import pytest

from jaxllm.cli.bench.perplexity import EXPANDED, STORED, TEXT, measure, scheme_config
from jaxllm.config import EngineConfig
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
