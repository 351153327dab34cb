"""compressed-tensors, which llm-compressor writes; its floats are read as those of others.

    pack-quantized    weight_packed int32 [o, i * bits / 32], without gaps; weight_shape; W4A16, W8A16
    int-quantized     weight int8 [o, i]; W8A8, W8A16
    weight_scale      [1], [o, 1] or [o, i / group]
    weight_zero_point likewise, packed along the outputs with packed weights; only where groups are not symmetric
    weight_g_idx      int32 [i], each input's group (act-order)

Published at https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxllm.quantization.stored import FLOATS, Codes, Coding, order_name
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.fields import FLAG, NULL, OBJECT, TEXT, check_fields, either, whole
from jaxllm.weights.packings.floats import MEASURED, PACKED, find_floats
from jaxllm.weights.packings.module import Packed, Parts, matrices, sorted_inputs, unpack, unsupported

FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "dense",
)  # fmt: skip
MIXED = "mixed-precision"
BITS = (2, 3, 4, 8)
FIELDS = {
    "format": TEXT,
    "config_groups": OBJECT,
    "sparsity_config": either(OBJECT, NULL),
    "transform_config": either(OBJECT, NULL),
}
GROUP_FIELDS = {
    "weights": either(OBJECT, NULL),
    "input_activations": either(OBJECT, NULL),
    "format": either(TEXT, NULL),
}
WEIGHT_FIELDS = {"num_bits": whole(1, 32), "symmetric": FLAG, "type": TEXT}


def find_compressed_tensors(checkpoint: Checkpoint, config: dict[str, Any]) -> dict[str, Packed]:
    """Every matrix of such a checkpoint by its name; its tensors say how it is packed."""
    check_fields(config, FIELDS, "quantization_config.")
    _check_formats(config)
    rounded = _rounds_inputs(config)
    given = {(group.get("weights") or {}).get("num_bits") for group in _groups(config).values()}
    accepted = [bits for bits in BITS if bits in given] or list(BITS)
    found = find_floats(checkpoint, _block(config))
    for parts in matrices(checkpoint, PACKED):
        if parts.name not in found:
            found[parts.name] = _integers(parts, *_packed_size(parts, accepted))
    for parts in matrices(checkpoint, ".weight_scale"):
        if parts.name not in found:
            shape = parts.info(".weight", ("I8",), rank=2).shape
            found[parts.name] = _integers(parts, shape, rounded=rounded)
    return found


def _groups(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    groups = config.get("config_groups") or {}
    for name, group in groups.items():
        inside = f"quantization_config.config_groups.{name}"
        check_fields({inside: group}, {inside: OBJECT})
        check_fields(group, GROUP_FIELDS, f"{inside}.")
        check_fields(group.get("weights") or {}, WEIGHT_FIELDS, f"{inside}.weights.")
    return groups


def _check_formats(config: dict[str, Any]) -> None:
    method, groups = "compressed-tensors", _groups(config)
    forms = {f"config_groups.{name}.format": group.get("format") for name, group in groups.items()}
    forms["format"] = config.get("format")
    for name, form in forms.items():
        if form not in (None, *FORMATS) and not (form == MIXED and name == "format"):
            raise unsupported(method, name, form, ", ".join(FORMATS[:-1]))
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise unsupported(method, "sparsity_config.format", sparsity, "dense")
    if config.get("transform_config"):
        raise unsupported(method, "transform_config", config["transform_config"], "none: rotated weights are not read")
    for name, group in groups.items():
        weights = group.get("weights") or {}
        if weights.get("type", "int") == "int" and weights.get("num_bits", 8) not in BITS:
            raise unsupported(method, f"config_groups.{name}.weights.num_bits", weights["num_bits"], "2, 3, 4 or 8")


def _rounds_inputs(config: dict[str, Any]) -> bool:
    """Whether inputs of eight-bit integer weights are to be rounded to int8 as well."""
    rounded = [
        (group.get("input_activations") or {}).get("type", "none")
        for group in _groups(config).values()
        if (group.get("weights") or {}).get("type", "int") == "int"
    ]
    return bool(rounded) and all(kind == "int" for kind in rounded)


def _block(config: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns of FP8 weights that share a scale, if it is neither one a tensor nor one a row."""
    for name, group in _groups(config).items():
        weights = group.get("weights") or {}
        block = weights.get("block_structure")
        if weights.get("strategy") == "block":
            if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
                key = f"config_groups.{name}.weights.block_structure"
                raise unsupported("compressed-tensors", key, block, "a list of two integers from 1")
            return block[0], block[1]
    return 128, 128


def _packed_size(parts: Parts, accepted: list[int]) -> tuple[tuple[int, int], int]:
    rows, words = parts.info(PACKED, ("I32",), rank=2).shape
    parts.info(".weight_shape", ("I64", "I32"), (2,))
    outputs, inputs = map(int, parts.array(".weight_shape"))
    bits = next((bits for bits in accepted if words == -(-inputs * bits // 32)), None)
    if outputs != rows or inputs < 1 or bits is None:
        held = f"of shape {(rows, words)} holds no {(outputs, inputs)} (weight_shape)"
        raise parts.error(f"{held} of {' or '.join(map(str, accepted))} bits", PACKED)
    return (outputs, inputs), bits


def _integers(parts: Parts, shape: tuple[int, ...], bits: int | None = None, *, rounded: bool = False) -> Packed:
    outputs, inputs = shape
    block, groups, scale = _scales(parts, outputs, inputs)
    symmetric = ".weight_zero_point" not in parts
    if not symmetric and bits is None:
        parts.info(".weight_zero_point", ("I8",), parts.info(".weight_scale", tuple(FLOATS)).shape)
    elif not symmetric and bits is not None:
        parts.info(".weight_zero_point", ("I32",), (-(-outputs * bits // 32), groups))
    order = sorted_inputs(parts, ".weight_g_idx", inputs, groups)
    coding = Coding(bits or 8, block, scale, symmetric, order=order_name(order), activations=rounded)

    def read() -> tuple[np.ndarray, Codes]:
        zeros = None if symmetric else parts.array(".weight_zero_point")
        if bits is None:
            codes = _unsigned(parts.array(".weight"))
            zeros = None if zeros is None else _unsigned(zeros).reshape(-1, groups)
        else:
            codes = unpack(parts.array(PACKED), bits)[:, :inputs]
            zeros = None if zeros is None else unpack(zeros.T, bits)[:, :outputs].T
        codes = codes if order is None else codes[:, order]
        return codes, Codes(coding, parts.array(".weight_scale").reshape(-1, groups), zeros, order)

    return parts.packed(f"compressed-tensors {bits or 8}-bit", (outputs, inputs), coding, read)


def _unsigned(codes: np.ndarray) -> np.ndarray:
    return codes.view(np.uint8) ^ np.uint8(128)


def _scales(parts: Parts, outputs: int, inputs: int) -> tuple[tuple[int, int], int, np.dtype]:
    """Rows and columns that share a scale (a group's, a row's or a matrix's), groups in a row, and the scales' type."""
    info = parts.info(".weight_scale", tuple(FLOATS))
    groups = info.shape[1] if len(info.shape) == 2 else 1
    if info.shape not in ((), (1,), (1, 1), (outputs,), (outputs, groups)) or groups < 1:
        accepted = f"{(outputs, 1)}, (1,) or a scale a group"
        raise parts.error(f"is of shape {info.shape}; accepted is {accepted}", ".weight_scale")
    if inputs % groups:
        raise parts.error(f"has {inputs} inputs, which {groups} groups (weight_scale) do not divide")
    parts.ignore(*MEASURED)
    rows = outputs if math.prod(info.shape) == 1 else 1
    return (rows, inputs // groups), groups, FLOATS[info.dtype]
