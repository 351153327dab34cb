"""Compute goldens/adapters/NAME.npz of every adapter of peft_adapters.py with PEFT; needs torch too (see README.md).

python -m tests.reference.make_adapter_goldens [NAME ...]
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import safe_open
from transformers import PreTrainedModel

from tests.reference.make_goldens import LARGEST_ROUNDING, LEAST_CHANGE, difference
from tests.reference.oracle import load_oracle, oracle_logits
from tests.reference.peft_adapters import ADAPTER_GOLDENS, ADAPTERS, adapter_prompt, draw_adapter, save_adapter
from tests.reference.tiny import write_checkpoint

COLUMNS = ("adapter", "T", "V", "tensors", "|logit|", "rounding", "without it", "least change")


def make(name: str) -> None:
    case, ids = ADAPTERS[name], adapter_prompt(name)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        base = write_checkpoint(case.base, folder / "base")
        settings, shapes = saved_by_peft(case.base, base, case.options, folder / "saved")
        tensors = draw_adapter(name, shapes)

        def with_adapter(changes: dict[str, Any]) -> PeftModel:
            adapter = save_adapter(settings | changes, tensors, folder / json.dumps(changes).replace("/", "_"))
            return loaded(load_oracle(case.base, base), adapter, tensors)

        model = with_adapter({})
        exact = oracle_logits(copy.deepcopy(model).double(), ids)
        logits = oracle_logits(model, ids)
        with model.disable_adapter():
            moved = {"without it": difference(oracle_logits(model, ids), logits)}
        moved |= {
            json.dumps(change): difference(oracle_logits(with_adapter(change), ids), logits) for change in case.unlike
        }
    rounding, least = difference(exact, logits), min(moved, key=lambda change: moved[change])
    row = (len(ids), logits.shape[1], len(shapes), float(logits.abs().max()), rounding, moved["without it"])
    print(name, *(f"{value:.2g}" for value in row), f"{moved[least]:.2g} {least}")
    assert rounding < LARGEST_ROUNDING, f"{name}: float32 is {rounding} from float64"
    assert moved[least] > LEAST_CHANGE, f"{name}: {least} hardly shows ({moved[least]})"
    ADAPTER_GOLDENS.mkdir(exist_ok=True)
    np.savez_compressed(
        ADAPTER_GOLDENS / f"{name}.npz",
        logits=logits.numpy(),
        settings=json.dumps(settings, sort_keys=True),
        tensor_shapes=json.dumps(shapes),
    )


def saved_by_peft(
    base: str, checkpoint: Path, options: dict[str, Any], folder: Path
) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """adapter_config.json, and the names and shapes of the tensors, as `save_pretrained` writes them."""
    config = LoraConfig(task_type="CAUSAL_LM", **options)
    get_peft_model(load_oracle(base, checkpoint), config).save_pretrained(folder)
    settings = json.loads((folder / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = base
    for key in ("target_modules", "exclude_modules", "modules_to_save"):
        settings[key] = sorted(value) if isinstance(value := settings.get(key), list) else value
    with safe_open(folder / "adapter_model.safetensors", "np") as file:
        return settings, {name: tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())}


def loaded(model: PreTrainedModel, adapter: Path, tensors: dict[str, np.ndarray]) -> PeftModel:
    """The model with the adapter, every tensor of which has found its place."""
    with_it = PeftModel.from_pretrained(model, adapter).eval()
    held = get_peft_model_state_dict(with_it)
    assert held.keys() == tensors.keys(), held.keys() ^ tensors.keys()
    for name, value in tensors.items():
        assert np.array_equal(held[name].numpy(), value), name
    return with_it


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"by default all: {', '.join(ADAPTERS)}")
    print(*COLUMNS)
    for name in parser.parse_args().names or ADAPTERS:
        make(name)
