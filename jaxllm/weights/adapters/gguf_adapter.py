"""A GGUF adapter file, as llama.cpp's convert_lora_to_gguf.py writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.quantization.gguf_blocks import dequantize
from jaxllm.quantization.stored import FLOATS
from jaxllm.weights.adapters.adapter import Adapter, LowRank
from jaxllm.weights.fields import check_fields, real, shown
from jaxllm.weights.folder import check_no_device
from jaxllm.weights.gguf_file import GGUFHeader, read_header

ALPHA = "adapter.lora.alpha"
EMBEDDING = "token_embd.weight"
INVOCATION = "adapter.alora.invocation_tokens"


def read_gguf_adapter(path: Path) -> Adapter:
    """Read and check a file. Raises CheckpointError as `open_adapter`."""
    check_no_device(path)
    header = read_header(path)
    alpha = _alpha(path, header.metadata)
    tensors = _tensors(path, header)
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
    base_model = header.metadata.get("general.base_model.0.name")
    return Adapter("gguf", path, updates, replaced, base_model if isinstance(base_model, str) else None)


def _alpha(path: Path, metadata: dict[str, Any]) -> float:
    """`adapter.lora.alpha`; 0 says that the product of the matrices is added as it is."""
    for key, accepted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if metadata.get(key) != accepted:
            raise CheckpointError(f"{path}: {key} is {shown(metadata.get(key))}; accepted is {accepted!r}")
    if metadata.get(INVOCATION):
        raise CheckpointError(
            f"{path}: {INVOCATION} is set: an adapter that begins in the middle of a prompt is not supported"
        )
    check_fields(metadata, {ALPHA: real(-1e9, 1e9)}, f"{path}: ")
    return float(metadata.get(ALPHA, 0))


def _tensors(path: Path, header: GGUFHeader) -> dict[str, np.ndarray]:
    data = np.memmap(path, np.uint8, mode="r")
    found = {}
    for name, (shape, dtype, offset, nbytes) in header.tensors.items():
        stored = data[offset : offset + nbytes].view(np.ndarray)
        if dtype in FLOATS:
            found[name] = stored.view(FLOATS[dtype]).reshape(shape).copy()
        else:
            try:
                found[name] = dequantize(stored, dtype, shape)
            except CheckpointError as error:
                raise CheckpointError(f"{path}: tensor {shown(name)}: {error}") from None
    return found


def _low_rank(path: Path, base: str, a: np.ndarray, b: np.ndarray | None, alpha: float) -> LowRank:
    """An embedding's A is stored the other way around, so that a row of it is that of a token."""
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
