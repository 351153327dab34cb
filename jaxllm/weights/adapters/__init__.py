"""LoRA adapters as PEFT and llama.cpp store them: small matrices that are added to those of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import CheckpointError, one_line
from jaxllm.weights.adapters.peft import SETTINGS_FILE, Adapter, LowRank, read_peft_adapter
from jaxllm.weights.fields import check_fields, real, shown
from jaxllm.weights.folder import NO_PICKLES, PICKLES, check_no_device
from jaxllm.weights.gguf_file import GGUFCheckpoint

__all__ = ["Adapter", "LowRank", "open_adapter"]

ALPHA = "adapter.lora.alpha"
EMBEDDING = "token_embd.weight"
INVOCATION = "adapter.alora.invocation_tokens"


def open_adapter(path: Path) -> Adapter:
    """Read a folder that PEFT saved (adapter_config.json, adapter_model.safetensors) or a GGUF adapter into memory.

    Raises CheckpointError if there is no adapter, it is corrupt, or it uses something that is not supported. The
    message names the file, the key or tensor, and what is accepted.
    """
    if path.suffix in PICKLES and path.is_file():
        raise CheckpointError(f"{one_line(path)}: {NO_PICKLES}")
    if path.suffix == ".gguf" and path.is_file():
        return _read_gguf(path)
    if path.is_dir():
        return read_peft_adapter(path)
    found = "is a file" if path.exists() else "does not exist"
    raise CheckpointError(
        f"{one_line(path)}: {found}; an adapter is a folder with {SETTINGS_FILE} and adapter_model.safetensors, or a "
        ".gguf file"
    )


def _read_gguf(path: Path) -> Adapter:
    check_no_device(path)
    file = GGUFCheckpoint(path)
    alpha = _alpha(path, file.config)
    tensors = {name: np.array(file.read(name).expand()) for name in file.tensors}
    updates, replaced = {}, {}
    for name, tensor in tensors.items():
        base, _, part = name.rpartition(".")
        if part == "lora_a":
            updates[base] = _low_rank(path, base, tensor, tensors.get(f"{base}.lora_b"), alpha)
        elif part == "lora_b":
            if f"{base}.lora_a" not in tensors:
                raise CheckpointError(f"{path}: tensor {shown(f'{base}.lora_a')} is missing")
        elif name.endswith("_norm.weight"):
            replaced[name] = tensor
        else:
            raise CheckpointError(
                f"{path}: tensor {shown(name)} is not known; accepted are NAME.lora_a, NAME.lora_b and norms"
            )
    if not updates and not replaced:
        raise CheckpointError(f"{path}: holds no tensors")
    base_model = file.config.get("general.base_model.0.name")
    return Adapter("gguf", path, updates, replaced, base_model if isinstance(base_model, str) else None)


def _alpha(path: Path, metadata: dict[str, Any]) -> float:
    """`adapter.lora.alpha`; with 0 the product of the matrices is added as it is."""
    for key, accepted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if metadata.get(key) != accepted:
            raise CheckpointError(f"{path}: {key} is {shown(metadata.get(key))}; accepted is {accepted!r}")
    if metadata.get(INVOCATION):
        raise CheckpointError(
            f"{path}: {INVOCATION} is set: an adapter that begins in the middle of a prompt is not supported"
        )
    check_fields(metadata, {ALPHA: real(-1e9, 1e9)}, f"{path}: ")
    return float(metadata.get(ALPHA, 0))


def _low_rank(path: Path, base: str, a: np.ndarray, b: np.ndarray | None, alpha: float) -> LowRank:
    """An embedding's A is stored transposed, so that a row of it is a token's."""
    if b is None:
        raise CheckpointError(f"{path}: tensor {shown(f'{base}.lora_b')} is missing")
    embedding = base == EMBEDDING
    a = a.T if embedding and a.ndim == 2 else a
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise CheckpointError(
            f"{path}: lora_a and lora_b of {shown(base)} are {a.shape} and {b.shape}; accepted are (rank, inputs) and "
            "(outputs, rank), of linear layers and of the embedding"
        )
    rank = a.shape[0]
    return LowRank(np.ascontiguousarray(a), b, alpha / rank if alpha else 1.0, transposed=embedding)
