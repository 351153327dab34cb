"""Compute goldens/NAME.npz of every model of tiny.py with transformers; needs torch (see README.md).

python -m tests.reference.make_goldens [NAME ...]
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import safe_open
from transformers import AutoConfig, DynamicCache, PreTrainedModel

from tests.reference import GOLDENS, load_golden
from tests.reference.oracle import load_oracle, oracle_logits
from tests.reference.routing import routing_gap
from tests.reference.tiny import ONE_ADDED, draw_weights, save_checkpoint, tiny_config, tiny_prompt
from tests.reference.tiny_configs import CLASSIFIERS, ENCODERS, VARIANTS
from tests.reference.tiny_configs.variant import merged

ALL = VARIANTS | CLASSIFIERS
NEW_TOKENS = 16
SMALLEST_GAP = 1e-3  # between the two best logits of a greedy step, so that rounding cannot change the golden
SMALLEST_ROUTING_GAP = 3e-4  # between the worst chosen score and the best other one, likewise
LARGEST_ROUNDING = 5e-5
LEAST_CHANGE = 6e-4  # three times what the parity tests tolerate

COLUMNS = ("model", "T", "V", "tensors", "|logit|", "rounding", "cached", "greedy gap", "routing gap", "least change")


def make(name: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        shapes = tensor_shapes(name, directory / "saved")
        weights = draw_weights(name, shapes)
        save_checkpoint(tiny_config(name), weights, directory / "tiny")
        model = load_oracle(name, directory / "tiny")
        ids = tiny_prompt(name)
        exact = oracle_logits(copy.deepcopy(model).double(), ids)
        logits = oracle_logits(model, ids)
        changes = config_changes(name, weights, ids, logits, directory) | dropped_vectors(model, ids, logits, name)

    generates = name in VARIANTS
    greedy, greedy_gap = decode_greedily(model, ids) if generates else ([], None)
    gap = routing_gap(model, ids + greedy) if generates else None
    cached_too = generates and not ALL[name].one_shot_only
    cached = difference(cached_logits(model, ids), logits) if cached_too else None
    rounding = difference(exact, logits)
    least = min(changes, key=lambda change: changes[change])
    row = (name, len(ids), logits.shape[1], len(shapes), float(logits.abs().max()), rounding, cached, greedy_gap, gap)
    print(*(f"{value:.2g}" if isinstance(value, float) else value for value in row), f"{changes[least]:.2g} {least}")

    assert rounding < LARGEST_ROUNDING, f"{name}: float32 is {rounding} from float64"
    assert cached is None or cached < LARGEST_ROUNDING, f"{name}: decoding through the cache is {cached} away"
    assert greedy_gap is None or greedy_gap > SMALLEST_GAP, (
        f"{name}: a greedy step is nearly tied ({greedy_gap}); change the seed"
    )
    assert gap is None or gap > SMALLEST_ROUTING_GAP, f"{name}: a routing is nearly tied ({gap}); change the seed"
    assert changes[least] > LEAST_CHANGE, f"{name}: {least} hardly shows ({changes[least]})"

    np.savez_compressed(
        GOLDENS / f"{name}.npz",
        prompt_token_ids=np.asarray(ids, np.int32),
        logits=logits.numpy(),
        greedy_token_ids=np.asarray(greedy, np.int32),
        weights_norm=np.sqrt(sum(np.square(w, dtype=np.float64).sum() for w in weights.values())),
        tensor_shapes=json.dumps(shapes),
    )


def tensor_shapes(name: str, directory: Path) -> dict[str, tuple[int, ...]]:
    """What transformers writes for a model of this config, in the stored order, for weights are drawn in it."""
    save_checkpoint(merged(tiny_config(name), (ALL | ENCODERS)[name].saved_as), {}, directory)
    config = AutoConfig.from_pretrained(directory)
    model_class = getattr(transformers, config.architectures[0], None)
    model = model_class(config) if model_class else transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)
    shapes = {}
    with safe_open(directory / "model.safetensors", "np") as file:
        saved = file.keys()
        for tensor in saved:
            shape = tuple(file.get_slice(tensor).get_shape())
            for pattern, replacement in (ALL | ENCODERS)[name].renamed:
                tensor = re.sub(pattern, replacement, tensor)
            shapes[tensor] = shape
    stored = load_golden(name).tensor_shapes if (GOLDENS / f"{name}.npz").exists() else {}
    return stored if stored == shapes else shapes


def config_changes(
    name: str, weights: dict[str, np.ndarray], ids: list[int], logits: torch.Tensor, directory: Path
) -> dict[str, float]:
    """How far each change of `Variant.unlike` moves the logits."""
    moved = {}
    for number, change in enumerate(ALL[name].unlike):
        path = save_checkpoint(merged(tiny_config(name), change), weights, directory / str(number))
        moved[json.dumps(change)] = difference(oracle_logits(load_oracle(name, path), ids), logits)
    return moved


def dropped_vectors(model: PreTrainedModel, ids: list[int], logits: torch.Tensor, name: str) -> dict[str, float]:
    """How far the logits move when all norm weights or biases of one kind are as if they were not there."""
    kinds: dict[str, list[torch.Tensor]] = {}
    for tensor, value in [*model.named_parameters(), *model.named_buffers()]:
        is_vector = value.ndim == 1 or tensor.endswith("_proj_bias")  # of each expert
        if name in ("opt", "biogpt") and tensor.endswith("k_proj.bias"):
            continue  # which adds the same to all logits of a query where nothing rotates the keys
        if is_vector and not re.search("vision_tower|visual|multi_modal_projector|inv_freq|embed_scale", tensor):
            kinds.setdefault(re.sub(r"\d+", "*", tensor), []).append(value)
    moved = {}
    one_added = tiny_config(name)["model_type"].removesuffix("_text") in ONE_ADDED
    for kind, values in kinds.items():
        kept = [value.data.clone() for value in values]
        for value in values:
            is_factor = "norm" in kind and kind.endswith("weight") and (not one_added or "linear_attn" in kind)
            value.data.fill_(1.0 if is_factor else 0.0)
        moved[f"without {kind}"] = difference(oracle_logits(model, ids), logits)
        for value, old in zip(values, kept, strict=True):
            value.data.copy_(old)
    return moved


@torch.inference_mode()
def cached_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """`[T, V]`, token by token through transformers' own cache."""
    cache = DynamicCache(config=model.config.get_text_config())
    return torch.cat([model(torch.tensor([[token]]), cache=cache).logits[0] for token in ids])


def decode_greedily(model: PreTrainedModel, ids: list[int]) -> tuple[list[int], float]:
    """The tokens that follow, each from a pass over everything before it, and the smallest lead of a best logit."""
    greedy: list[int] = []
    smallest_gap = np.inf
    for _ in range(NEW_TOKENS):
        best = oracle_logits(model, ids + greedy)[-1].topk(2)
        smallest_gap = min(smallest_gap, float(best.values[0] - best.values[1]))
        greedy.append(int(best.indices[0]))
    return greedy, smallest_gap


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*ALL], default=[*ALL], metavar="NAME")
    GOLDENS.mkdir(exist_ok=True)
    print(*COLUMNS)
    for name in parser.parse_args().names:
        make(name)
