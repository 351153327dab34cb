"""Rotary embeddings that depend on the length: the engine gives what a prompt of that length would, at every token."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from tests.models.harness import Chunk, Harness
from tests.reference.tiny import tiny_config, write_checkpoint
from tests.support.sizes import FIELDS

NAME = "phi3_longrope_long"
ORIGINAL = tiny_config(NAME)["original_max_position_embeddings"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(NAME, tmp_path_factory.mktemp(NAME))


@pytest.fixture(scope="module")
def oracle(checkpoint) -> Harness:
    return Harness(checkpoint)


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(str(checkpoint), **FIELDS | {"max_model_len": 96}) as engine:
        yield engine


def greedy(oracle: Harness, prompt: list[int], count: int) -> list[int]:
    """Every token from a fresh pass over all before it, rotated for the length they have by then."""
    ids = list(prompt)
    for _ in range(count):
        (logits,) = oracle.run([ids], [Chunk(0, 0, len(ids))])
        ids.append(int(logits[-1].argmax()))
    return ids[len(prompt) :]


def generate(llm: LLM, prompts: list[list[int]], count: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_a_sequence_that_outgrows_the_original_length(llm, oracle):
    """Prompts that end before, at and behind the bound, together; each crosses it or began behind it."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(100, size=n).tolist() for n in (ORIGINAL - 9, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1)]
    assert generate(llm, prompts, 20) == [greedy(oracle, prompt, 20) for prompt in prompts]


def test_pages_are_not_shared_across_the_bound(llm, oracle):
    """A long prompt does not take the pages of a short one it begins with; another long one takes its pages."""
    rng = np.random.default_rng(4)
    long = rng.integers(100, size=ORIGINAL + 20).tolist()
    short = long[: ORIGINAL - 4]
    for prompt in (short, long, short, long):
        assert generate(llm, [prompt], 3) == [greedy(oracle, prompt, 3)]
    params = SamplingParams(temperature=0, max_tokens=1)
    (output,) = llm.generate([{"prompt_token_ids": long}], params, use_tqdm=False)
    assert output.num_cached_tokens >= ORIGINAL
