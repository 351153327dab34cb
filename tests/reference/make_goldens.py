"""Compute goldens/NAME.npz of every model of tiny.py with transformers; needs torch (see README.md).

python -m tests.reference.make_goldens [NAME ...]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.reference import GOLDENS
from tests.reference.tiny import TINY_MODELS, tiny_prompt, tiny_weights, write_checkpoint

NEW_TOKENS = 16
SMALLEST_GAP = 1e-3  # between the two best logits of a greedy step, so that rounding cannot change the golden


def make(name: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(name, Path(directory))
        model, loading = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not loading[problem], f"{name}: {problem} {loading[problem]}"
    assert {*model.state_dict()} - {"lm_head.weight"} == {*tiny_weights(name)} - {"lm_head.weight"}, name

    ids = tiny_prompt(name)
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0]
        exact = model.double()(torch.tensor([ids])).logits[0]
        model.float()
        greedy, smallest_gap = [], np.inf
        for _ in range(NEW_TOKENS):
            best = model(torch.tensor([ids + greedy]), use_cache=False).logits[0, -1].topk(2)
            smallest_gap = min(smallest_gap, float(best.values[0] - best.values[1]))
            greedy.append(int(best.indices[0]))
    rounding = float((logits - exact).abs().max())
    print(
        f"{name}: largest logit {logits.abs().max():.2f}, float32 against float64 {rounding:.1e}, "
        f"smallest greedy gap {smallest_gap:.1e}"
    )
    assert smallest_gap > SMALLEST_GAP, f"{name}: a greedy step is nearly tied ({smallest_gap}); change the seed"

    np.savez_compressed(
        GOLDENS / f"{name}.npz",
        prompt_token_ids=np.asarray(ids, np.int32),
        logits=logits.numpy(),
        greedy_token_ids=np.asarray(greedy, np.int32),
        weights_norm=np.sqrt(sum(np.square(w, dtype=np.float64).sum() for w in tiny_weights(name).values())),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=TINY_MODELS, default=TINY_MODELS, metavar="NAME")
    GOLDENS.mkdir(exist_ok=True)
    for name in parser.parse_args().names:
        make(name)
