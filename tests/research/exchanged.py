"""What engines say after their weights were exchanged, for a process with several devices to say too.

JAX_NUM_CPU_DEVICES=2 python -m tests.research.exchanged OUT.npz
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

from jaxllm import LLM
from tests.reference.tiny import tiny_prompt, tiny_weights
from tests.support.tiny_engine import tiny_engine

MODELS = ("llama_mha8", "lfm2")


def shown(folder: Path, tp: int) -> dict[str, np.ndarray]:
    """Logits before and after an exchange by the checkpoint's names, and after one back by `params`."""
    found = {}
    for name in MODELS:
        prompt = tiny_prompt(name)[:40]
        rng = np.random.default_rng(11)
        new = {
            key: array * (1 + 0.3 * rng.standard_normal(array.shape)).astype(np.float32)
            for key, array in tiny_weights(name).items()
        }
        with tiny_engine(name, folder / name, tensor_parallel_size=tp) as llm:

            def logits(llm: LLM = llm, prompt: list[int] = prompt) -> np.ndarray:
                (rows,) = llm.logits(prompt, "last", use_tqdm=False)
                return rows[:]

            found[f"{name}/old"], params = logits(), {path: np.array(array) for path, array in llm.params.items()}
            llm.update_weights(new)
            found[f"{name}/new"] = logits()
            llm.update_weights(params)
            found[f"{name}/back"] = logits()
        np.testing.assert_array_equal(found[f"{name}/back"], found[f"{name}/old"])
        assert np.abs(found[f"{name}/new"] - found[f"{name}/old"]).max() > 0.1
    return found


def main(out: str) -> None:
    count = len(jax.devices())
    with tempfile.TemporaryDirectory() as folder:
        arrays = shown(Path(folder), count)
    np.savez(out, devices=count, **arrays)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(sys.argv[1])
