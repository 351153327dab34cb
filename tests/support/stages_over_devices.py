"""Answers of engines whose layers are in stages, for a process with several devices to give.

JAX_NUM_CPU_DEVICES=4 python -m tests.support.stages_over_devices OUT.npz FOLDER-OF-MODELS ["llama_gqa (2, 1)" …]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams, Steer
from jaxllm.engine.core.device import Device
from jaxllm.engine.core.keys import Key
from jaxllm.errors import JaxLLMError
from tests.support.parallel_answers import SIZES, told

LAYOUTS: dict[str, list[tuple[int, int]]] = {
    "llama_gqa": [(2, 1), (2, 2)],
    "deepseek_v3": [(3, 1)],
    "qwen3_5": [(2, 1)],
    "gemma3_linear_rope": [(2, 1)],
}
"""Stages, and the devices of each: of plain attention; of a latent and experts; of states of sequences; of windows, and
of a table that is the head as well."""
EVERY_KIND = ("llama_gqa", (2, 1))
"""Where requests ask for all that there is: each kind is one more step to compile."""


def order_of_stages(llm: LLM) -> list[tuple[str, list[int]]]:
    """What the first of two stages is sent while four requests decode: kinds of steps, and the slots of each."""
    sent: list[tuple[str, list[int]]] = []
    run, nobody = Device.run, SIZES["max_num_seqs"]
    core: Any = llm._client()
    sizes = core._loop._core.sizes

    def noted(device: Device, key: Key, *vectors: Any) -> Any:
        decodes = key.kind == "layers" and "decode" in key.variant
        if key.kind == "took" or decodes:
            packing = device.features.packing(Key("decode", key.size), sizes)
            slots = vectors[0] if key.kind == "took" else packing.views(vectors[0])["slot"]
            sent.append((key.kind, sorted({*slots.tolist()} - {nobody})))
        return run(device, key, *vectors)

    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Device, "run", noted)
        llm.generate([[3, 4]] * 4, params, use_tqdm=False)
    return sent


def refusals(llm: LLM) -> dict[str, str]:
    """What an engine says to those who would look inside its model, or exchange it."""
    asked: dict[str, Any] = {
        "capture": lambda: llm.capture([[3, 4]], {"residual": 1}, use_tqdm=False),
        "steer": lambda: llm.generate([[3, 4]], steer=Steer(0, np.ones(64)), use_tqdm=False),
        "patch": lambda: llm.generate([[3, 4]], patch={(0, 0): np.ones(64)}, use_tqdm=False),
        "params": lambda: llm.params,
        "update_weights": lambda: llm.update_weights(llm.info.model_name),
    }
    said = {}
    for name, ask in asked.items():
        with pytest.raises(JaxLLMError) as refused:
            ask()
        said[name] = str(refused.value)
    return said


def main(out: str, models: str, *names: str) -> None:
    """`names` are those of models with layouts, as `str` has the pair; all without any."""
    found: dict[str, Any] = {}
    for name, layouts in LAYOUTS.items():
        for layout in layouts:
            if names and f"{name} {layout}" not in names:
                continue
            stages, tp = layout
            parallel = {"pipeline_parallel_size": stages, "tensor_parallel_size": tp}
            found[f"{name} {layout}"] = told(Path(models) / name, (name, layout) == EVERY_KIND, **parallel)
    with LLM(str(Path(models) / "llama_gqa"), **SIZES, pipeline_parallel_size=2) as llm:
        found |= {"order": order_of_stages(llm), "refused": refusals(llm)}
    np.savez(out, devices=len(jax.devices()), told=json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
