"""Which kind a weight is kept as: by the names that `--isq` takes, or by how a checkpoint is coded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from jaxllm.quantization.coded import FLOAT16, OrderedKind, fp8_blocks, groups, per_channel
from jaxllm.quantization.gguf_encode import ENCODERS
from jaxllm.quantization.gguf_weight import BLOCK, GgufKind, block_type
from jaxllm.quantization.stored import FP8, INT8, UINT8, Coding
from jaxllm.quantization.weight import DenseKind, WeightKind

SCHEMES: dict[str, Callable[[np.dtype], WeightKind]] = {
    **{type.lower().replace("_k", "k"): partial(GgufKind, type) for type in ENCODERS},
    "int8": partial(per_channel, INT8),
    "int4": groups,
    "fp8": partial(per_channel, FP8),
    "w8a8": partial(per_channel, INT8, activations=True),
}
"""What a weight may be quantized to, made for a model that computes in a type."""

BLOCKS = {name: kind for name, make in SCHEMES.items() if isinstance(kind := make(np.dtype(np.float32)), GgufKind)}
"""The GGUF schemes among them."""

KEPT = "none"
"""The scheme that leaves a weight as the checkpoint has it."""

AT_THE_ENDS = dict.fromkeys(("q4_0", "q4_1", "q5_0", "q5_1", "q2k", "q3k", "q4k", "q5k"), "q6k") | {
    "int4": "int8",
    "w8a8": "int8",
}
"""What embedding and head take instead of a scheme: every error there meets every token. Others take the scheme."""

SMALLER_BLOCKS = {"q2k": "q4_0", "q3k": "q4_0", "q4k": "q5_1", "q5k": "q5_1", "q6k": "q8_0"}
"""What stands in where rows are no whole number of blocks of 256."""

RECODED = dict.fromkeys(("IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0"), "q2k") | {
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S"), "q3k"),
    **dict.fromkeys(("IQ3_XXS", "IQ3_S"), "q4k"),
    "IQ4_XS": "q5k",
    "IQ4_NL": "q5_0",
}
"""GGUF types that are encoded anew, and as what: with about a bit more, so that it costs little quality."""

RECODED_OTHERS = "q8_0"
"""What all other types become, and tensors that are transposed on the way."""


def fitting(scheme: str, inputs: int, dtype: np.dtype) -> WeightKind:
    """The kind that `scheme` means for rows, or a device's parts of rows, of `inputs` numbers."""
    kind = SCHEMES[scheme](dtype)
    if inputs % kind.block == 0:
        return kind
    return fitting(SMALLER_BLOCKS[scheme], inputs, dtype) if scheme in SMALLER_BLOCKS else DenseKind(dtype)


def coded_kind(
    coding: Coding, dtype: np.dtype, rows: Sequence[int], inputs: int, *, devices: int = 1, blocks: bool = False
) -> WeightKind:
    """What keeps codes of `coding`, for a model that computes in `dtype`.

    Args:
        rows: of each segment on a device, and as stored: numbers that blocks of rows must divide.
        inputs: of the matrix, which are divided over `devices`. Where that parts a group, each part has its scale.
        blocks: whether GGUF's blocks are preferred where they hold the same numbers: the C++ kernels compute on those.
    """
    here, whole_rows = inputs // devices, coding.block[1] >= inputs
    group = here if whole_rows else math.gcd(coding.block[1], here)
    int8 = whole_rows and coding.codes == UINT8 and coding.bits == 8 and coding.symmetric and not coding.levels
    kind: WeightKind
    if coding.codes == FP8 and whole_rows:
        kind = per_channel(FP8, dtype)
    elif coding.codes == FP8:
        kind = fp8_blocks(dtype, math.gcd(coding.block[0], *rows), group, coding.scale)
    elif int8:
        kind = per_channel(INT8, dtype, coding.activations)
    elif blocks and here % BLOCK == 0 and (type_ := block_type(coding)):
        has_zeros = not (coding.symmetric or coding.levels) and coding.scale == FLOAT16
        kind = groups(dtype, block=BLOCK) if has_zeros and coding.bits == 4 else GgufKind(type_, dtype)
    else:
        bits = 4 if coding.bits == 3 else coding.bits
        packs = group * bits % 8 == 0  # else the shard that parts a group so is refused
        symmetric = coding.symmetric or bool(coding.levels)
        kind = groups(dtype, bits, group if packs else coding.block[1], symmetric, coding.scale, coding.levels)
    return OrderedKind(kind, coding.order, divided=devices > 1) if coding.order else kind
