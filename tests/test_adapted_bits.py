"""With the C++ kernels a request gets the same bits whatever adapters its neighbours have, and in any step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxllm import LLM, LoRARequest, RequestOutput, SamplingParams
from tests.cpu_kernels.weights import needs_kernels

pytestmark = needs_kernels

LAYERS = 30
SHAPES = {
    "self_attn.q_proj": (576, 576), "self_attn.v_proj": (192, 576), "self_attn.o_proj": (576, 576),
    "mlp.gate_proj": (1536, 576), "mlp.down_proj": (576, 1536),
}  # fmt: skip
"""Of SmolLM2's matrices, outputs and inputs."""
PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=10, ignore_eos=True, logprobs=3)
TEXTS = ["The capital of France is", "def add(a, b):", "Once upon a time there was a", "2 + 2 ="]


class Given(NamedTuple):
    llm: LLM
    adapters: list[LoRARequest]


def random_adapter(rank: int, seed: int) -> dict[str, np.ndarray]:
    dice, tensors = np.random.default_rng(seed), {}
    for layer in range(LAYERS):
        for module, (outputs, inputs) in SHAPES.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = (dice.normal(size=(rank, inputs)) / np.sqrt(inputs)).astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = (0.1 * dice.normal(size=(outputs, rank))).astype(np.float32)
    return tensors


@pytest.fixture(scope="module")
def given() -> Iterator[Given]:
    fields: dict[str, Any] = {
        "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_memory": "64MiB",
        "decode_buckets": (8,), "prefill_buckets": (64,), "enforce_eager": True, "enable_lora": True, "max_loras": 3,
    }  # fmt: skip
    with LLM("smollm2-135m", **fields) as llm:
        yield Given(
            llm,
            [
                llm.add_lora(f"of rank {rank}", random_adapter(rank, rank), {"r": rank, "lora_alpha": rank})
                for rank in (4, 16)
            ],
        )


def told(outputs: list[RequestOutput]) -> list[Any]:
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


def test_neighbours_with_adapters_change_no_bit(given):
    llm, (small, large) = given
    choices = [None, small, large, [small, large]]
    together = told(llm.generate(TEXTS, PARAMS, use_tqdm=False, lora_request=choices))
    alone = [
        told(llm.generate([text], PARAMS, use_tqdm=False, lora_request=[choice]))[0]
        for text, choice in zip(TEXTS, choices, strict=True)
    ]
    assert together == alone
    assert (
        len({str(answer) for answer in told(llm.generate(TEXTS[:1] * 4, PARAMS, use_tqdm=False, lora_request=choices))})
        == 4
    )


def test_a_cached_prefix_changes_no_bit(given):
    llm, (small, _) = given
    long = " ".join(TEXTS * 4)
    first, second = (llm.generate([long], PARAMS, use_tqdm=False, lora_request=small)[0] for _ in range(2))
    assert first.num_cached_tokens == 0 and second.num_cached_tokens > 32
    assert told([first]) == told([second])
