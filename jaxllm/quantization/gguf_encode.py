"""From floats to GGUF's blocks, of any type that weights are kept in."""

from __future__ import annotations

import numpy as np

from jaxllm.quantization.encode_k import K_ENCODERS, encode_k
from jaxllm.quantization.gguf_decode import FORMATS


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """Finite floats `[*stack, o, i]` -> uint8 `[*stack, o, i / elements, bytes]`, blocks of GGML type `dtype`."""
    from gguf import GGMLQuantizationType, quants

    elements, nbytes, *_ = FORMATS[dtype]
    *lead, inputs = values.shape
    rows = np.ascontiguousarray(values, np.float32).reshape(-1, elements)
    blocks = encode_k(rows, dtype) if dtype in K_ENCODERS else quants.quantize(rows, GGMLQuantizationType[dtype])
    return blocks.reshape(*lead, inputs // elements, nbytes)
