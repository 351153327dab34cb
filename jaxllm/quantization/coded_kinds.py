"""The kind that keeps a quantized checkpoint's codes as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jaxllm.quantization.coded import FP8, UINT8, Coding
from jaxllm.quantization.coded_blocks import BLOCK, block_type
from jaxllm.quantization.fp8_blocks import Fp8BlocksKind
from jaxllm.quantization.gguf_weight import GgufKind
from jaxllm.quantization.groups import FLOAT16, GroupsKind
from jaxllm.quantization.ordered import OrderedKind
from jaxllm.quantization.per_channel import INT8, PerChannelKind
from jaxllm.quantization.weight import WeightKind


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
        kind = PerChannelKind(FP8, dtype)
    elif coding.codes == FP8:
        kind = Fp8BlocksKind(dtype, math.gcd(coding.block[0], *rows), group)
    elif int8:
        kind = PerChannelKind(INT8, dtype, coding.activations)
    elif blocks and here % BLOCK == 0 and (type_ := block_type(coding)):
        has_zeros = not (coding.symmetric or coding.levels) and coding.scale == FLOAT16
        kind = GroupsKind(dtype, block=BLOCK) if has_zeros and coding.bits == 4 else GgufKind(type_, dtype)
    else:
        bits = 4 if coding.bits == 3 else coding.bits
        packs = group * bits % 8 == 0  # else the shard that parts a group so is refused
        symmetric = coding.symmetric or bool(coding.levels)
        kind = GroupsKind(dtype, bits, group if packs else coding.block[1], symmetric, coding.scale, coding.levels)
    return OrderedKind(kind, coding.order, divided=devices > 1) if coding.order else kind
