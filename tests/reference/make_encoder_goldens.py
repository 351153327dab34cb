"""Compute goldens/NAME.npz of the encoders of tiny.py with transformers; needs torch (see README.md).

python -m tests.reference.make_encoder_goldens [NAME ...]
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from pathlib import Path

import numpy as np

from tests.reference import GOLDENS
from tests.reference.make_goldens import LARGEST_ROUNDING, LEAST_CHANGE, difference, tensor_shapes
from tests.reference.oracle import encoder_output, load_oracle
from tests.reference.tiny import draw_weights, save_checkpoint, tiny_config, tiny_prompt
from tests.reference.tiny_configs import ENCODERS
from tests.reference.tiny_configs.variant import merged

COLUMNS = ("model", "T", "shape", "largest", "rounding", "least change")


def make(name: str) -> None:
    config, ids = tiny_config(name), tiny_prompt(name)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        shapes = tensor_shapes(name, directory / "saved")
        weights = draw_weights(name, shapes)
        model = load_oracle(name, save_checkpoint(config, weights, directory / "tiny"))
        exact = encoder_output(copy.deepcopy(model).double(), ids)
        output = encoder_output(model, ids)
        rounding, moved = difference(exact, output), {}
        for number, change in enumerate(ENCODERS[name].unlike):
            path = save_checkpoint(merged(config, change), weights, directory / str(number))
            moved[json.dumps(change)] = difference(encoder_output(load_oracle(name, path), ids), output)
    least = min(moved.values(), default=np.inf)
    print(name, len(ids), tuple(output.shape), f"{float(output.abs().max()):.2g} {rounding:.2g} {least:.2g}")
    assert rounding < LARGEST_ROUNDING, f"{name}: float32 is {rounding} from float64"
    assert least > LEAST_CHANGE, f"{name}: {moved}"
    np.savez_compressed(
        GOLDENS / f"{name}.npz",
        prompt_token_ids=np.asarray(ids, np.int32),
        logits=output.numpy(),
        greedy_token_ids=np.zeros(0, np.int32),
        weights_norm=np.sqrt(sum(np.square(w, dtype=np.float64).sum() for w in weights.values())),
        tensor_shapes=json.dumps(shapes),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"by default all: {', '.join(ENCODERS)}")
    print(*COLUMNS)
    for name in parser.parse_args().names or ENCODERS:
        make(name)
