"""The tiny adapters as GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jaxllm.weights.adapters import open_adapter
from tests.reference.gguf_tensors import permuted
from tests.reference.peft_adapters import ADAPTERS
from tests.reference.tiny import tiny_config
from tests.reference.tiny_gguf import gguf_architecture

Tensors = dict[str, np.ndarray]


def gguf_adapter_tensors(name: str, folder: Path) -> Tensors:
    """The tensors of an adapter in `folder` under llama.cpp's names; rows of a llama's Q and K as it has them."""
    base = ADAPTERS[name].base
    config, architecture = tiny_config(base), gguf_architecture(base)
    kind = next(number for number, known in gguf.MODEL_ARCH_NAMES.items() if known == architecture)
    names = gguf.get_tensor_name_map(kind, config.get("num_hidden_layers") or config["n_layer"])
    found: Tensors = {}
    for tensor, update in open_adapter(folder).updates.items():
        b = permuted(config, {tensor: update.b})[tensor] if architecture == "llama" else update.b
        stored = names.get_name(tensor, try_suffixes=(".weight",))
        found[f"{stored}.lora_a"] = update.a.T if stored == "token_embd.weight" else update.a
        found[f"{stored}.lora_b"] = b
    return found


def write_gguf_adapter(
    path: Path, tensors: Mapping[str, np.ndarray], *, dtype: str = "F32", keys: Mapping[str, Any] | None = None
) -> Path:
    """Write a file of an adapter whose alpha is 8; `keys` are other values of its metadata, None for none."""
    given = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0} | dict(keys or {})
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in given.items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_string(key, value)
    kind = gguf.GGMLQuantizationType[dtype]
    for name, tensor in tensors.items():
        values = np.ascontiguousarray(tensor, np.float32)
        if values.ndim < 2 or values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
