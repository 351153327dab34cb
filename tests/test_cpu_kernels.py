"""The two real models on the C++ kernels: near what transformers says at float32, and of one mind with themselves."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams, cpu_kernels
from tests.reference import ModelGolden, load_model_goldens
from tests.support.real_models import SHAPES

pytestmark = pytest.mark.skipif(not cpu_kernels.available(), reason=cpu_kernels.reason() or "available")

Case = tuple[LLM, list[ModelGolden]]


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma3-270m"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    """The GGUF files as they are packed: Q4_1 and Q8_0."""
    with LLM(request.param, enable_prefix_caching=False, **SHAPES) as llm:
        yield llm, [g for g in load_model_goldens(request.param).values() if len(g.prompt_token_ids) < 400]


def test_prompts_are_as_likely_as_transformers_finds_them(case: Case) -> None:
    """Activations rounded to int8 and pages to bfloat16 move a token's log-probability by a few hundredths."""
    llm, goldens = case
    scored = [g for g in goldens if g.logprobs is not None]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([g.prompt_token_ids for g in scored], params, use_tqdm=False)
    errors = np.array([
        entry[token].logprob - expected
        for golden, output in zip(scored, outputs, strict=True)
        for token, entry, expected in zip(
            golden.prompt_token_ids[1:], output.prompt_logprobs[1:], golden.logprobs, strict=True
        )
    ])  # fmt: skip
    assert abs(errors.mean()) < 0.02 and np.abs(errors).mean() < 0.12 and np.abs(errors).max() < 1.5


def test_a_greedy_token_is_the_same_with_and_without_scores(case: Case) -> None:
    """Found by the kernel that keeps no scores, and by the one that does."""
    llm, goldens = case
    plain = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    scores = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=0)
    prompts = [golden.prompt_token_ids for golden in goldens[:8]]
    found = [[o.outputs[0].token_ids for o in llm.generate(prompts, p, use_tqdm=False)] for p in (plain, scores)]
    assert found[0] == found[1]
