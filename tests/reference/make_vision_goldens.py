"""Compute goldens/vision/NAME.npz of every model with a tower for images; needs torch (see README.md).

python -m tests.reference.make_vision_goldens [NAME ...]
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import safe_open
from transformers import AutoConfig

from tests.reference.oracle import load_oracle
from tests.reference.tiny import draw_weights, save_checkpoint, tiny_config
from tests.reference.tiny_configs import VISION
from tests.reference.vision import GOLDENS

TEXT_LENGTH = 16


def make(name: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        shapes = tensor_shapes(name, Path(scratch) / "saved")
        weights = draw_weights(name, shapes)
        model = load_oracle(name, save_checkpoint(tiny_config(name), weights, Path(scratch) / "tiny"))
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    words = rng.integers(11, 120, TEXT_LENGTH).tolist()
    with torch.inference_mode():
        logits = model(torch.tensor([words]), use_cache=False).logits[0]
    found = dict(text_token_ids=np.asarray(words, np.int32), text_logits=logits.numpy())
    print(name, len(shapes), float(logits.abs().max()))
    np.savez_compressed(GOLDENS / f"{name}.npz", tensor_shapes=json.dumps(shapes), **found)


def tensor_shapes(name: str, directory: Path) -> dict[str, tuple[int, ...]]:
    """What transformers writes for a model of this config, by the names that published files have."""
    save_checkpoint(tiny_config(name), {}, directory)
    config = AutoConfig.from_pretrained(directory)
    getattr(transformers, tiny_config(name)["architectures"][0])(config).save_pretrained(directory)
    shapes = {}
    with safe_open(directory / "model.safetensors", "np") as file:
        for tensor in sorted(file.keys()):
            shape = tuple(file.get_slice(tensor).get_shape())
            for pattern, replacement in VISION[name].renamed:
                tensor = re.sub(pattern, replacement, tensor)
            shapes[tensor] = shape
    return shapes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    GOLDENS.mkdir(exist_ok=True)
    for name in parser.parse_args().names or VISION:
        make(name)
