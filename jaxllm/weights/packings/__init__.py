"""Directories of safetensors with quantized matrices as Checkpoints of matrices, for each method of quantization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.quantization.stored import Stored
from jaxllm.weights.checkpoint import Checkpoint, WrappedCheckpoint
from jaxllm.weights.fields import NULL, OBJECT, check_fields, either, shown
from jaxllm.weights.folder import read_object
from jaxllm.weights.packings.bitsandbytes import find_bitsandbytes
from jaxllm.weights.packings.compressed_tensors import find_compressed_tensors
from jaxllm.weights.packings.floats import find_fp8, find_modelopt, find_mxfp4, find_quark
from jaxllm.weights.packings.gptq import find_auto_round, find_awq, find_gptq
from jaxllm.weights.packings.module import Packed
from jaxllm.weights.packings.torchao import find_torchao

METHODS: dict[str, Callable[[Checkpoint, dict[str, Any]], dict[str, Packed]]] = {  # by `quant_method`
    "gptq": find_gptq,
    "awq": find_awq,
    "auto-round": find_auto_round,
    "compressed-tensors": find_compressed_tensors,
    "fp8": find_fp8,
    "fbgemm_fp8": find_fp8,
    "bitsandbytes": find_bitsandbytes,
    "mxfp4": find_mxfp4,
    "mxfp8": find_fp8,
    "modelopt": find_modelopt,
    "quark": find_quark,
    "torchao": find_torchao,
    "marlin": lambda checkpoint, config: find_gptq(checkpoint, {"bits": 4} | config | {"checkpoint_format": "marlin"}),
}


MODELOPT_FILE = "hf_quant_config.json"  # in which older ones say what they are


class PackedCheckpoint(WrappedCheckpoint):
    """A quantized checkpoint, in which tensors that together make up a matrix appear as that matrix.

    Raises CheckpointError if the method, or this variant of it, is not read; or the parts of a matrix do not fit.
    """

    def __init__(self, whole: Checkpoint, config: dict[str, Any]):
        super().__init__(whole)
        method = config.get("quant_method")
        if not isinstance(method, str) or method not in METHODS:
            raise CheckpointError(
                f"{whole.path}: quantization_config.quant_method is {shown(method)}; supported are {', '.join(METHODS)}"
            )
        try:
            self._packed = METHODS[method](whole, config)
        except CheckpointError as error:
            said = str(error)
            raise CheckpointError(said if said.startswith(f"{whole.path}") else f"{whole.path}: {said}") from None
        hidden = {name for packed in self._packed.values() for name in packed.tensors}
        self.tensors = {name: info for name, info in whole.tensors.items() if name not in hidden}
        self.tensors |= {name: packed.info for name, packed in self._packed.items()}
        biases = (f"{name.removesuffix('.weight')}.bias" for name in self._packed)
        self.zero_biases = tuple(b for b in biases if b in whole.tensors and not whole.read(b).data.any())

    def read(self, name: str) -> Stored:
        packed = self._packed.get(name)
        return self._base.read(name) if packed is None else packed.read()


def quantization_config(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """What config.json, or ModelOpt's file beside it, says of quantization. Raises CheckpointError: no object."""
    text = checkpoint.config.get("text_config")
    for config in (checkpoint.config, text if isinstance(text, dict) else {}):
        check_fields(config, {"quantization_config": either(OBJECT, NULL)}, f"{checkpoint.path / 'config.json'}: ")
        if config.get("quantization_config"):
            return config["quantization_config"]
    if checkpoint.format == "safetensors" and (checkpoint.path / MODELOPT_FILE).exists():
        given = {"quantization": {}} | read_object(checkpoint.path, MODELOPT_FILE)
        check_fields(given, {"quantization": OBJECT}, f"{checkpoint.path / MODELOPT_FILE}: ")
        return {"quant_method": "modelopt"} | given["quantization"]
    return None
