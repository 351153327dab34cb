"""What engines say whose devices share the work, to be compared with what one device says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxllm import LLM, PoolingParams, SamplingParams
from jaxllm.requests.structured_outputs import StructuredOutputs
from tests.support.sizes import FIELDS, few_pages

SIZES = FIELDS | {"skip_tokenizer_init": False}
FEW_PAGES = {"qwen3_5": 32}
"""20 of others: requests are preempted, and yet some prefixes are still there; a state is kept of fewer."""
REGEX = StructuredOutputs(regex=r"(ab|cd){2,6} [0-9]{4}")
ADJUSTED = {
    "temperature": 0.8, "presence_penalty": 0.6, "frequency_penalty": 0.3, "repetition_penalty": 1.2,
    "logit_bias": {4: 2.0}, "min_p": 0.01, "top_k": 40, "top_p": 0.95, "seed": 4, "logprobs": 1,
}  # fmt: skip
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3, "prompt_logprobs": 1},
    ADJUSTED,
    {"temperature": 1, "seed": 5, "structured_outputs": REGEX},
]


def asked(every_kind: bool) -> tuple[list[list[int]], list[SamplingParams]]:
    """More prompts than there are slots, of ragged lengths, some in several chunks, and requests for them."""
    dice = np.random.default_rng(3)
    prompts = [dice.integers(3, 140, count).tolist() for count in (1, 7, 40, 16, 71, 9, 33, 8, 12)]
    prompts.append([*prompts[2][:32], 5, 6])
    kinds = KINDS if every_kind else KINDS[:1]
    fields = [kinds[index % len(kinds)] for index in range(len(prompts))]
    ends = [{} if "structured_outputs" in one else {"ignore_eos": True} for one in fields]
    return prompts, [SamplingParams(max_tokens=14, **one, **end) for one, end in zip(fields, ends, strict=True)]


def told(model: Path, every_kind: bool, **parallel: Any) -> dict[str, Any]:
    """What an engine says: tokens, their log-probabilities, those of prompts, and vectors; then the tokens again.

    `parallel` says how its devices share the work.
    """
    prompts, params = asked(every_kind)
    with few_pages(FEW_PAGES.get(model.name, 20)), LLM(str(model), **SIZES, **parallel) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        again = llm.generate(prompts, params, use_tqdm=False)
        vectors = llm.pool(prompts[:3], PoolingParams(kind="mean"), use_tqdm=False)
        stats = llm.stats()
    first = [output.outputs[0] for output in outputs]
    scored = [
        [found[token].logprob for token, found in zip(one.token_ids, one.logprobs, strict=True)]
        for one in first
        if one.logprobs
    ]
    prompt_scores = [
        [found[token].logprob for token, found in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
        for prompt, output in zip(prompts, outputs, strict=True)
        if output.prompt_logprobs
    ]
    return {
        "tokens": [one.token_ids for one in first],
        "again": [output.outputs[0].token_ids for output in again],
        "cached": sum(output.num_cached_tokens for output in again),
        "logprobs": scored,
        "prompt_logprobs": prompt_scores,
        "vectors": [np.asarray(vector.values).tolist() for vector in vectors],
        "preemptions": stats.num_preemptions,
        "left": stats.num_pages - stats.num_free_pages,
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any], near: float, preempts: bool = True) -> None:
    """Numbers may differ by `near`, tokens not at all; if it `preempts`, requests were; prefixes were found."""
    for numbers in ("logprobs", "prompt_logprobs", "vectors"):
        for one, other in zip(expected[numbers], found[numbers], strict=True):
            np.testing.assert_allclose(other, one, rtol=near, atol=near)
    assert (found["tokens"], found["again"]) == (expected["tokens"], expected["again"])
    assert found["preemptions"] > 0 or not preempts
    assert found["cached"] > 0 and found["left"] == 0
    assert len({tuple(tokens) for tokens in found["tokens"]}) == len(found["tokens"])
