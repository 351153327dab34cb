"""Logits of packed checkpoints over several devices, in a process of its own: their number is fixed at start-up.

JAX_NUM_CPU_DEVICES=4 NPROC=16 python -m tests.models.run_packed OUT.npz PATH:TP: PATH:TP:ep …
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np

from jaxllm.models.registry import model_spec
from jaxllm.weights import open_checkpoint
from jaxllm.weights.kinds import KindChooser
from tests.models.harness import Chunk, Harness
from tests.models.packed_models import prompt


def main(out: str, *cases: str) -> None:
    logits, ids = {"devices": np.array(jax.device_count())}, prompt()
    for case in cases:
        path, tp, ep = case.split(":")
        checkpoint = open_checkpoint(Path(path))
        kinds = KindChooser(checkpoint, model_spec(checkpoint).names, int(tp))
        model = Harness(Path(path), tp=int(tp), expert_parallel=bool(ep), kinds=kinds)
        (logits[case],) = model.run([ids], [Chunk(0, 0, len(ids))])
    np.savez(out, **logits)


if __name__ == "__main__":
    main(*sys.argv[1:])
