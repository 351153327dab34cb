"""GPTQ (arXiv:2210.17323) as AutoGPTQ and GPTQModel write it, plainly or in Marlin's order.

    qweight  int32 [i * bits / 32, o]     neighbouring inputs in one word, lowest bits first
    qzeros   int32 [i / group, o * bits / 32]   neighbouring outputs in one word; v1 holds one less than is meant
    scales   [i / group, o]
    g_idx    int32 [i]                    each input's group; sorted where there is no act-order

Published at https://github.com/AutoGPTQ/AutoGPTQ and https://github.com/ModelCloud/GPTQModel
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxllm.quantization.stored import Codes, Coding, order_name
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.fields import FLAG, NULL, OBJECT, TEXT, check_fields, either, one_of, whole
from jaxllm.weights.packings.marlin import marlin
from jaxllm.weights.packings.module import FLOATS, Packed, Parts, modules, sorted_inputs, unpack, unsupported

BITS = (2, 3, 4, 8)
FORMATS = ("gptq", "gptq_v2", "marlin")
FIELDS = {
    "bits": whole(1, 32),
    "group_size": either(whole(1, 2**20), whole(-1, -1)),
    "sym": FLAG,
    "checkpoint_format": either(TEXT, NULL),
    "format": either(TEXT, NULL),
    "is_marlin_format": FLAG,
    "dynamic": either(OBJECT, NULL),
    "pack_dtype": one_of("int32"),
}


def find(checkpoint: Checkpoint, config: dict[str, Any]) -> dict[str, Packed]:
    """Every matrix of a GPTQ checkpoint by its name."""
    check_fields(config, FIELDS, "quantization_config.")
    bits, form = config.get("bits"), config.get("checkpoint_format") or config.get("format") or "gptq"
    if bits not in BITS:
        raise unsupported("GPTQ", "bits", bits, "2, 3, 4 or 8")
    if form not in FORMATS:
        raise unsupported("GPTQ", "checkpoint_format", form, ", ".join(FORMATS))
    if any(rule and not pattern.startswith("-:") for pattern, rule in (config.get("dynamic") or {}).items()):
        raise unsupported("GPTQ", "dynamic", config["dynamic"], "one rule for all modules, or modules left out (-:)")
    group = config.get("group_size", 128)
    if form == "marlin" or config.get("is_marlin_format"):
        if bits != 4:
            raise unsupported("Marlin", "bits", bits, "4")
        return {
            f"{prefix}.weight": marlin(Parts(checkpoint, prefix, f"{prefix}.weight"), ".B", ".s", group)
            for prefix in modules(checkpoint, ".B")
        }
    return {
        f"{prefix}.weight": _matrix(
            Parts(checkpoint, prefix, f"{prefix}.weight"), bits, group, config.get("sym", False), v1=form == "gptq"
        )
        for prefix in modules(checkpoint, ".qweight")
    }


def _matrix(parts: Parts, bits: int, group_size: int, symmetric: bool, *, v1: bool) -> Packed:
    words, outputs = parts.info(".qweight", ("I32",), rank=2).shape
    inputs = words * 32 // bits
    group = inputs if group_size == -1 else group_size
    groups = inputs // group
    if inputs % group:
        raise parts.error(f"has {inputs} inputs, which groups of {group} (group_size) do not divide")
    scale = parts.expect(".scales", tuple(FLOATS), (groups, outputs)).dtype
    parts.expect(".qzeros", ("I32",), (groups, -(-outputs * bits // 32)))
    order = sorted_inputs(parts, ".g_idx", inputs, groups)
    coding = Coding(bits, (1, group), FLOATS[scale], symmetric, order=order_name(order))

    def read() -> tuple[np.ndarray, Codes]:
        codes = unpack(parts.array(".qweight").T, bits)
        zeros = _zeros(parts.array(".qzeros"), bits, v1)[:, :outputs].T
        if symmetric and (zeros != coding.middle).any():
            raise parts.error(
                f"holds others than {coding.middle}; accepted with quantization_config.sym false", ".qzeros"
            )
        codes = codes if order is None else codes[:, order]
        return codes, Codes(coding, parts.array(".scales").T, None if symmetric else zeros, order)

    return parts.packed(f"GPTQ {bits}-bit", (outputs, inputs), coding, read)


def _zeros(words: np.ndarray, bits: int, v1: bool) -> np.ndarray:
    """Zero points `[groups, o]`.

    v1 files hold one less. It was subtracted from whole words, so that a 0 borrowed from its neighbour, and is added to
    whole words again; three bits go over the ends of words, and are added to one by one.
    """
    if v1 and 32 % bits == 0:
        ones = sum(1 << shift for shift in range(0, 32, bits))
        words = words.view(np.uint32) + np.uint32(ones)
    zeros = unpack(words, bits)
    return (zeros + np.uint8(1)) & np.uint8((1 << bits) - 1) if v1 and 32 % bits else zeros
