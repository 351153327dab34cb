"""Log-probabilities over the wire at float32, where they are what transformers computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import openai
import pytest

from jaxllm import AsyncLLM
from tests.reference import load_model_goldens
from tests.support.real_models import SHAPES

pytestmark = pytest.mark.programs

MODEL = "smollm2-135m"


@pytest.fixture(scope="module")
def real_engine() -> Iterator[AsyncLLM]:
    engine = AsyncLLM(model=MODEL, dtype="float32", **SHAPES)
    yield engine
    engine.shutdown()


@pytest.fixture
def client(listen: Callable[..., str], real_engine: AsyncLLM) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{listen(real_engine, model=MODEL)}/v1", api_key="none", max_retries=0, timeout=120)


def test_scoring_as_lm_eval_does_equals_the_reference(client: openai.OpenAI) -> None:
    """Echo, logprobs 1, max_tokens 1, token-id prompts: transformers' log-probabilities to 1e-3."""
    goldens = [golden for golden in load_model_goldens(MODEL).values() if golden.logprobs is not None]
    completion = client.completions.create(
        model=MODEL, prompt=[g.prompt_token_ids for g in goldens], max_tokens=1, temperature=0, logprobs=1, echo=True,
        seed=1234,
    )  # fmt: skip
    assert len(completion.choices) == len(goldens)
    for golden, choice in zip(goldens, sorted(completion.choices, key=lambda c: c.index), strict=True):
        assert choice.logprobs and choice.logprobs.token_logprobs and choice.logprobs.top_logprobs
        ours = choice.logprobs.token_logprobs[1:-1]
        assert golden.logprobs is not None and golden.top_logprobs is not None
        np.testing.assert_allclose(np.array(ours, float), golden.logprobs, atol=1e-3)
        best = [max(top.values()) for top in choice.logprobs.top_logprobs[1:-1]]
        np.testing.assert_allclose(best, golden.top_logprobs[:-1, 0], atol=1e-3)


def test_logprobs_agree_with_greedy_choice_and_echo(client: openai.OpenAI) -> None:
    made = client.completions.create(model=MODEL, prompt="The sky is", temperature=0, max_tokens=6, logprobs=2)
    logprobs: Any = made.choices[0].logprobs
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert logprob == max(top.values()) and top[token] == logprob
    scored = client.completions.create(
        model=MODEL, prompt="The sky is" + made.choices[0].text, max_tokens=1, echo=True, logprobs=0
    )
    echoed: Any = scored.choices[0].logprobs
    start = echoed.text_offset.index(len("The sky is"))
    assert echoed.tokens[start:-1] == logprobs.tokens
    assert echoed.token_logprobs[start:-1] == pytest.approx(logprobs.token_logprobs, abs=1e-3)
    assert echoed.token_logprobs[0] is None
