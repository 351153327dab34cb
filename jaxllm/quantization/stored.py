"""A tensor as its file has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.quantization.coded import Codes, common_coding, stacked
from jaxllm.quantization.gguf_blocks import dequantize

GGUF_FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
"""GGUF's types that are no blocks."""


class Stored(NamedTuple):
    """A checkpoint's bytes of one tensor and what they mean; nothing is expanded yet.

    Attributes:
        data: `shape` numbers in their stored type, or codes for them; where they are `packed`, in GGUF's blocks, uint8
            of any shape.
        dtype: the format's own name of the type: `F32`, `Q4_K`, `F8_E4M3`, …
        shape: `[out, in]`, outermost first.
        codes: what `data` stands for, where it is codes.
        weight: of a kind that is more than one array, the Weight itself, in host memory; `data` is its first array.
        importance: `[i]`, or `[experts, i]`: how much an error of each input counts where it is quantized.
        origin: file and name, for errors.
    """

    data: np.ndarray
    dtype: str
    shape: tuple[int, ...]
    packed: bool = False
    codes: Codes | None = None
    weight: Any = None
    importance: np.ndarray | None = None
    origin: str = "a tensor"

    @property
    def by_rows(self) -> np.ndarray:
        """Row by row: uint8 `[*shape[:-1], bytes of a row]` of GGUF's blocks; of anything else the numbers or codes."""
        return self.data.reshape(*self.shape[:-1], -1) if self.packed else self.data

    def with_rows(self, rows: np.ndarray) -> Stored:
        """A tensor of the same type made of other rows, which are as `by_rows` gives them."""
        return self._replace(data=rows, shape=(*rows.shape[:-1], self.shape[-1] if self.packed else rows.shape[-1]))

    def split(self, sizes: Sequence[int], axis: int) -> list[Stored]:
        """Parts of `sizes` along an axis that is not the inputs', nothing expanded."""
        ends = np.cumsum(sizes)
        if self.weight is not None:
            leaves, tree = jax.tree.flatten(self.weight)
            pieces = zip(*(np.split(leaf, ends[:-1], axis) for leaf in leaves), strict=True)
            weights = [jax.tree.unflatten(tree, piece) for piece in pieces]
            return [self._replace(data=jax.tree.leaves(w)[0], shape=w.shape, weight=w) for w in weights]
        parts = []
        for start, end in zip(ends - sizes, ends, strict=True):
            index = slice(int(start), int(end))
            part = self.with_rows(self.by_rows[(slice(None),) * axis + (index,)])
            parts.append(part if self.codes is None else part._replace(codes=self.codes.rows(index, axis, self.shape)))
        return parts

    def plain(self) -> Stored:
        """The same, expanded."""
        values = self.expand()
        return Stored(values, "F32", values.shape, importance=self.importance, origin=self.origin)

    def expand(self) -> np.ndarray:
        """The tensor's numbers: in their stored type, or as float32 where they were quantized.

        Raises:
            CheckpointError: the type is unknown, or the bytes are not as many as the shape asks for.
        """
        if self.weight is not None:
            return np.asarray(jax.tree.map(jnp.asarray, self.weight).dequantize())
        if self.codes is not None:
            return self.codes.values(self.data)
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


def stack(tensors: Sequence[Stored]) -> Stored:
    """One on top of the other; they are of one shape. Those of several types are expanded."""
    first = tensors[0]
    codings = [None if tensor.codes is None else tensor.codes.coding for tensor in tensors]
    alike = common_coding(codings) is not None or not any(codings)
    if not alike or any(tensor.dtype != first.dtype for tensor in tensors):
        tensors = [tensor.plain() for tensor in tensors]
    whole = tensors[0].with_rows(np.stack([tensor.by_rows for tensor in tensors]))
    importance = [tensor.importance for tensor in tensors if tensor.importance is not None]
    whole = whole._replace(importance=np.stack(importance) if len(importance) == len(tensors) else None)
    codes = [tensor.codes for tensor in tensors if tensor.codes is not None]
    return whole._replace(codes=stacked(codes, first.shape[-1])) if codes else whole


def transformed(tensors: Sequence[Stored], transform: Callable[..., np.ndarray], *, by_rows: bool) -> Stored:
    """One tensor made of some; still in GGUF's blocks, or codes, where `transform` only moves whole rows of those."""
    first = tensors[0]
    if by_rows and len(tensors) == 1 and first.codes is not None and first.codes.coding.block[0] == 1:
        rows = first.with_rows(transform(first.data))
        return rows._replace(codes=first.codes.moved(transform))
    if not (by_rows and all(t.packed and t.dtype == first.dtype for t in tensors)):
        tensors = [tensor.plain() for tensor in tensors]
    if not by_rows:  # the inputs are others
        tensors = [tensor._replace(importance=None) for tensor in tensors]
    return tensors[0].with_rows(transform(*(tensor.by_rows for tensor in tensors)))


def with_moved_blocks(tensor: Stored, transform: Callable[..., np.ndarray], elements: int) -> Stored:
    """A matrix whose blocks of so many elements are moved along its rows by `transform(blocks, columns=elements)`."""
    blocks = tensor.by_rows.reshape(*tensor.shape[:-1], tensor.shape[-1] // elements, -1)
    moved = transform(blocks.swapaxes(-1, -2), columns=elements).swapaxes(-1, -2)
    rows = np.ascontiguousarray(moved).reshape(*tensor.shape[:-1], -1)
    return tensor.with_rows(rows)._replace(importance=None)
