"""Answers of engines with adapters, for a process with several devices to give too.

JAX_NUM_CPU_DEVICES=2 python -m tests.support.adapters_over_devices OUT.npz
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm import LLM, LoRARequest, SamplingParams
from tests.reference.adapters import write_adapter
from tests.reference.tiny import write_checkpoint

DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MODELS = {"llama_gqa": DENSE, "qwen2": ("q_proj", "v_proj"), "phi3": ("qkv_proj", "o_proj", "gate_up_proj")}
"""Tiny models, one of which has a bias and another fused projections, and what their adapters add to."""

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=4)


def prompts(count: int = 4) -> list[list[int]]:
    dice = np.random.default_rng(count)
    return [dice.integers(1, 90, size=int(dice.integers(1, 40))).tolist() for _ in range(count)]


def answers(name: str, folder: Path, tp: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and their log-probabilities, of requests with one adapter, another, both and none."""
    model = write_checkpoint(name, folder / name)
    first = write_adapter(folder / "first", model, MODELS[name], rank=8, alpha=16, seed=1)
    second = write_adapter(folder / "second", model, MODELS[name][:1], rank=3, alpha=3, seed=2)
    one, other = LoRARequest("one", 1, first), LoRARequest("other", 2, second, -1.5)
    fields: dict[str, Any] = {
        "dtype": "float32", "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 128,
        "max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory": "64MiB", "tensor_parallel_size": tp,
        "enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "decode_buckets": (), "prefill_buckets": (),
    }  # fmt: skip
    with LLM(str(model), **fields) as llm:
        choices = [one, other, [one, other], None]
        found = [o.outputs[0] for o in llm.generate(prompts(), GREEDY, use_tqdm=False, lora_request=choices)]
    logprobs = [[s[t].logprob for t, s in zip(o.token_ids, o.logprobs or (), strict=True)] for o in found]
    return np.array([output.token_ids for output in found]), np.array(logprobs)


def main(out: str) -> None:
    arrays: dict[str, Any] = {"devices": len(jax.devices())}
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            found = answers(name, Path(folder) / name, len(jax.devices()))
            arrays |= dict(zip((f"{name}.tokens", f"{name}.logprobs"), found, strict=True))
    np.savez(out, **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
