"""Answers of engines whose layers are in stages, for a process with several devices to give.

JAX_NUM_CPU_DEVICES=4 python -m tests.stages_over_devices OUT.npz FOLDER-OF-MODELS ["llama_gqa (2, 1)" …]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm import LLM, PoolingParams, SamplingParams, Steer
from jaxllm.engine.device.device import Device
from jaxllm.engine.device.keys import Key
from jaxllm.engine.device.packing import decode_packing
from jaxllm.errors import JaxLLMError
from jaxllm.requests.structured_outputs import StructuredOutputs
from tests.sizes import FIELDS, few_pages

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


def told(model: Path, every_kind: bool, stages: int = 1, tp: int = 1) -> dict[str, Any]:
    """What an engine says: tokens, their log-probabilities, those of prompts, and vectors; then the tokens again."""
    prompts, params = asked(every_kind)
    parallel = {"pipeline_parallel_size": stages, "tensor_parallel_size": tp}
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


def order_of_stages(llm: LLM) -> list[tuple[str, list[int]]]:
    """What the first of two stages is sent while four requests decode: kinds of steps, and the slots of each."""
    sent: list[tuple[str, list[int]]] = []
    run, nobody = Device.run, SIZES["max_num_seqs"]

    def noted(device: Device, key: Key, *vectors: Any) -> Any:
        if key.kind in ("took", "decode_layers"):
            slots = vectors[0] if key.kind == "took" else decode_packing(key.size).views(vectors[0])["slot"]
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
            found[f"{name} {layout}"] = told(Path(models) / name, (name, layout) == EVERY_KIND, *layout)
    with LLM(str(Path(models) / "llama_gqa"), **SIZES, pipeline_parallel_size=2) as llm:
        found |= {"order": order_of_stages(llm), "refused": refusals(llm)}
    np.savez(out, devices=len(jax.devices()), told=json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
