"""A tensor as its file has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.quantization.fp8_blocks import dequantize_fp8
from jaxllm.quantization.gguf_blocks import dequantize

GGUF_FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
"""GGUF's types that are no blocks."""


class Stored(NamedTuple):
    """A checkpoint's bytes of one tensor and what they mean; nothing is expanded yet.

    Attributes:
        data: `shape` numbers in their stored type; where they are `packed`, in GGUF's blocks, uint8 of any shape.
        dtype: the format's own name of the type: `F32`, `Q4_K`, `F8_E4M3`, …
        shape: `[out, in]`, outermost first.
        scale: of FP8 with one a block: float32 `[ceil(o / rows), ceil(i / columns)]`.
        scale_block: rows and columns that share a scale.
        importance: `[i]`, or `[experts, i]`: how much an error of each input counts where it is quantized.
        weight: of a kind that is more than one array, the Weight itself, in host memory; `data` is its first array.
        origin: file and name, for errors.
    """

    data: np.ndarray
    dtype: str
    shape: tuple[int, ...]
    packed: bool = False
    scale: np.ndarray | None = None
    scale_block: tuple[int, int] = (1, 1)
    weight: Any = None
    importance: np.ndarray | None = None
    origin: str = "a tensor"

    @property
    def by_rows(self) -> np.ndarray:
        """Row by row: uint8 `[*shape[:-1], bytes of a row]` of GGUF's blocks; of anything else the numbers."""
        return self.data.reshape(*self.shape[:-1], -1) if self.packed else self.expand()

    def with_rows(self, rows: np.ndarray) -> Stored:
        """A tensor of the same type made of other rows, which are as `by_rows` gives them."""
        if not self.packed:
            return Stored(rows, self.dtype, rows.shape, importance=self.importance, origin=self.origin)
        return self._replace(data=rows, shape=(*rows.shape[:-1], self.shape[-1]))

    def split(self, rows: Sequence[int], axis: int) -> list[Stored]:
        """The tensor cut along `axis` into pieces of so many rows, nothing expanded."""
        ends = np.cumsum(rows)[:-1]
        if self.weight is None:
            return [self.with_rows(part) for part in np.split(self.by_rows, ends, axis)]
        leaves, tree = jax.tree.flatten(self.weight)
        pieces = zip(*(np.split(leaf, ends, axis) for leaf in leaves), strict=True)
        weights = [jax.tree.unflatten(tree, piece) for piece in pieces]
        return [self._replace(data=jax.tree.leaves(w)[0], shape=w.shape, weight=w) for w in weights]

    def expand(self) -> np.ndarray:
        """The tensor's numbers: in their stored type, or as float32 where they were quantized.

        Raises:
            CheckpointError: the type is unknown, or the bytes are not as many as the shape asks for.
        """
        if self.weight is not None:
            return np.asarray(self.weight.dequantize())
        if self.scale is not None:
            return dequantize_fp8(self.data, self.scale, self.scale_block)
        if not self.packed:
            return self.data
        try:
            return dequantize(np.ravel(self.data), self.dtype, self.shape)
        except CheckpointError as error:
            raise CheckpointError(f"{self.origin}: {error}") from None

    def finite(self) -> np.ndarray:
        """The tensor's numbers as float32, to be quantized.

        Raises:
            CheckpointError: as `expand`, or some are infinite or none at all.
        """
        values = np.asarray(self.expand(), np.float32)
        if not np.isfinite(values).all():
            raise CheckpointError(f"{self.origin}: not all numbers are finite, so it cannot be quantized")
        return values
