"""Marlin's order of four-bit weights, in which a GPU's tensor cores take them (arXiv:2408.11743, section 3.4).

    weights  int32 [i / 16, 2 o]   tiles of 16 inputs by 64 outputs, each in the order below; symmetric about 8
    scales   float16 [i / group, o]    in an order of their own

Published at https://github.com/IST-DASLab/marlin
"""

from __future__ import annotations

import numpy as np

from jaxllm.quantization.stored import Codes, Coding
from jaxllm.weights.packings.module import Packed, Parts, unpack

TILE, WIDTH = 16, 64
"""Inputs and outputs of a tile."""


def marlin(parts: Parts, weights: str, scales: str, group_size: int) -> Packed:
    """The matrix whose tensors are called so."""
    rows, columns = parts.info(weights, ("I32",), rank=2).shape
    inputs, outputs = rows * TILE, columns // 2
    if columns % (2 * WIDTH) or not outputs:
        raise parts.error(f"has {outputs} outputs, in Marlin's order; accepted is a multiple of {WIDTH}")
    group = inputs if group_size == -1 else group_size
    if inputs % group:
        raise parts.error(f"has {inputs} inputs, which groups of {group} (group_size) do not divide")
    parts.expect(scales, ("F16",), (inputs // group, outputs))
    parts.ignore(".workspace")
    coding = Coding(4, (1, group), np.dtype(np.float16))

    def read() -> tuple[np.ndarray, Codes]:
        order = SCALES if group < inputs else WHOLE_ROW_SCALES
        scale = _undone(parts.array(scales), order)
        tiles = _undone(unpack(parts.array(weights), 4), CODES).reshape(rows, outputs // TILE, TILE, TILE)
        codes = tiles.transpose(1, 3, 0, 2).reshape(outputs, inputs)  # [i / 16, o / 16, 16 i, 16 o] before
        return codes, Codes(coding, scale.reshape(-1, outputs).T)

    return parts.packed("Marlin 4-bit", (outputs, inputs), coding, read)


def _undone(array: np.ndarray, order: np.ndarray) -> np.ndarray:
    """What was laid out in `order`, chunk by chunk, as it was before."""
    return array.reshape(-1, len(order))[:, np.argsort(order)]


def _codes() -> np.ndarray:
    """Where a tile's codes come from: eight of a 16 x 16 part for each of a warp's 32 lanes, in turn of four parts.

    A lane holds two rows of each 8 x 8 quarter in a column of each half; a word's nibbles are taken evens first.
    """
    lane, part = np.arange(32), np.arange(4)
    row = 2 * (lane % 4)[:, None, None] + np.array([0, 1, 8, 9])
    column = (lane // 4)[:, None, None] + np.array([0, 8])[:, None]
    eight = (TILE * row + column).reshape(32, 1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
    return (eight + TILE * TILE * part[:, None]).ravel()


CODES = _codes()
SCALES = np.arange(64).reshape(8, 8).T.ravel()
WHOLE_ROW_SCALES = (2 * np.arange(4)[:, None] + np.array([0, 1, 8, 9, 16, 17, 24, 25])).ravel()
