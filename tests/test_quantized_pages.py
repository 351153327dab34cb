"""`--kv-cache-dtype int8` and `fp8`, end to end: near what float pages give, and the same however a request is run."""

from __future__ import annotations

import httpx
import numpy as np
import pytest

from jaxllm import EngineConfig, SamplingParams, cpu_kernels
from jaxllm.engine.start.blueprint import plan_engine
from tests.reference.tiny import tiny_config, write_checkpoint
from tests.serving.real_server import served
from tests.support.sizes import few_pages
from tests.test_invariance import MODELS, start, tokens
from tests.weights.models import real_model

TYPICAL = {"int8": 0.05, "fp8": 0.1}
"""How far half of the log-probabilities may be from those over float pages; a token may meet other experts."""
PAGES = 17
"""The five requests fill 28; the longest ten."""
GREEDY = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}


def scores(output) -> np.ndarray:
    """Of each token of the prompt behind the first: its log-probability."""
    pairs = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[1:]
    return np.array([entry[token].logprob for token, entry in pairs])


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory):
    """A checkpoint, prompts at the edges of pages, and their scores over float pages."""
    directory = write_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, tiny_config(request.param)["vocab_size"], n).tolist() for n in (3, 8, 9, 40, 63)]
    with start(directory) as llm:
        outputs = llm.generate(prompts, SamplingParams(**GREEDY, prompt_logprobs=0), use_tqdm=False)
    return directory, prompts, [scores(output) for output in outputs]


@pytest.mark.parametrize("kind", TYPICAL)
def test_tokens_are_the_same_however_a_request_is_run(case, kind):
    """Alone, after a prefix hit, and together in small chunks over so few pages that some are preempted."""
    directory, prompts, over_floats = case
    scored, greedy = SamplingParams(**GREEDY, prompt_logprobs=0), SamplingParams(**GREEDY)
    with start(directory, kv_cache_dtype=kind) as llm:
        alone = [llm.generate([prompt], scored, use_tqdm=False)[0] for prompt in prompts]
        again = llm.generate(prompts, greedy, use_tqdm=False)
    found, expected = np.concatenate([scores(output) for output in alone]), np.concatenate(over_floats)
    assert 0 < np.median(np.abs(found - expected)) < TYPICAL[kind]
    assert tokens(again) == tokens(alone)
    assert [output.num_cached_tokens for output in again] == [(len(p) - 1) // 8 * 8 for p in prompts]

    with few_pages(PAGES + 1), start(directory, kv_cache_dtype=kind) as llm:
        together = llm.generate(prompts, greedy, use_tqdm=False)
        assert llm.stats().num_preemptions > 0
    assert tokens(together) == tokens(alone)


@pytest.mark.skipif(not cpu_kernels.available(), reason=cpu_kernels.reason() or "available")
@pytest.mark.parametrize("kind", TYPICAL)
def test_the_cpu_kernels_score_as_plain_xla_does(case, kind):
    """In bfloat16, which they serve: nearer to plain XLA over float pages than codes and that type round."""
    directory, prompts, over_floats = case
    settings = {"dtype": "bfloat16", "kv_cache_dtype": kind}
    params = SamplingParams(**GREEDY, prompt_logprobs=0)
    with start(directory, **settings) as llm:
        together = llm.generate(prompts, params, use_tqdm=False)
        again = llm.generate(prompts, SamplingParams(**GREEDY), use_tqdm=False)
    found, expected = np.concatenate([scores(output) for output in together]), np.concatenate(over_floats)
    assert 0 < np.median(np.abs(found - expected)) < TYPICAL[kind]
    assert [output.num_cached_tokens for output in again] == [(len(p) - 1) // 8 * 8 for p in prompts]


@pytest.mark.parametrize("kind", TYPICAL)
def test_a_token_takes_half_the_memory(kind):
    """Eight bits for sixteen, and a float32 scale for each of the heads, which have 64 numbers."""
    real_model("smollm2-135m")
    plain, small = (plan_engine(EngineConfig(model="smollm2-135m", kv_cache_dtype=dtype)) for dtype in ("auto", kind))
    assert small.kv_bytes_per_token == plain.kv_bytes_per_token * (64 + 4) / 128


def test_a_server_says_what_the_library_does(tmp_path):
    directory = write_checkpoint("llama_gqa", tmp_path)
    prompt = np.random.default_rng(6).integers(0, tiny_config("llama_gqa")["vocab_size"], 40).tolist()
    with start(directory, kv_cache_dtype="fp8") as llm:
        (expected,) = tokens(llm.generate([prompt], SamplingParams(**GREEDY), use_tqdm=False))
    body = {"model": str(directory), "prompt": prompt, "return_token_ids": True, **GREEDY}
    settings = {"dtype": "float32", "kv_cache_dtype": "fp8", "skip_tokenizer_init": True, "max_model_len": 128}
    with served(str(directory), **settings) as url:
        answers = [httpx.post(f"{url}/v1/completions", json=body, timeout=60).json() for _ in range(2)]
    assert [answer["choices"][0]["token_ids"] for answer in answers] == [expected] * 2
