"""GPTQ (arXiv:2210.17323) as AutoGPTQ and GPTQModel write it, plainly or in Marlin's order.

    qweight  int32 [i * bits / 32, o]     neighbouring inputs in one word, lowest bits first
    qzeros   int32 [i / group, o * bits / 32]   neighbouring outputs in one word; v1 holds one less than is meant
    scales   [i / group, o]
    g_idx    int32 [i]                    each input's group; sorted where there is no act-order

AWQ (arXiv:2306.00978) as AutoAWQ writes it for its GEMM kernel, or in Marlin's order:

    qweight  int32 [i, o / 8]           eight outputs in a word, evens first
    qzeros   int32 [i / group, o / 8]   likewise
    scales   [i / group, o]

AutoRound (arXiv:2309.05516) packs as one of those two, with settings of their own for single modules.

Marlin's order of four-bit weights, in which a GPU's tensor cores take them (arXiv:2408.11743, section 3.4):

    weights  int32 [i / 16, 2 o]   tiles of 16 inputs by 64 outputs, each in the order below; symmetric about 8
    scales   float16 [i / group, o]    in an order of their own

Published at https://github.com/AutoGPTQ/AutoGPTQ, https://github.com/ModelCloud/GPTQModel,
https://github.com/casper-hansen/AutoAWQ, https://github.com/intel/auto-round and https://github.com/IST-DASLab/marlin
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.quantization.stored import FLOATS, Codes, Coding, order_name
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.fields import FLAG, NULL, OBJECT, TEXT, check_fields, either, one_of, whole
from jaxllm.weights.packings.module import Packed, Parts, matrices, sorted_inputs, unpack, unsupported

GPTQ_BITS = (2, 3, 4, 8)
GPTQ_FORMATS = ("gptq", "gptq_v2", "marlin")
GPTQ_FIELDS = {
    "bits": whole(1, 32),
    "group_size": either(whole(1, 2**20), whole(-1, -1)),
    "sym": FLAG,
    "checkpoint_format": either(TEXT, NULL),
    "format": either(TEXT, NULL),
    "is_marlin_format": FLAG,
    "dynamic": either(OBJECT, NULL),
    "pack_dtype": one_of("int32"),
}


def find_gptq(
    checkpoint: Checkpoint, config: dict[str, Any], own: Mapping[str, dict[str, Any]] = {}
) -> dict[str, Packed]:
    check_fields(config, GPTQ_FIELDS, "quantization_config.")
    bits, form = config.get("bits"), config.get("checkpoint_format") or config.get("format") or "gptq"
    _check_gptq_bits("bits", bits)
    if form not in GPTQ_FORMATS:
        raise unsupported("GPTQ", "checkpoint_format", form, ", ".join(GPTQ_FORMATS))
    if any(rule and not pattern.startswith("-:") for pattern, rule in (config.get("dynamic") or {}).items()):
        raise unsupported("GPTQ", "dynamic", config["dynamic"], "one rule for all modules, or modules left out (-:)")
    group = config.get("group_size", 128)
    if form == "marlin" or config.get("is_marlin_format"):
        if bits != 4:
            raise unsupported("Marlin", "bits", bits, "4")
        return {parts.name: marlin(parts, ".B", ".s", group) for parts in matrices(checkpoint, ".B")}
    found = {}
    for parts in matrices(checkpoint, ".qweight"):
        here = {"group_size": group, "sym": False} | config | own.get(parts.prefix, {})
        _check_gptq_bits(f"extra_config.{parts.prefix}.bits", here["bits"])
        found[parts.name] = _gptq_matrix(parts, here["bits"], here["group_size"], here["sym"], v1=form == "gptq")
    return found


def _check_gptq_bits(key: str, bits: Any) -> None:
    if bits not in GPTQ_BITS:
        raise unsupported("GPTQ", key, bits, "2, 3, 4 or 8")


def _gptq_matrix(parts: Parts, bits: int, group_size: int, symmetric: bool, *, v1: bool) -> Packed:
    words, outputs = parts.info(".qweight", ("I32",), rank=2).shape
    inputs = words * 32 // bits
    group = parts.group(inputs, group_size)
    groups = inputs // group
    scale = parts.info(".scales", tuple(FLOATS), (groups, outputs)).dtype
    parts.info(".qzeros", ("I32",), (groups, -(-outputs * bits // 32)))
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
    whole words again; three-bit codes cross the ends of words, and are incremented one by one.
    """
    if v1 and 32 % bits == 0:
        ones = sum(1 << shift for shift in range(0, 32, bits))
        words = words.view(np.uint32) + np.uint32(ones)
    zeros = unpack(words, bits)
    return (zeros + np.uint8(1)) & np.uint8((1 << bits) - 1) if v1 and 32 % bits else zeros


AWQ_BITS, AWQ_IN_WORD = 4, 8
AWQ_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # the output of each nibble of a word, lowest first
AWQ_VERSIONS = ("gemm", "marlin")
AWQ_FIELDS = {
    "bits": whole(1, 32),
    "group_size": either(whole(1, 2**20), whole(-1, -1)),
    "version": either(TEXT, NULL),
    "format": either(TEXT, NULL),
    "zero_point": FLAG,
}


def find_awq(
    checkpoint: Checkpoint, config: dict[str, Any], own: Mapping[str, dict[str, Any]] = {}
) -> dict[str, Packed]:
    names = {"w_bit": "bits", "q_group_size": "group_size"}  # as AutoAWQ calls them in a file of its own
    config = {names.get(key, key): value for key, value in config.items()}
    check_fields(config, AWQ_FIELDS, "quantization_config.")
    version = (config.get("version") or config.get("format") or "gemm").lower()
    if config.get("bits", AWQ_BITS) != AWQ_BITS:
        raise unsupported("AWQ", "bits", config["bits"], "4")
    if version not in AWQ_VERSIONS:
        raise unsupported("AWQ", "version", version, " or ".join(AWQ_VERSIONS))
    found = {}
    for parts in matrices(checkpoint, ".qweight"):
        here = {"bits": AWQ_BITS, "group_size": 128} | config | own.get(parts.prefix, {})
        group = here["group_size"]
        if here["bits"] != AWQ_BITS:
            raise unsupported("AWQ", f"extra_config.{parts.prefix}.bits", here["bits"], "4")
        packed = marlin(parts, ".qweight", ".scales", group) if version == "marlin" else _awq_matrix(parts, group)
        found[parts.name] = packed
    return found


def _awq_matrix(parts: Parts, group_size: int) -> Packed:
    inputs, words = parts.info(".qweight", ("I32",), rank=2).shape
    outputs, group = words * AWQ_IN_WORD, parts.group(inputs, group_size)
    groups = inputs // group
    scale = parts.info(".scales", tuple(FLOATS), (groups, outputs)).dtype
    parts.info(".qzeros", ("I32",), (groups, words))
    coding = Coding(AWQ_BITS, (1, group), FLOATS[scale], symmetric=False)

    def read() -> tuple[np.ndarray, Codes]:
        codes, zeros = _outputs(parts.array(".qweight")), _outputs(parts.array(".qzeros"))
        return codes.T, Codes(coding, parts.array(".scales").T, zeros.T)

    return parts.packed("AWQ 4-bit", (outputs, inputs), coding, read)


def _outputs(words: np.ndarray) -> np.ndarray:
    nibbles = unpack(words, AWQ_BITS).reshape(len(words), -1, AWQ_IN_WORD)
    return nibbles[..., np.argsort(AWQ_ORDER)].reshape(len(words), -1)


AUTO_ROUND_PACKINGS = {"auto_round:auto_gptq": find_gptq, "auto_round:auto_awq": find_awq}
AUTO_ROUND_FIELDS = {"packing_format": TEXT, "data_type": one_of("int"), "extra_config": either(OBJECT, NULL)}
MODULE_FIELDS = {"bits": whole(1, 32), "group_size": GPTQ_FIELDS["group_size"], "sym": FLAG}


def find_auto_round(checkpoint: Checkpoint, config: dict[str, Any]) -> dict[str, Packed]:
    check_fields(config, AUTO_ROUND_FIELDS, "quantization_config.")
    form = config.get("packing_format", "auto_round:auto_gptq")
    if form not in AUTO_ROUND_PACKINGS:
        raise unsupported("AutoRound", "packing_format", form, " or ".join(AUTO_ROUND_PACKINGS))
    own = config.get("extra_config") or {}
    for module, settings in own.items():
        key = f"quantization_config.extra_config.{module}"
        check_fields({key: settings}, {key: OBJECT})
        check_fields(settings, MODULE_FIELDS, f"{key}.")
    return AUTO_ROUND_PACKINGS[form](checkpoint, {"sym": True} | config, own)


MARLIN_TILE, MARLIN_WIDTH = 16, 64  # inputs and outputs of a tile


def marlin(parts: Parts, weights: str, scales: str, group_size: int) -> Packed:
    rows, columns = parts.info(weights, ("I32",), rank=2).shape
    inputs, outputs = rows * MARLIN_TILE, columns // 2
    if columns % (2 * MARLIN_WIDTH) or not outputs:
        raise parts.error(f"has {outputs} outputs, in Marlin's order; accepted is a multiple of {MARLIN_WIDTH}")
    group = parts.group(inputs, group_size)
    parts.info(scales, ("F16",), (inputs // group, outputs))
    parts.ignore(".workspace")
    coding = Coding(4, (1, group), np.dtype(np.float16))

    def read() -> tuple[np.ndarray, Codes]:
        order = MARLIN_SCALES if group < inputs else MARLIN_ROW_SCALES
        scale = _undone(parts.array(scales), order)
        tiles = _undone(unpack(parts.array(weights), 4), MARLIN_CODES).reshape(
            rows, outputs // MARLIN_TILE, MARLIN_TILE, MARLIN_TILE
        )
        codes = tiles.transpose(1, 3, 0, 2).reshape(outputs, inputs)  # [i / 16, o / 16, 16 i, 16 o] before
        return codes, Codes(coding, scale.reshape(-1, outputs).T)

    return parts.packed("Marlin 4-bit", (outputs, inputs), coding, read)


def _undone(array: np.ndarray, order: np.ndarray) -> np.ndarray:
    return array.reshape(-1, len(order))[:, np.argsort(order)]


def _marlin_order() -> np.ndarray:
    """The sources of a tile's codes: eight of a 16 x 16 part for each of a warp's 32 lanes, in turn of four parts.

    A lane holds two rows of each 8 x 8 quarter in a column of each half; a word's nibbles are taken evens first.
    """
    lane, part = np.arange(32), np.arange(4)
    row = 2 * (lane % 4)[:, None, None] + np.array([0, 1, 8, 9])
    column = (lane // 4)[:, None, None] + np.array([0, 8])[:, None]
    eight = (MARLIN_TILE * row + column).reshape(32, 1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
    return (eight + MARLIN_TILE * MARLIN_TILE * part[:, None]).ravel()


MARLIN_CODES = _marlin_order()
MARLIN_SCALES = np.arange(64).reshape(8, 8).T.ravel()
MARLIN_ROW_SCALES = (2 * np.arange(4)[:, None] + np.array([0, 1, 8, 9, 16, 17, 24, 25])).ravel()
