"""Random adapters as PEFT saves them, and the checkpoint that they make of a model when they are merged into it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

PREFIX = "base_model.model."


def write_adapter(
    folder: Path,
    model: Path,
    modules: Sequence[str],
    *,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    size: float = 0.3,
) -> Path:
    """An adapter for every matrix of the model whose name ends with one of `modules`, and then `.weight`."""
    dice = np.random.default_rng(seed)
    tensors = {}
    for name, weight in sorted(_weights(model).items()):
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and weight.ndim == 2 and module.endswith(tuple(modules)):
            outputs, inputs = weight.shape
            a = dice.standard_normal((rank, inputs)) * size / np.sqrt(inputs)
            b = dice.standard_normal((outputs, rank)) * size
            tensors[f"{PREFIX}{module}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"{PREFIX}{module}.lora_B.weight"] = b.astype(np.float32)
    assert tensors, f"the model has none of {modules}"
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(modules), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merge(folder: Path, model: Path, adapters: Sequence[tuple[Path, float]]) -> Path:
    """A copy of the model with `scale * alpha / r * B @ A` added for each of the adapters, in float64."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    weights = {name: weight.astype(np.float64) for name, weight in _weights(model).items()}
    for path, scale in adapters:
        config = json.loads((path / "adapter_config.json").read_text())
        tensors = load_file(path / "adapter_model.safetensors")
        for name, a in tensors.items():
            if ".lora_A." in name:
                b = tensors[name.replace(".lora_A.", ".lora_B.")]
                module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
                factor = scale * config["lora_alpha"] / config["r"]
                weights[f"{module}.weight"] += factor * b.astype(np.float64) @ a.astype(np.float64)
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    save_file({name: weight.astype(np.float32) for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


def _weights(model: Path) -> dict[str, np.ndarray]:
    return {name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()}
