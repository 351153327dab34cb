"""Floats of eight or four bits with scales of their own, as several makers save them.

Of eight bits, e4m3, with a scale a tensor, a row, or a block of rows and columns; in MXFP8 (OCP Microscaling Formats
1.0) a power of two, stored as its exponent, for every 32 inputs:

    NAME.weight            float8_e4m3fn [o, i], or a stack of them
    NAME.weight_scale_inv  a factor, in spite of its name: DeepSeek's, one a block; Mistral's, one a tensor
    NAME.weight_scale      the same elsewhere; ModelOpt's of blocks is [o / 128, 1, i / 128, 1]

Of four bits, e2m1, two in a byte, the lower bits first. MXFP4 has powers of two; NVFP4 has scales of e4m3, and one more
for the whole matrix:

    NAME.weight or NAME.weight_packed   uint8 [o, i / 2]
    NAME.weight_scale                   uint8 or float8_e8m0fnu [o, i / 32], or float8_e4m3fn [o, i / 16]
    NAME.weight_scale_2                 a factor, ModelOpt's and Quark's; or NAME.weight_global_scale, its inverse

    NAME_blocks  uint8 [*stack, o, i / 32, 16]   MXFP4 as gpt-oss is published
    NAME_scales  uint8 [*stack, o, i / 32]

Published at https://github.com/NVIDIA/Model-Optimizer, https://quark.docs.amd.com and
https://huggingface.co/openai/gpt-oss-20b
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from jaxllm.pallas_kernels.matrices import E2M1
from jaxllm.quantization.stored import E8M0, FLOATS, FP8, NVFP4, Codes, Coding
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.fields import NULL, OBJECT, TEXT, check_fields, either, several, shown, whole
from jaxllm.weights.packings.module import Packed, Parts, matrices, unpack, unsupported

BLOCK = 32
"""Inputs that share a power of two."""
POWERS = ("U8", "F8_E8M0")
PACKED = ".weight_packed"
SCALES = ("_scale_inv", "_scale")
MEASURED = (  # of inputs and outputs, and unused
    ".input_scale", ".input_scale_2", ".input_global_scale", ".input_zero_point", ".activation_scale", ".output_scale",
)  # fmt: skip
FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
MXFP4 = Coding(4, (1, BLOCK), E8M0, levels=E2M1)

FP8_FIELDS = {"weight_block_size": either(several(whole(1, 2**20), 2), NULL)}
MODELOPT_FIELDS = {"quant_algo": either(TEXT, NULL)}
MODELOPT_ALGORITHMS = (
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP8", "MIXED_PRECISION",
)  # fmt: skip
QUARK_TYPES = ("fp8_e4m3", "fp4")


def find_fp8(checkpoint: Checkpoint, config: dict[str, Any]) -> dict[str, Packed]:
    check_fields(config, FP8_FIELDS, "quantization_config.")
    rows, columns = config.get("weight_block_size") or (128, 128)
    return find_floats(checkpoint, (rows, columns))


def find_modelopt(checkpoint: Checkpoint, config: dict[str, Any]) -> dict[str, Packed]:
    check_fields(config, MODELOPT_FIELDS, "quantization_config.")
    algorithm = config.get("quant_algo") or MODELOPT_ALGORITHMS[0]
    if algorithm.upper() not in MODELOPT_ALGORITHMS:
        raise unsupported("ModelOpt", "quant_algo", algorithm, ", ".join(MODELOPT_ALGORITHMS))
    return find_floats(checkpoint)


def find_quark(checkpoint: Checkpoint, config: dict[str, Any]) -> dict[str, Packed]:
    where, given = "global_quant_config", config.get("global_quant_config") or {}
    check_fields({where: given}, {where: OBJECT}, "quantization_config.")
    weights = given.get("weight") or {}
    for each in weights if isinstance(weights, list) else [weights]:  # two of NVFP4: of blocks, and of the matrix
        check_fields({"weight": each}, {"weight": OBJECT}, f"quantization_config.{where}.")
        if each.get("dtype", QUARK_TYPES[0]) not in QUARK_TYPES:
            raise unsupported("Quark", f"{where}.weight.dtype", each["dtype"], " or ".join(QUARK_TYPES))
    return find_floats(checkpoint)


def find_floats(checkpoint: Checkpoint, block: tuple[int, int] = (128, 128)) -> dict[str, Packed]:
    """Every matrix of such floats by its name; the types and shapes of its tensors say what it is.

    Those of eight bits have a scale for each `block` if they have neither one a tensor, one a row nor MXFP8's.
    """
    found = {}
    for name, info in checkpoint.tensors.items():
        if info.dtype == "F8_E4M3" and not name.endswith(SCALES):
            prefix = name.removesuffix(".weight")
            found[name] = _fp8_matrix(Parts(checkpoint, prefix, name), name.removeprefix(prefix), block)
    for suffix in (".weight", PACKED):
        for parts in matrices(checkpoint, suffix):
            if ".weight_scale" in parts and checkpoint.tensors[parts.prefix + suffix].dtype == "U8":
                found[parts.name] = _fp4_matrix(parts, suffix)
    return found


def _fp8_matrix(parts: Parts, weight: str, block: tuple[int, int]) -> Packed:
    shape = parts.info(weight, ("F8_E4M3",)).shape
    if len(shape) < 2:
        raise parts.error(f"is FP8 of shape {shape}; accepted is a matrix, or a stack of them", weight)
    scales = next((weight + suffix for suffix in SCALES if weight + suffix in parts), None)
    if scales is None:
        wanted = " or ".join(shown(parts.name + suffix) for suffix in SCALES)
        raise parts.error(f"is FP8, and {wanted} is missing")
    *stack, rows, columns = shape
    info = parts.info(scales, (*FLOATS, *POWERS))
    powers = info.dtype in POWERS
    if powers and info.shape == (*stack, rows, -(-columns // BLOCK)):
        block = (1, BLOCK)
    of_blocks = (-(-rows // block[0]), -(-columns // block[1]))
    ones = (1, 1)[: max(0, len(info.shape) - len(stack))]
    if info.shape in ((*stack, *of_blocks), (*stack, of_blocks[0], 1, of_blocks[1], 1)):
        shares, scale_shape = block, of_blocks
    elif info.shape == (*stack, rows, 1) or info.shape == (*stack, rows):
        shares, scale_shape = (1, columns), (rows, 1)
    elif info.shape == (*stack, *ones):
        shares, scale_shape = (rows, columns), (1, 1)
    else:
        accepted = f"{(*stack, *of_blocks)}, {(*stack, rows, 1)} or {tuple(stack)}"
        raise parts.error(f"is of shape {info.shape}; accepted is {accepted}, for {shape}", scales)
    parts.ignore(*MEASURED, f"{weight}_activation_scale")
    coding = Coding(8, shares, BFLOAT16 if powers else FLOAT32, codes=FP8)  # bfloat16 holds every power of two

    def read() -> tuple[np.ndarray, Codes]:
        stored = parts.array(scales)
        factors = (stored.view(E8M0) if powers else stored).astype(coding.scale)
        return parts.array(weight), Codes(coding, factors.reshape(*stack, *scale_shape))

    return parts.packed("MXFP8" if shares == (1, BLOCK) and powers else "FP8", shape, coding, read)


def _fp4_matrix(parts: Parts, weight: str) -> Packed:
    rows, nbytes = parts.info(weight, ("U8",), rank=2).shape
    scales = parts.info(".weight_scale", ("F8_E4M3", *POWERS), rank=2)
    coding = MXFP4 if scales.dtype in POWERS else NVFP4
    inputs, size = 2 * nbytes, coding.block[1]
    if scales.shape != (rows, inputs // size) or inputs % size:
        wanted = (rows, f"{inputs} / {size}")
        raise parts.error(f"is of shape {scales.shape}; accepted is [{wanted[0]}, {wanted[1]}]", ".weight_scale")
    inverse = ".weight_global_scale" in parts
    whole_matrix = ".weight_global_scale" if inverse else ".weight_scale_2"
    if coding == NVFP4 and (shape := parts.info(whole_matrix, tuple(FLOATS)).shape) not in ((), (1,)):
        raise parts.error(f"is of shape {shape}; accepted is (1,)", whole_matrix)
    parts.ignore(*MEASURED)

    def read() -> tuple[np.ndarray, Codes]:
        factor, codes = None, unpack(parts.array(weight), 4)
        if coding == NVFP4:
            one = parts.array(whole_matrix).astype(np.float32).reshape(())
            with np.errstate(divide="ignore"):
                factor = np.full(rows, 1 / one if inverse else one, np.float32)
        return codes, Codes(coding, parts.array(".weight_scale").view(coding.scale), factor=factor)

    return parts.packed("MXFP4" if coding == MXFP4 else "NVFP4", (rows, inputs), coding, read)


def find_mxfp4(checkpoint: Checkpoint, config: dict[str, Any]) -> dict[str, Packed]:
    """Every MXFP4 matrix or stack by the name of its codes; files without `_blocks` have transposed matrices."""
    return {f"{parts.name}_blocks": _mxfp4_stack(parts) for parts in matrices(checkpoint, "_blocks", "")}


def _mxfp4_stack(parts: Parts) -> Packed:
    shape = parts.info("_blocks", ("U8",)).shape
    if len(shape) < 3 or shape[-1] != BLOCK // 2:
        raise parts.error(f"is of shape {shape}; accepted is [.., o, i / {BLOCK}, {BLOCK // 2}]", "_blocks")
    *lead, groups, _ = shape
    parts.info("_scales", ("U8",), (*lead, groups))

    def read() -> tuple[np.ndarray, Codes]:
        codes = unpack(parts.array("_blocks"), 4).reshape(*lead, groups * BLOCK)
        return codes, Codes(MXFP4, parts.array("_scales").view(E8M0))

    return parts.packed("MXFP4", (*lead, groups * BLOCK), MXFP4, read)
