"""From floats to GGUF's blocks, of any type that weights are kept in."""

from __future__ import annotations

from collections.abc import Callable
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
"""What makes blocks `[n, bytes]` of each type of their weights `[n, elements]`, and of how much each counts."""

IMPORTANCE: dict[str, tuple[str, int] | None] = {
    "Q6_K": None,
    "Q2_K": ("block", 1),
    **dict.fromkeys(("Q3_K", "Q4_K", "Q5_K"), ("block", 2)),
    **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1"), ("row", 1)),
}
"""What an importance is multiplied by in each type, as llama.cpp has it: the root of the weight's square plus so many
times the mean square of its block or row; None is nothing. Q8_0 has no choice that it could bear on."""

LEAST = 1e-6
"""Of the largest importance: inputs that the text never used still count a little."""

_CHUNK = 1 << 19
"""Weights encoded at a time: always as many, so that there is one shape to compile."""


def encode(values: np.ndarray, dtype: str, importance: np.ndarray | None = None) -> np.ndarray:
    """Finite floats `[*stack, o, i]` -> uint8 `[*stack, o, i / elements, bytes]`, blocks of GGML type `dtype`.

    `importance` `[*stack, i]` is how much an error of each input counts, as an importance matrix has it.
    """
    elements, nbytes, *_ = FORMATS[dtype]
    *lead, inputs = values.shape
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, elements)
    counts = _block_weights(values, dtype, importance) if importance is not None and dtype in IMPORTANCE else None
    out, step = np.empty((len(blocks), nbytes), np.uint8), _CHUNK // elements
    for start in range(0, len(blocks), step):
        part = slice(start, start + step)
        chunk = (blocks[part],) if counts is None else (blocks[part], counts(part))
        found = ENCODERS[dtype](*(np.pad(a, ((0, step - len(a)), (0, 0))) if len(a) < step else a for a in chunk))
        out[part] = np.asarray(found)[: len(chunk[0])]
    return out.reshape(*lead, inputs // elements, nbytes)


def _block_weights(values: np.ndarray, dtype: str, importance: np.ndarray) -> Callable[[slice], np.ndarray]:
    """How much each weight of some blocks counts."""
    elements, rule = FORMATS[dtype].elements, IMPORTANCE[dtype]
    *lead, inputs = values.shape
    a_row, rows = inputs // elements, lead[-1]
    blocks = values.reshape(-1, elements)
    top = importance.max(axis=-1, keepdims=True)
    relative = np.where(top > 0, np.maximum(importance / np.where(top > 0, top, 1), LEAST), 1)
    kinds = relative.astype(np.float32).reshape(-1, elements)  # of each stacked matrix in turn
    squares = np.einsum("...i,...i->...", values, values).reshape(-1) / inputs

    def weights(part: slice) -> np.ndarray:
        numbers = np.arange(len(blocks))[part]
        row = numbers // a_row
        found = kinds[row // rows * a_row + numbers % a_row]
        if rule is None:
            return found
        x2 = np.square(blocks[part])
        whole = squares[row] if rule[0] == "row" else x2.mean(-1)
        return found * np.sqrt(x2 + rule[1] * whole[:, None])

    return weights
