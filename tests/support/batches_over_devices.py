"""Answers of engines whose batches run side by side, for a process with several devices to give.

JAX_NUM_CPU_DEVICES=4 python -m tests.support.batches_over_devices OUT.npz FOLDER-OF-MODELS ["deepseek_v3 (2, 2)" …]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm import LLM, PoolingParams, SamplingParams, Steer
from tests.support.parallel_answers import SIZES, told

LAYOUTS: dict[str, list[tuple[int, int]]] = {"deepseek_v3": [(2, 2), (4, 1)], "qwen3_5": [(2, 1)]}
"""Batches, and the devices of each: of a latent and experts, which all devices share; of states of sequences."""
EVERY_KIND = ("deepseek_v3", (2, 2))
"""Where requests ask for all that there is: each kind is one more step to compile."""


def parallel(batches: int, tp: int, experts: bool) -> dict[str, Any]:
    return {
        "data_parallel_size": batches, "enable_dp_attention": True, "tensor_parallel_size": tp,
        "enable_expert_parallel": experts,
    }  # fmt: skip


def seen_inside(model: Path, **parts: Any) -> dict[str, Any]:
    """What those see who look inside a model, change it, or exchange its weights, for some of its requests."""
    prompts = [[3, 4, 5, 6, 7], [9, 8, 7], [20, 21, 22, 23], [3, 4, 5, 6, 7, 8]]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    with LLM(str(model), **SIZES, **parts) as llm:

        def said(**asked: Any) -> list[list[int]]:
            outputs = llm.generate(prompts, params, use_tqdm=False, **asked)
            return [output.outputs[0].token_ids for output in outputs]

        ones = np.ones(llm.info.hidden_size)
        captures = llm.capture(prompts, {"residual": 1}, use_tqdm=False)
        found = {
            "plain": said(),
            "steered": said(steer=[Steer(0, 2 * ones), None, Steer(0, 2 * ones), None]),
            "patched": said(patch=[{(0, 0): ones}, None, None, None]),
            "captured": [np.asarray(one["residual"][1]).tolist() for one in captures],
            "pooled": [
                np.asarray(one.values).tolist() for one in llm.pool(prompts, PoolingParams(kind="mean"), use_tqdm=False)
            ],
        }
        llm.update_weights(str(model))
        return found | {"exchanged": said()}


def main(out: str, models: str, *names: str) -> None:
    """`names` are those of models with layouts, as `str` has the pair; all without any."""
    found: dict[str, Any] = {}
    for name, layouts in LAYOUTS.items():
        for layout in layouts:
            if not names or f"{name} {layout}" in names:
                parts = parallel(*layout, experts=name == EVERY_KIND[0])
                found[f"{name} {layout}"] = told(Path(models) / name, (name, layout) == EVERY_KIND, **parts)
    inside = seen_inside(Path(models) / EVERY_KIND[0], **parallel(2, 1, experts=True))
    np.savez(out, devices=len(jax.devices()), told=json.dumps(found), inside=json.dumps(inside))


if __name__ == "__main__":
    main(*sys.argv[1:])
