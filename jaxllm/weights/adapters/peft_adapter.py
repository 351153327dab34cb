"""A folder that PEFT's `save_pretrained` wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxllm.errors import CheckpointError
from jaxllm.weights.adapters.adapter import Adapter, LowRank
from jaxllm.weights.adapters.peft_settings import SETTINGS_FILE, PeftSettings, read_peft_settings
from jaxllm.weights.fields import shown
from jaxllm.weights.folder import model_file
from jaxllm.weights.safetensors_file import read_tensors

TENSORS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"

_PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.(?!weight$|bias$)[^.]+)?(?P<kind>\.weight|\.bias)?"
)
"""A tensor of a layer: `q_proj.lora_A.weight`, or in older files, which have the adapter's name in it,
`q_proj.lora_A.default.weight`."""
_SAVED = re.compile(r"(?P<module>.+?)(?:\.modules_to_save(?:\.[^.]+)?|\.base_layer)?\.(?P<kind>weight|bias)")
"""A whole tensor, of a module that was trained, or a bias."""
_UNCHANGED = ".base_layer.weight"
"""The end of the name of a matrix that is the model's own: PEFT stores it beside what is added to an embedding."""
_LANGUAGE_MODEL = re.compile(r"(model\.)?language_model\.(model\.)?(?P<rest>.*)")
"""How multimodal models name the modules of their language model: `model.language_model.layers.0.mlp`."""
_INPUTS_FIRST = re.compile(r"(transformer\.)?h\.\d+\.(attn|mlp)\.c_(attn|proj|fc)")
"""GPT-2's layers, whose matrices are stored as `[in, out]`."""

LayerParts = dict[str, np.ndarray]


def read_peft_adapter(folder: Path) -> Adapter:
    """Read and check a folder. Raises CheckpointError as `open_adapter`."""
    settings = read_peft_settings(folder)
    file = model_file(folder, TENSORS_FILE)
    if not file.is_file():
        if (folder / PICKLE_FILE).exists():
            raise CheckpointError(
                f"{folder / PICKLE_FILE}: pickle files can run code and are not read; convert it with PEFT: "
                "PeftModel.from_pretrained(base, folder).save_pretrained(new_folder, safe_serialization=True)"
            )
        raise CheckpointError(f"{folder}: holds no {TENSORS_FILE}")
    layers, replaced = _sorted_by_layer(file, read_tensors(file))
    updates = {}
    for module, parts in layers.items():
        settings.check_target(module)
        updates[f"{_plain(module)}.weight"] = _low_rank(file, settings, module, parts)
    if settings.fan_in_fan_out and not any(_INPUTS_FIRST.fullmatch(module) for module in layers):
        raise CheckpointError(
            f"{settings.path}: fan_in_fan_out is true, but no layer is one of GPT-2's; accepted is false"
        )
    if not updates and not replaced:
        raise CheckpointError(f"{file}: holds no tensors")
    return Adapter("peft", folder, updates, replaced, settings.base_model_name_or_path)


def _sorted_by_layer(file: Path, tensors: LayerParts) -> tuple[dict[str, LayerParts], LayerParts]:
    """(module -> its parts, the whole tensors), under the names of PEFT's modules and those of tensors."""
    layers: dict[str, LayerParts] = {}
    replaced: LayerParts = {}
    for stored, tensor in tensors.items():
        if stored.endswith(_UNCHANGED):
            continue
        if tensor.dtype.kind not in "fV":  # ml_dtypes' are "V"
            raise CheckpointError(f"{file}: tensor {shown(stored)} holds {tensor.dtype}; accepted are floats")
        name = stored.removeprefix("base_model.model.")
        if found := _PART.fullmatch(name):
            kept, key = layers.setdefault(found["module"], {}), found["part"]
            if found["kind"] == ".bias":
                raise CheckpointError(f"{file}: tensor {shown(stored)}: a bias beside B is not supported")
            if found["module"].endswith((".base_layer", ".experts")):
                raise CheckpointError(
                    f"{file}: tensor {shown(stored)} is of experts that are stored as one stack; accepted are linear "
                    "layers and embeddings"
                )
        elif "lora_" not in name and "token_adapter" not in name and (found := _SAVED.fullmatch(name)):
            kept, key = replaced, f"{_plain(found['module'])}.{found['kind']}"
        else:
            raise CheckpointError(
                f"{file}: tensor {shown(stored)} is not known; accepted are lora_A, lora_B, lora_embedding_A, "
                "lora_embedding_B and lora_magnitude_vector of a module, and a module's weight or bias"
            )
        if key in kept:
            raise CheckpointError(f"{file}: tensor {shown(stored)} is there twice, under the names of two adapters")
        kept[key] = tensor
    return layers, replaced


def _low_rank(file: Path, settings: PeftSettings, module: str, parts: LayerParts) -> LowRank:
    embedding = "lora_embedding_A" in parts or "lora_embedding_B" in parts
    names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
    for name in names:
        if name not in parts:
            raise CheckpointError(f"{file}: {name} of {shown(module)} is missing")
    a, b = (parts[name] for name in names)
    rank = settings.rank(module)
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise CheckpointError(
            f"{file}: {names[0]} and {names[1]} of {shown(module)} are {a.shape} and {b.shape}; accepted are "
            f"({rank}, inputs) and (outputs, {rank}), for the rank of this module is {rank} in {settings.path.name}"
        )
    return LowRank(
        a,
        b,
        settings.scale(module),
        _magnitude(file, settings, module, parts, b.shape[0]),
        transposed=embedding or _INPUTS_FIRST.fullmatch(module) is not None,
    )


def _magnitude(file: Path, settings: PeftSettings, module: str, parts: LayerParts, rows: int) -> np.ndarray | None:
    magnitude = parts.get("lora_magnitude_vector")
    if (magnitude is not None) != settings.use_dora:
        found = "missing" if magnitude is None else "there"
        raise CheckpointError(
            f"{file}: lora_magnitude_vector of {shown(module)} is {found}, but use_dora is "
            f"{str(settings.use_dora).lower()} in {settings.path.name}"
        )
    if magnitude is not None and magnitude.shape != (rows,):
        raise CheckpointError(
            f"{file}: lora_magnitude_vector of {shown(module)} is {magnitude.shape}; accepted is ({rows},)"
        )
    return magnitude


def _plain(module: str) -> str:
    """The name that a language model without images has for this module."""
    found = _LANGUAGE_MODEL.fullmatch(module)
    if found is None:
        return module
    return found["rest"] if found["rest"].startswith("lm_head") else f"model.{found['rest']}"


def save_adapter(folder: Path, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Write arrays, named as PEFT names them, and what adapter_config.json says of them into a folder that is there."""
    (folder / SETTINGS_FILE).write_text(json.dumps({"peft_type": "LORA", **config}))
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / TENSORS_FILE)
