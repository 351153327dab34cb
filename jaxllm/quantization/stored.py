"""A tensor as its file has it."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np

from jaxllm.quantization.fp8_blocks import dequantize_fp8
from jaxllm.quantization.gguf_blocks import dequantize

GGUF_FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
"""GGUF's types that are no blocks."""


class Stored(NamedTuple):
    """A checkpoint's bytes of one tensor and what they mean; nothing is expanded yet.

    Attributes:
        data: `shape` numbers in their stored type; where they are `packed`, in GGUF's blocks, `[bytes]` uint8.
        dtype: the format's own name of the type: `F32`, `Q4_K`, `F8_E4M3`, …
        shape: `[out, in]`, outermost first.
        scale: of FP8 with one a block: float32 `[ceil(o / rows), ceil(i / columns)]`.
        scale_block: rows and columns that share a scale.
    """

    data: np.ndarray
    dtype: str
    shape: tuple[int, ...]
    packed: bool = False
    scale: np.ndarray | None = None
    scale_block: tuple[int, int] = (1, 1)

    def expand(self) -> np.ndarray:
        """The tensor's numbers: in their stored type, or as float32 where they were quantized.

        Raises:
            CheckpointError: the type is unknown, or the bytes are not as many as the shape asks for.
        """
        if self.scale is not None:
            return dequantize_fp8(self.data, self.scale, self.scale_block)
        return dequantize(self.data, self.dtype, self.shape) if self.packed else self.data
