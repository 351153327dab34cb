"""Answers of engines whose layers are in stages, for a process with several devices to give.

JAX_NUM_CPU_DEVICES=4 python -m tests.stages_over_devices OUT.npz
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm import LLM, PoolingParams, SamplingParams
from jaxllm.engine.device.device import Device
from jaxllm.engine.device.keys import Key
from jaxllm.requests.structured_outputs import StructuredOutputs
from tests.serving.mixed_requests import write_model
from tests.sizes import FIELDS, few_pages

LAYOUTS: dict[str, list[tuple[int, int]]] = {
    "llama_gqa": [(2, 1), (3, 1), (2, 2)],
    "deepseek_v3": [(3, 1)],
    "qwen3_5": [(2, 1)],
    "gemma3_linear_rope": [(2, 1)],
}
"""Stages, and the devices of each: of plain attention; of a latent and experts; of states of sequences; of windows, and
of a table that is the head as well."""
SIZES = FIELDS | {"skip_tokenizer_init": False, "max_num_seqs": 6, "decode_buckets": (2,), "kv_cache_memory": "4MiB"}
FEW_PAGES = 24
REGEX = StructuredOutputs(regex=r"(ab|cd){2,6} [0-9]{4}")
ADJUSTED = {
    "temperature": 0.8, "presence_penalty": 0.6, "frequency_penalty": 0.3, "repetition_penalty": 1.2,
    "logit_bias": {4: 2.0}, "min_p": 0.01, "top_k": 40, "top_p": 0.95, "seed": 4, "logprobs": 1,
}  # fmt: skip


def asked() -> tuple[list[list[int]], list[SamplingParams]]:
    """More prompts than there are slots, of ragged lengths, some in several chunks, and requests of every kind."""
    dice = np.random.default_rng(3)
    prompts = [dice.integers(3, 140, count).tolist() for count in (1, 7, 40, 16, 71, 9, 33, 8, 12)]
    prompts.append([*prompts[2][:32], 5, 6])
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 3, "prompt_logprobs": 1},
        ADJUSTED,
        {"temperature": 1, "seed": 5, "structured_outputs": REGEX},
    ]
    ends = [{} if "structured_outputs" in kind else {"ignore_eos": True} for kind in kinds]
    fields = [kinds[index % 4] | ends[index % 4] for index in range(len(prompts))]
    return prompts, [SamplingParams(max_tokens=14, **one) for one in fields]


def told(llm: LLM) -> dict[str, Any]:
    """What an engine says: tokens, their log-probabilities, those of prompts, and vectors."""
    prompts, params = asked()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    again = llm.generate(prompts, params, use_tqdm=False)
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
    vectors = llm.pool(prompts[:3], PoolingParams(kind="mean"), use_tqdm=False)
    stats = llm.stats()
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


def order_of_stages(model: Path) -> list[str]:
    """What two stages are sent while four requests decode, in its order: the stage, and the kind of step."""
    sent: list[str] = []
    run, device_of = Device.run, {}

    def noted(device: Device, key: Key, *vectors: Any) -> Any:
        sent.append(f"{device_of.setdefault(id(device), len(device_of))} {key.kind}")
        return run(device, key, *vectors)

    with LLM(str(model), **SIZES, pipeline_parallel_size=2) as llm, pytest.MonkeyPatch.context() as patch:
        llm.generate([[3, 4]] * 4, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
        patch.setattr(Device, "run", noted)
        llm.generate([[3, 4]] * 4, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    return sent


def main(out: str) -> None:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, layouts in LAYOUTS.items():
            model = write_model(Path(folder) / name, name)
            for stages, tp in [(1, 1), *layouts]:
                parallel = {"pipeline_parallel_size": stages, "tensor_parallel_size": tp}
                with few_pages(FEW_PAGES), LLM(str(model), **SIZES, **parallel) as llm:
                    found[f"{name} {stages} {tp}"] = told(llm)
        found["order"] = order_of_stages(Path(folder) / "llama_gqa")
    np.savez(out, devices=len(jax.devices()), told=json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
