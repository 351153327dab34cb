"""Directories of safetensors with quantized matrices, as Checkpoints of matrices: each method says where codes lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.quantization.stored import Stored
from jaxllm.weights.checkpoint import Checkpoint, TensorInfo
from jaxllm.weights.fields import NULL, OBJECT, check_fields, either, shown
from jaxllm.weights.packings.bitsandbytes import find_bitsandbytes, find_mxfp4
from jaxllm.weights.packings.compressed_tensors import find_compressed_tensors, find_fp8
from jaxllm.weights.packings.gptq import find_awq, find_gptq
from jaxllm.weights.packings.module import Packed

METHODS: dict[str, Callable[[Checkpoint, dict[str, Any]], dict[str, Packed]]] = {
    "gptq": find_gptq,
    "awq": find_awq,
    "compressed-tensors": find_compressed_tensors,
    "fp8": find_fp8,
    "fbgemm_fp8": find_fp8,
    "bitsandbytes": find_bitsandbytes,
    "mxfp4": find_mxfp4,
    "marlin": lambda checkpoint, config: find_gptq(checkpoint, {"bits": 4} | config | {"checkpoint_format": "marlin"}),
}
"""How `quantization_config.quant_method` is read."""


class PackedCheckpoint:
    """A quantized checkpoint; see `Checkpoint`. Tensors that only together are a matrix are seen as that matrix.

    Attributes:
        zero_biases: of its matrices. AutoGPTQ writes them for layers that have none, so a model need not use them.

    Raises:
        CheckpointError: the method, or this variant of it, is not read; or what a matrix is made of does not fit.
    """

    format = "safetensors"

    def __init__(self, whole: Checkpoint, config: dict[str, Any]):
        method = config.get("quant_method")
        if not isinstance(method, str) or method not in METHODS:
            raise CheckpointError(
                f"{whole.path}: quantization_config.quant_method is {shown(method)}; supported are {', '.join(METHODS)}"
            )
        self.path: Path = whole.path
        self.config = whole.config
        self.generation_config = whole.generation_config
        try:
            self._packed = METHODS[method](whole, config)
        except CheckpointError as error:
            said = str(error)
            raise CheckpointError(said if said.startswith(f"{whole.path}") else f"{whole.path}: {said}") from None
        hidden = {name for packed in self._packed.values() for name in packed.tensors}
        self.tensors: dict[str, TensorInfo] = {n: info for n, info in whole.tensors.items() if n not in hidden}
        self.tensors |= {name: packed.info for name, packed in self._packed.items()}
        biases = (f"{name.removesuffix('.weight')}.bias" for name in self._packed)
        self.zero_biases = tuple(b for b in biases if b in whole.tensors and not whole.read(b).data.any())
        self._whole = whole

    def read(self, name: str) -> Stored:
        """One tensor: a matrix's codes, or a view of the file."""
        packed = self._packed.get(name)
        return self._whole.read(name) if packed is None else packed.read()

    def close(self) -> None:
        """Let go of the files."""
        self._whole.close()


def quantization_config(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """What config.json says of quantization, if anything. Raises CheckpointError where it is no object."""
    text = checkpoint.config.get("text_config")
    for config in (checkpoint.config, text if isinstance(text, dict) else {}):
        try:
            check_fields(config, {"quantization_config": either(OBJECT, NULL)})
        except CheckpointError as error:
            raise CheckpointError(f"{checkpoint.path / 'config.json'}: {error}") from None
        if config.get("quantization_config"):
            return config["quantization_config"]
    return None
