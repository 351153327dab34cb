"""Storms of preemption: far more requests than the pages hold, each of which is put back and computed anew, often."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from tests.reference.tiny import write_checkpoint
from tests.support.sizes import few_pages


def differing(model: str, requests: int, pages: int, longest: int, output: int) -> list[int]:
    """Which requests give other tokens together, over so few pages, than each gives alone."""
    fields = {
        "dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "enable_prefix_caching": False,
        "max_model_len": 128, "max_num_batched_tokens": 256, "max_num_seqs": requests, "block_size": 8,
        "kv_cache_memory": 2**28, "decode_buckets": (), "prefill_buckets": (),
    }  # fmt: skip
    dice = np.random.default_rng(17)
    prompts = [dice.integers(3, 60, dice.integers(3, longest)).tolist() for _ in range(requests)]
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    with LLM(model, **fields) as llm:
        alone = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
        assert llm.stats().num_preemptions == 0
    with few_pages(pages + 1), LLM(model, **fields) as llm:
        together = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.stats()
    assert stats.num_preemptions >= 16 and stats.num_free_pages == stats.num_pages
    pairs = zip(alone, together, strict=True)
    return [at for at, (a, b) in enumerate(pairs) if a.outputs[0].token_ids != b.outputs[0].token_ids]


def test_a_storm_changes_no_token(tmp_path: Path) -> None:
    assert differing(str(write_checkpoint("llama_gqa", tmp_path)), requests=24, pages=24, longest=9, output=28) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_storm_over_181_pages_changes_no_token_of_a_real_model() -> None:
    assert differing("smollm2-135m", requests=48, pages=181, longest=40, output=32) == []
