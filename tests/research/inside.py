"""What engines show of themselves, for a process with several devices to show too.

JAX_NUM_CPU_DEVICES=2 python -m tests.research.inside OUT.npz
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import LLM, SamplingParams, Steer
from tests.reference.tiny import tiny_prompt, write_checkpoint
from tests.research.processors import PROCESSORS
from tests.support.sizes import FIELDS
from tests.support.tiny_engine import tiny_engine

MODELS = ("llama_mha8", "lfm2")
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def tokens_of(llm: LLM, prompts: list[list[int]], params: Any = GREEDY, **fields: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False, **fields)]


def shown(name: str, folder: Path, tp: int) -> dict[str, np.ndarray]:
    """Activations, logits, scores, and a derivative."""
    prompt = tiny_prompt(name)[:40]
    fields = FIELDS | {"logits_processors": PROCESSORS, "tensor_parallel_size": tp}
    with LLM(write_checkpoint(name, folder / name), **fields) as llm:
        wanted = {"residual": True, "attention_out": [0, 2], "mlp_out": 1, "keys": True, "values": True}
        (captures,) = llm.capture(prompt, wanted, use_tqdm=False)
        (rows,) = llm.logits(prompt, "last", use_tqdm=False)
        logits = rows[:]
        steer, params = Steer(1, np.ones(llm.info.hidden_size)), SamplingParams(temperature=0, max_tokens=4, logprobs=0)
        (output,) = llm.generate([prompt], params, use_tqdm=False, steer=steer)
        steered = [next(iter(step.values())).logprob for step in output.outputs[0].logprobs or ()]
        params = replace(params, max_tokens=9, logits_processors={"nudge": {"by": 9.0}, "fresh": {}, "stripes": {}})
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        processed = np.array(output.outputs[0].token_ids)
        patch = {(0, 7): np.zeros(llm.info.hidden_size), (1, 41): np.ones(llm.info.hidden_size)}
        (output,) = llm.generate([prompt], replace(params, logits_processors=[]), use_tqdm=False, patch=patch)
        patched = np.array(output.outputs[0].token_ids)
        attention = llm.attention(prompt[:12])
        (score,) = llm.score(prompt[:9], [prompt[9:30]], use_tqdm=False)

        def loss(params: dict[str, jax.Array]) -> jax.Array:
            found = jax.nn.log_softmax(llm.model_fn(params, prompt[:16]))
            return -found[jnp.arange(15), jnp.array(prompt[1:16])].mean()

        value, gradient = jax.jit(jax.value_and_grad(loss))(llm.params)
    found = {f"{point}.{layer}": array for point, layers in captures.items() for layer, array in layers.items()}
    vectors = {path: np.asarray(array) for path, array in gradient.items() if "norm" in path or "embed" in path}
    vectors["embed.weight"] = vectors["embed.weight"][: logits.shape[1]]
    return (
        found
        | vectors
        | {
            "logits": logits,
            "steered": np.array(steered),
            "processed": processed,
            "patched": patched,
            "weights": np.stack([found.weights for found in attention.values()]),
            "queries": np.stack([found.queries for found in attention.values()]),
            "keys": np.stack([found.keys for found in attention.values()]),
            "values": np.stack([found.values for found in attention.values()]),
            "score": score.logprobs,
            "loss": np.asarray(value),
        }
    )


def shared_keys(folder: Path, tp: int) -> dict[str, np.ndarray]:
    """Of a model with one KV head, which each device has."""
    name = "llama_mqa_tied"
    with tiny_engine(name, folder / name, tensor_parallel_size=tp) as llm:
        prompt = tiny_prompt(name)[:12]
        (captures,) = llm.capture(prompt, {"keys": 1, "values": 0}, use_tqdm=False)
        attention = llm.attention(prompt, 1)[1]
    return {"captured": captures["keys"][1], "values": captures["values"][0], "keys": attention.keys}


def main(out: str) -> None:
    arrays: dict[str, Any] = {"devices": len(jax.devices())}
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            arrays |= {f"{name}/{key}": array for key, array in shown(name, Path(folder), len(jax.devices())).items()}
        found = shared_keys(Path(folder), len(jax.devices()))
    np.savez(out, **arrays, **{f"shared/{key}": array for key, array in found.items()})


if __name__ == "__main__":
    main(sys.argv[1])
