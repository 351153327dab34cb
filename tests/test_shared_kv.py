"""Layers that attend to the keys and values of earlier ones, in an engine: prefixes are found, memory is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxllm import LLM, EngineConfig, SamplingParams
from jaxllm.engine.start.blueprint import plan_engine
from tests.reference import load_golden
from tests.reference.tiny import write_checkpoint
from tests.support.sizes import FIELDS

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return str(write_checkpoint("gemma4", tmp_path))


def test_a_prompt_and_its_prefix_continue_as_transformers_does(checkpoint: str) -> None:
    golden = load_golden("gemma4")
    with LLM(checkpoint, **FIELDS) as llm:
        for cached in (0, 56):
            (output,) = llm.generate([list(golden.prompt_token_ids)], GREEDY, use_tqdm=False)
            assert output.num_cached_tokens == cached
            assert output.outputs[0].token_ids == list(golden.greedy_token_ids)


def test_pages_are_those_of_the_layers_that_have_keys(checkpoint: str) -> None:
    plan = plan_engine(EngineConfig(model=checkpoint, **FIELDS))
    window, full = 2 * 16 * 4, 2 * 24 * 4  # keys and values of one head, in float32
    assert plan.kv_bytes_per_token == 2 * window + full, "the last two of five layers share"
