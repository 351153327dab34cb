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
from PIL import Image
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedModel

from tests.reference.oracle import load_oracle
from tests.reference.tiny import draw_weights, save_checkpoint, tiny_config
from tests.reference.tiny_configs import VISION
from tests.reference.vision import GOLDENS, PREPARATIONS, images, rows_first

TEXT_LENGTH = 16
RESIZE = Image.Image.resize
NEW_TOKENS = 6


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
    if name in PREPARATIONS:
        found |= with_images(name, model, rng)
    print(name, len(shapes), float(logits.abs().max()), *(f"{key} {value.shape}" for key, value in found.items()))
    np.savez_compressed(GOLDENS / f"{name}.npz", tensor_shapes=json.dumps(shapes), **found)


def with_images(name: str, model: PreTrainedModel, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Rows of two images, a prompt with them between texts, its logits, and the tokens that follow greedily."""
    kind, settings = PREPARATIONS[name]
    Image.Image.resize = rows_first(RESIZE)
    prepared = getattr(transformers, kind)(**settings)
    given = images()
    inputs = dict(prepared(images=[given] if "smolvlm" in name or "idefics" in name else given, return_tensors="pt"))
    counts = [int(n) for n in inputs.pop("num_soft_tokens_per_image", [])]
    tiles = inputs.pop("num_patches", None)
    config, dtype = model.config, torch.float32
    inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    features = {key: value for key, value in inputs.items() if key != "pixel_attention_mask" or "pil" not in name}
    with torch.inference_mode():
        output = model.model.get_image_features(**features, return_dict=True)
        rows = output.pooler_output
        parts = [part.reshape(-1, part.shape[-1]) for part in (rows if isinstance(rows, list | tuple) else [rows])]
        rows = torch.cat(parts)
        deep = getattr(output, "deepstack_features", None)
        if deep:
            deep = [torch.cat(list(layer)) if isinstance(layer, list | tuple) else layer for layer in deep]
            rows = torch.cat([rows, *deep], dim=-1)
    if not counts and len(parts) == 2:
        counts = [len(part) for part in parts]
    if not counts:  # tiles of one size
        shares = tile_counts(name, inputs, tiles, prepared, given)
        counts = [len(rows) * share // sum(shares) for share in shares]
    image = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    words = [rng.integers(11, 120, n).tolist() for n in (4, 3, 5)]
    around = ([122], [123]) if "qwen" in name else ([], [])
    ids = [*words[0], *around[0], *[image] * counts[0], *around[1], *words[1], *around[0], *[image] * counts[1]]
    ids += [*around[1], *words[2]]
    greedy: list[int] = []
    logits = None
    for _ in range(NEW_TOKENS + 1):
        every = torch.tensor([ids + greedy])
        types = (every == image).long()
        more = {"mm_token_type_ids": types} if config.model_type.startswith(("qwen", "gemma4")) else {}
        more |= {"token_type_ids": types} if config.model_type == "gemma3" else {}
        with torch.inference_mode():
            found = model(every, **inputs, **more, use_cache=False).logits[0]
        logits = found if logits is None else logits
        greedy.append(int(found[-1].argmax()))
    return dict(
        token_ids=np.asarray(ids, np.int32), logits=logits.numpy(), rows=rows.numpy(),
        greedy=np.asarray(greedy[:NEW_TOKENS], np.int32), image=np.asarray(image), counts=np.asarray(counts),
    )  # fmt: skip


def tile_counts(name: str, inputs: dict, tiles: object, prepared: object, given: list) -> list[int]:
    if tiles is not None:
        return [int(n) for n in tiles]
    if "smolvlm" in name or "idefics" in name:
        return [prepared(images=[[image]], return_tensors="np")["pixel_values"].shape[1] for image in given]
    return [1] * len(given)


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
