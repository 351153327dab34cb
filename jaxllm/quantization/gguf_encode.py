"""From floats to GGUF's blocks, of any type that weights are kept in."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxllm.quantization import encode_blocks, encode_k
from jaxllm.quantization.gguf_decode import FORMATS

ENCODERS: dict[str, Any] = {
    name: jax.jit(encoder)
    for name, encoder in {
        "Q4_0": encode_blocks.q4_0,
        "Q4_1": encode_blocks.q4_1,
        "Q5_0": encode_blocks.q5_0,
        "Q5_1": encode_blocks.q5_1,
        "Q8_0": encode_blocks.q8_0,
        "Q2_K": encode_k.q2_k,
        "Q3_K": encode_k.q3_k,
        "Q4_K": encode_k.q4_k,
        "Q5_K": encode_k.q5_k,
        "Q6_K": encode_k.q6_k,
    }.items()
}
"""What makes blocks `[n, bytes]` of each type of their weights `[n, elements]`."""

_CHUNK = 1 << 19
"""Weights encoded at a time: always as many, so that there is one shape to compile."""


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """Finite floats `[*stack, o, i]` -> uint8 `[*stack, o, i / elements, bytes]`, blocks of GGML type `dtype`."""
    elements, nbytes, *_ = FORMATS[dtype]
    *lead, inputs = values.shape
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, elements)
    out, step = np.empty((len(blocks), nbytes), np.uint8), _CHUNK // elements
    for start in range(0, len(blocks), step):
        chunk = blocks[start : start + step]
        padded = np.pad(chunk, ((0, step - len(chunk)), (0, 0))) if len(chunk) < step else chunk
        out[start : start + step] = np.asarray(ENCODERS[dtype](padded))[: len(chunk)]
    return out.reshape(*lead, inputs // elements, nbytes)
