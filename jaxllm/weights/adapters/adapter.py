"""What an adapter changes in a model, whatever its format; and adapters in GGUF, as llama.cpp converts them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from jaxllm.errors import CheckpointError
from jaxllm.quantization.stored import FLOATS, dequantize
from jaxllm.weights.fields import check_fields, real, shown
from jaxllm.weights.folder import check_no_device
from jaxllm.weights.gguf_file import GGUFHeader, read_header


@dataclass(frozen=True)
class LowRank:
    """What is added to the matrix of one linear layer, `[out, in]`: `weight + scale * b @ a`.

    With a magnitude it is DoRA (Liu et al. 2024, arXiv:2402.09353): each row of that sum is then scaled to have this
    length, `magnitude / norm(weight + scale * b @ a, axis=1)`.

    Attributes:
        a: `[r, in]`, as stored.
        b: `[out, r]`, as stored.
        scale: alpha / r, or alpha / sqrt(r) with rsLoRA.
        magnitude: `[out]`, the length of each row.
        transposed: whether the checkpoint has this matrix as `[in, out]`: so do GPT-2's layers, and an embedding, whose
            inputs are the vocabulary.
    """

    a: Shaped[np.ndarray, "r in"]
    b: Shaped[np.ndarray, "out r"]
    scale: float
    magnitude: Shaped[np.ndarray, " out"] | None = None
    transposed: bool = False

    @property
    def rank(self) -> int:
        """The number of rows of `a`."""
        return self.a.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Of the checkpoint's tensor."""
        shape = (self.b.shape[0], self.a.shape[1])
        return shape[::-1] if self.transposed else shape

    def added_to(self, weight: Shaped[np.ndarray, "N M"], strength: float = 1.0) -> Float[np.ndarray, "N M"]:
        """The checkpoint's tensor with this in it, float32; `strength` multiplies `scale`."""
        whole = np.array(weight.T if self.transposed else weight, np.float32)
        whole += (self.scale * strength) * (self.b.astype(np.float32) @ self.a.astype(np.float32))
        if self.magnitude is not None:
            whole *= (self.magnitude.astype(np.float32) / np.linalg.norm(whole, axis=1))[:, None]
        return whole.T if self.transposed else whole


@dataclass(frozen=True)
class Adapter:
    """An adapter in memory.

    Attributes:
        format: "peft" or "gguf": whose tensor names are used. PEFT's are those of the language model alone
            (`model.layers.0.self_attn.q_proj.weight`), also where a multimodal model has it under another name.
        path: the folder or file.
        updates: what is added to which tensor of the model.
        replaced: tensors that take the place of the model's, before anything is added to them: those of PEFT's
            `modules_to_save`, and biases that were trained.
        base_model: what the adapter says of the model that it was trained on, to be shown to people.
    """

    format: str
    path: Path
    updates: dict[str, LowRank]
    replaced: dict[str, np.ndarray]
    base_model: str | None = None

    @property
    def rank(self) -> int:
        """The greatest of its matrices; 0 where it only replaces tensors."""
        return max((update.rank for update in self.updates.values()), default=0)


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
