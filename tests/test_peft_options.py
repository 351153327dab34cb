"""PEFT's options at run time: a request with an adapter gets PEFT's own logits, or the option is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm import LLM, InvalidRequestError, LoRARequest, SamplingParams
from tests.reference.peft_adapters import ADAPTERS, load_adapter_golden, write_adapter
from tests.reference.tiny import write_checkpoint
from tests.support.sizes import FIELDS as SIZES

TOLERANCE = 2e-4
MERGED_ONLY = {
    "head": "it replaces 'lm_head.weight', which is supported only where the adapter is merged",
    "embedding_and_head": r"it adds to '(model\.embed_tokens|lm_head)\.weight', which is supported only where",
    "tied_head": "it replaces 'lm_head.weight', which",
    "tied_embedding": r"it adds to 'model\.embed_tokens\.weight', which is supported only where",
    "gemma3_norms": r"it replaces 'model\.layers\.0\..*norm\.weight', which is supported only where",
}
"""Adapters of what is no product with the weights of a layer."""


MOST = 20
"""Log-probabilities that a request may ask for at each token."""
FIELDS: dict[str, Any] = SIZES | {"max_model_len": 96, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


def likeliest(llm: LLM, ids: list[int], lora: LoRARequest | None) -> list[dict[int, float]]:
    """After each of `ids` but the last, the log-probabilities of the likeliest tokens and of the one that follows."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=MOST)
    (output,) = llm.generate([ids], params, use_tqdm=False, lora_request=lora)
    steps = (output.prompt_logprobs or [])[1:]
    assert len(steps) == len(ids) - 1
    return [{token: logprob.logprob for token, logprob in (step or {}).items()} for step in steps]


def furthest(found: list[dict[int, float]], expected: np.ndarray) -> float:
    return max(
        abs(value - row[token]) for row, step in zip(expected, found, strict=True) for token, value in step.items()
    )


@pytest.mark.parametrize("name", [name for name in ADAPTERS if name not in MERGED_ONLY])
def test_a_request_gets_what_peft_says(name: str, tmp_path: Path) -> None:
    base, golden = write_checkpoint(ADAPTERS[name].base, tmp_path / "base"), load_adapter_golden(name)
    adapter, ids = write_adapter(name, tmp_path / "adapter"), golden.prompt_token_ids
    expected = np.asarray(jax.nn.log_softmax(golden.logits))[:-1]
    with LLM(str(base), **FIELDS) as llm:
        plain, found = (likeliest(llm, ids, lora) for lora in (None, LoRARequest(name, 1, adapter)))
    assert all(len(step) >= MOST for step in found)
    assert furthest(found, expected) < TOLERANCE
    assert furthest(plain, expected) > 10 * TOLERANCE


@pytest.mark.parametrize("name", MERGED_ONLY)
def test_what_is_merged_only_says_so(name: str, tmp_path: Path) -> None:
    base, golden = write_checkpoint(ADAPTERS[name].base, tmp_path / "base"), load_adapter_golden(name)
    adapter = write_adapter(name, tmp_path / "adapter")
    with (
        LLM(str(base), **FIELDS) as llm,
        pytest.raises(InvalidRequestError, match=MERGED_ONLY[name]),
    ):
        llm.generate([golden.prompt_token_ids], use_tqdm=False, lora_request=LoRARequest(name, 1, adapter))
