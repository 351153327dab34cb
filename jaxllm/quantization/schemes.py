"""The names of kinds of weight, as `--isq` takes them, and what stands in for a kind that does not fit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxllm.quantization.coded import FP8
from jaxllm.quantization.gguf_weight import GgufKind
from jaxllm.quantization.groups import GroupsKind
from jaxllm.quantization.per_channel import INT8, PerChannelKind
from jaxllm.quantization.weight import DenseKind, WeightKind

SCHEMES: dict[str, Callable[[np.dtype], WeightKind]] = {
    "q4_0": lambda dtype: GgufKind("Q4_0", dtype),
    "q4_1": lambda dtype: GgufKind("Q4_1", dtype),
    "q5_0": lambda dtype: GgufKind("Q5_0", dtype),
    "q5_1": lambda dtype: GgufKind("Q5_1", dtype),
    "q8_0": lambda dtype: GgufKind("Q8_0", dtype),
    "q2k": lambda dtype: GgufKind("Q2_K", dtype),
    "q3k": lambda dtype: GgufKind("Q3_K", dtype),
    "q4k": lambda dtype: GgufKind("Q4_K", dtype),
    "q5k": lambda dtype: GgufKind("Q5_K", dtype),
    "q6k": lambda dtype: GgufKind("Q6_K", dtype),
    "int8": lambda dtype: PerChannelKind(INT8, dtype),
    "int4": lambda dtype: GroupsKind(dtype),
    "fp8": lambda dtype: PerChannelKind(FP8, dtype),
    "w8a8": lambda dtype: PerChannelKind(INT8, dtype, activations=True),
}
"""What a weight may be quantized to, made for a model that computes in a type."""

BLOCKS = {name: kind for name, make in SCHEMES.items() if isinstance(kind := make(np.dtype(np.float32)), GgufKind)}
"""Of those, the ones that GGUF has."""

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
