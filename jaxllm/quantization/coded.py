"""Matrices as quantized checkpoints hold them: a code for each number, and what codes stand for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

UINT8, FP8 = np.dtype(np.uint8), np.dtype(ml_dtypes.float8_e4m3fn)


@dataclass(frozen=True)
class Coding:
    """What a checkpoint says of a matrix's codes before any of them is read.

    Attributes:
        bits: of a code.
        block: rows and columns that share a scale; those at the edges may be smaller.
        scale: type of the scales.
        symmetric: whether `middle` stands for 0; else every block has a code of its own that does.
        levels: what each code stands for, where that is not the code itself.
        codes: type of the codes: uint8, or float8_e4m3fn, which stand for themselves.
        order: the name (`order_name`) of the order that inputs were sorted into before they were cut into blocks
            (act-order); empty where they were not sorted.
        activations: whether the checkpoint is made for inputs that are rounded to int8 as well.
    """

    bits: int
    block: tuple[int, int]
    scale: np.dtype
    symmetric: bool = True
    levels: tuple[float, ...] = ()
    codes: np.dtype = UINT8
    order: str = ""
    activations: bool = False

    @property
    def middle(self) -> int:
        """The code of 0 in symmetric blocks."""
        return 0 if self.levels or self.codes == FP8 else 1 << (self.bits - 1)


def order_name(order: np.ndarray | None) -> str:
    """A name that equal orders of inputs share and no others have; empty where there is no order."""
    return "" if order is None else hashlib.sha256(order.astype("<i4").tobytes()).hexdigest()[:16]


def common_coding(codings: Sequence[Coding | None]) -> Coding | None:
    """The one coding of tensors that are stacked, each of which may have an order of its own, or none; else None."""
    first = codings[0]
    if first is None or any(coding is None or replace(coding, order=first.order) != first for coding in codings):
        return None
    orders = [coding.order for coding in codings if coding is not None]
    if len(set(orders)) == 1:
        return first
    return replace(first, order=hashlib.sha256(" ".join(orders).encode()).hexdigest()[:16])


@dataclass(frozen=True)
class Codes:
    """What the codes `[*stack, o, i]` of a matrix stand for: `(code - zero) * scale`, or `levels[code] * scale`.

    Attributes:
        scale: `[*stack, ceil(o / rows), ceil(i / columns)]` for blocks of `rows` by `columns`.
        zero: uint8, likewise; None where blocks are symmetric.
        order: int32 `[*stack, i]`: column `j` of the codes is input `order[j]`; None where they lie as inputs do.
    """

    coding: Coding
    scale: np.ndarray
    zero: np.ndarray | None = None
    order: np.ndarray | None = None

    def scales(self, shape: tuple[int, ...], block: tuple[int, int]) -> np.ndarray:
        """The scales of a matrix of `shape` for smaller blocks, which divide the own ones."""
        return self._spread(self.scale, shape, block)

    def zeros(self, shape: tuple[int, ...], block: tuple[int, int]) -> np.ndarray:
        """The codes that stand for 0, likewise."""
        if self.zero is not None:
            return self._spread(self.zero, shape, block)
        rows, columns = (-(-size // step) for size, step in zip(shape[-2:], block, strict=True))
        return np.full((*shape[:-2], rows, columns), self.coding.middle, np.uint8)

    def _spread(self, array: np.ndarray, shape: tuple[int, ...], block: tuple[int, int]) -> np.ndarray:
        for axis, own, step in zip((-2, -1), self.coding.block, block, strict=True):
            if own != step:
                array = array.take(np.arange(0, shape[axis], step) // own, axis)
        return array

    def values(self, codes: np.ndarray) -> np.ndarray:
        """The matrix as float32, its columns in the order of inputs."""
        columns = self.coding.block[1]
        step = columns if codes.shape[-1] % columns == 0 else 1
        groups = codes.reshape(*codes.shape[:-1], -1, step)
        scale = self.scales(codes.shape, (1, step)).astype(np.float32)[..., None]
        if self.coding.levels:
            values = np.asarray(self.coding.levels, np.float32)[groups]
        else:
            values = groups.astype(np.float32)
            values -= self.zeros(codes.shape, (1, step)).astype(np.float32)[..., None]
        values = (values * scale).reshape(codes.shape)
        return values if self.order is None else np.take_along_axis(values, _inverse(self.order)[..., None, :], -1)

    def moved(self, transform: Callable[[np.ndarray], np.ndarray]) -> Codes:
        """Of the same rows elsewhere, of a coding that has scales for each row."""
        assert self.coding.block[0] == 1 and self.order is None
        return replace(self, scale=transform(self.scale), zero=None if self.zero is None else transform(self.zero))

    def rows(self, index: slice, axis: int, shape: tuple[int, ...]) -> Codes:
        """Of some of a matrix's rows, or of some matrices."""
        block = (1, self.coding.block[1])  # rows need not be whole blocks
        at = (slice(None),) * axis + (index,)
        scale = self.scales(shape, block)[at]
        zero = None if self.zero is None else self._spread(self.zero, shape, block)[at]
        order = self.order if self.order is None or axis == len(shape) - 2 else self.order[at]
        return Codes(replace(self.coding, block=block), scale, zero, order)


def stacked(parts: list[Codes], inputs: int) -> Codes:
    """Of a stack of matrices of one coding, but for their order."""
    first = parts[0]
    zeros = [part.zero for part in parts if part.zero is not None]
    order = None
    if any(part.order is not None for part in parts):
        natural = np.arange(inputs, dtype=np.int32)
        order = np.stack([natural if part.order is None else part.order for part in parts])
    return Codes(first.coding, np.stack([part.scale for part in parts]), np.stack(zeros) if zeros else None, order)


def _inverse(order: np.ndarray) -> np.ndarray:
    return np.argsort(order, axis=-1)
