"""Which rows of a step are patched, and with what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.engine.work import Chunk


class RowPatch(NamedTuple):
    """One row of a step's tokens that gets another value as it leaves a layer."""

    row: int
    layer: int
    value: np.ndarray


def step_patches(chunks: Sequence[Chunk]) -> list[RowPatch]:
    """Those of a step whose tokens are those of `chunks`, one after another."""
    found, row = [], 0
    for chunk in chunks:
        patching = chunk.request.patching
        for index in chunk.patches:
            assert patching is not None, "it has patches"
            position, layer = patching.places[index]
            found.append(RowPatch(row + position - chunk.start, layer, patching.rows[index]))
        row += chunk.length
    return found


def fill_patches(fields: dict[str, np.ndarray], patches: Sequence[RowPatch]) -> None:
    """Tell a step where its patches go; those that are left over go to no layer."""
    fields["patch_layers"][:] = -1
    fields["patch_layers"][: len(patches)] = [patch.layer for patch in patches]
    fields["patch_rows"][: len(patches)] = [patch.row for patch in patches]


def patch_values(patches: Sequence[RowPatch], room: int) -> np.ndarray:
    """Their values, float32 `[room, E]`; the rest are zeros."""
    values = np.zeros((room, len(patches[0].value)), np.float32)
    values[: len(patches)] = [patch.value for patch in patches]
    return values
