"""MXFP4 (OCP Microscaling Formats 1.0) as gpt-oss is published: blocks of 32 four-bit floats that share a power of two.

    NAME_blocks  uint8 [*stack, o, i / 32, 16]   two numbers a byte, the lower bits first
    NAME_scales  uint8 [*stack, o, i / 32]       exponents, with 127 for 1

Published at https://huggingface.co/openai/gpt-oss-20b
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from jaxllm.quantization.stored import Codes, Coding
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.packings.module import Packed, Parts, modules, unpack

BLOCK = 32
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


def find(checkpoint: Checkpoint, config: dict[str, Any]) -> dict[str, Packed]:
    """Every MXFP4 matrix, or stack of them, by the name of its codes.

    What has the name without `_blocks` in other files of gpt-oss lies transposed there.
    """
    return {f"{name}_blocks": _matrix(Parts(checkpoint, name, name)) for name in modules(checkpoint, "_blocks")}


def _matrix(parts: Parts) -> Packed:
    shape = parts.info("_blocks", ("U8",)).shape
    if len(shape) < 3 or shape[-1] != BLOCK // 2:
        raise parts.error(f"is of shape {shape}; accepted is [.., o, i / {BLOCK}, {BLOCK // 2}]", "_blocks")
    *lead, groups, _ = shape
    parts.expect("_scales", ("U8",), (*lead, groups))
    coding = Coding(4, (1, BLOCK), E8M0, levels=LEVELS)

    def read() -> tuple[np.ndarray, Codes]:
        codes = unpack(parts.array("_blocks"), 4).reshape(*lead, groups * BLOCK)
        return codes, Codes(coding, parts.array("_scales").view(E8M0))

    return parts.packed("MXFP4", (*lead, groups * BLOCK), coding, read)
