"""Logits of tiny models over several devices, in a process of its own: the number of devices is fixed at start-up.

JAX_NUM_CPU_DEVICES=8 NPROC=16 python -m tests.models.run_sharded OUT.npz CHECKPOINTS NAME:TP NAME:TP:ep NAME:TP:q4_0 …
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np

from jaxllm.models.registry import model_spec
from jaxllm.quantization.schemes import SCHEMES
from jaxllm.weights import open_checkpoint
from jaxllm.weights.kinds import KindChooser
from tests.models.encoder_harness import EncoderHarness
from tests.models.harness import Chunk, Harness
from tests.reference import load_golden
from tests.reference.tiny import tiny_config, write_checkpoint
from tests.reference.tiny_configs import ENCODERS
from tests.reference.tiny_configs.encoders import SECOND_TEXT

DECODES = 4


def main(out: str, checkpoints: str, *cases: str) -> None:
    logits = {"devices": np.array(jax.device_count())}
    for case in cases:
        name, tp, *options = case.split(":")
        path = write_checkpoint(name, Path(checkpoints) / name)
        checkpoint = open_checkpoint(path)
        scheme = next((option for option in options if option in SCHEMES), None)
        kinds = KindChooser(checkpoint, model_spec(checkpoint).names, int(tp), isq=scheme)
        if name in ENCODERS:
            logits[case] = encoded(name, EncoderHarness(path, tp=int(tp), kinds=kinds))
            continue
        model = Harness(path, tp=int(tp), expert_parallel="ep" in options, kinds=kinds)
        ids = load_golden(name).prompt_token_ids
        cut, last = 21, len(ids) - DECODES
        parts = [model.run([ids], [Chunk(0, a, b)])[0] for a, b in ((0, cut), (cut, last))]
        parts += [model.run([ids], [Chunk(0, at, at + 1)])[0] for at in range(last, len(ids))]
        logits[case] = np.concatenate(parts)
    np.savez(out, **logits)


def encoded(name: str, model: EncoderHarness) -> np.ndarray:
    """As its golden: hidden states, or the scores of classes."""
    second = SECOND_TEXT if tiny_config(name).get("type_vocab_size", 0) > 1 else 0
    (found,) = model.run([load_golden(name).prompt_token_ids], [second])
    return found[0] if model.config.num_labels else found


if __name__ == "__main__":
    main(*sys.argv[1:])
