"""A tensor as its file has it, in host memory: numbers, GGUF's blocks, or codes and what they stand for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.pallas_kernels.matrices import E2M1

UINT8, INT8 = np.dtype(np.uint8), np.dtype(np.int8)
FP8, E8M0 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e8m0fnu)


@dataclass(frozen=True)
class Coding:
    """What a checkpoint says of a matrix's codes before any of them is read.

    Attributes:
        bits: of a code.
        block: rows and columns that share a scale; those at the edges may be smaller.
        scale: type of the scales.
        symmetric: whether `middle` stands for 0; else every block has a code of its own that does.
        levels: what each code stands for, where that is not the code itself.
        codes: type of the codes: uint8, or int8 and float8_e4m3fn, which stand for themselves.
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
        return 0 if self.levels or self.codes != UINT8 else 1 << (self.bits - 1)

    @property
    def factored(self) -> bool:
        """Whether scales are so narrow that each row has a factor for all of its own, as in NVFP4."""
        return self.scale == FP8

    @property
    def of_rows(self) -> bool:
        """Whether each row has one scale, however long it is: a weight's blocks are `(1, 0)` then."""
        return not self.block[1]

    @property
    def of_blocks(self) -> bool:
        """Whether blocks may have several rows, which a weight keeps together."""
        return self.codes == FP8 and not self.of_rows


NVFP4 = Coding(4, (1, 16), FP8, levels=E2M1)
"""Floats of four bits whose scales are floats of eight."""


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
        factor: float32 `[*stack, o]`, by which each row's scales are multiplied; None where they are not (`factored`).
        zero: uint8, likewise; None where blocks are symmetric.
        order: int32 `[*stack, i]`: column `j` of the codes is input `order[j]`; None where they lie as inputs do.
    """

    coding: Coding
    scale: np.ndarray
    zero: np.ndarray | None = None
    order: np.ndarray | None = None
    factor: np.ndarray | None = None

    def scales(self, shape: tuple[int, ...], block: tuple[int, int]) -> np.ndarray:
        """The scales of a matrix of `shape` for smaller blocks, which divide the own ones."""
        return self._spread(self.scale, shape, block)

    def zeros(self, shape: tuple[int, ...], block: tuple[int, int]) -> np.ndarray:
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
        values = values if self.factor is None else values * self.factor[..., None]
        if self.order is None:
            return values
        return np.take_along_axis(values, np.argsort(self.order, axis=-1)[..., None, :], -1)

    def rows(self, index: slice, axis: int, shape: tuple[int, ...]) -> Codes:
        """Of some of a matrix's rows, or of some matrices."""
        block = (1, self.coding.block[1])  # rows need not be whole blocks
        at = (slice(None),) * axis + (index,)
        scale = self.scales(shape, block)[at]
        zero = None if self.zero is None else self._spread(self.zero, shape, block)[at]
        order = self.order if self.order is None or axis == len(shape) - 2 else self.order[at]
        factor = None if self.factor is None else self.factor[at]
        return Codes(replace(self.coding, block=block), scale, zero, order, factor)


def unpacked(codes: Any, bits: int) -> Any:
    """`[*n, bytes]` -> `[*n, 8 / bits, bytes]`, of NumPy or JAX: the lowest bits of all bytes come first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (codes[..., None, :] >> shifts) & np.uint8((1 << bits) - 1)


def packed(codes: Any, bits: int) -> Any:
    """The inverse of `unpacked`, of codes that have no other bits."""
    shifts = np.arange(0, 8, bits, dtype=codes.dtype)[:, None]
    return (codes << shifts).sum(-2, dtype=codes.dtype)


def dequantize(data: np.ndarray, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor of GGML type `dtype` as float32. Raises CheckpointError: unknown type, or bytes of another length."""
    from gguf import GGMLQuantizationType, quants

    try:
        return quants.dequantize(data.reshape(*shape[:-1], -1), GGMLQuantizationType[dtype]).reshape(shape)
    except (KeyError, NotImplementedError):
        raise CheckpointError(f"GGML type {dtype} cannot be dequantized") from None
    except ValueError:
        raise CheckpointError(f"{data.size:,} bytes are no {dtype} tensor of shape {shape}") from None


FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
"""Types of floats, as GGUF and safetensors call them; GGUF's others are blocks."""


class Stored(NamedTuple):
    """A checkpoint's bytes of one tensor and what they mean; nothing is expanded yet.

    Attributes:
        data: `shape` numbers in their stored type, or codes for them; where they are `packed`, uint8 of any shape:
            GGUF's blocks, or where there are `codes`, several of those in a byte, as a weight of groups has them.
        dtype: the format's own name of the type: `F32`, `Q4_K`, `F8_E4M3`, …
        shape: `[out, in]`, outermost first.
        codes: what `data` stands for, where it is codes.
        importance: `[i]`, or `[experts, i]`: how much an error of each input counts where it is quantized.
        origin: file and name, for errors.
    """

    data: np.ndarray
    dtype: str
    shape: tuple[int, ...]
    packed: bool = False
    codes: Codes | None = None
    importance: np.ndarray | None = None
    origin: str = "a tensor"

    @property
    def by_rows(self) -> np.ndarray:
        """Row by row: uint8 `[*shape[:-1], bytes of a row]` where they are packed; else the numbers or codes."""
        return self.data.reshape(*self.shape[:-1], -1) if self.packed else self.data

    def with_rows(self, rows: np.ndarray) -> Stored:
        """A tensor of the same type made of other rows, which are as `by_rows` gives them."""
        return self._replace(data=rows, shape=(*rows.shape[:-1], self.shape[-1] if self.packed else rows.shape[-1]))

    def split(self, sizes: Sequence[int], axis: int) -> list[Stored]:
        """Parts of `sizes` along an axis that is not the inputs', nothing expanded."""
        ends = np.cumsum(sizes)
        parts = []
        for start, end in zip(ends - sizes, ends, strict=True):
            index = slice(int(start), int(end))
            part = self.with_rows(self.by_rows[(slice(None),) * axis + (index,)])
            parts.append(part if self.codes is None else part._replace(codes=self.codes.rows(index, axis, self.shape)))
        return parts

    def plain(self) -> Stored:
        values = self.expand()
        return Stored(values, "F32", values.shape, importance=self.importance, origin=self.origin)

    def expand(self) -> np.ndarray:
        """The numbers: in their stored type, or as float32 where they were quantized. Raises as `dequantize`."""
        if self.codes is not None:
            return self.codes.values(self.unpacked().data)
        if not self.packed:
            return self.data
        try:
            return dequantize(np.ravel(self.data), self.dtype, self.shape)
        except CheckpointError as error:
            raise CheckpointError(f"{self.origin}: {error}") from None

    def unpacked(self) -> Stored:
        """The same with each code by itself, where several were in a byte."""
        if self.codes is None or not self.packed:
            return self
        data = self.data.reshape(*self.codes.scale.shape, -1)
        return self._replace(data=unpacked(data, self.codes.coding.bits).reshape(self.shape), packed=False)

    def finite(self) -> np.ndarray:
        """The numbers as float32, to be quantized. Raises CheckpointError: as `expand`, or some are infinite or NaN."""
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
    if not codes:
        return whole
    order = None
    if any(part.order is not None for part in codes):
        natural = np.arange(first.shape[-1], dtype=np.int32)
        order = np.stack([natural if part.order is None else part.order for part in codes])
    zeros = [part.zero for part in codes if part.zero is not None]
    factors = [part.factor for part in codes if part.factor is not None]
    zero, factor = (np.stack(arrays) if arrays else None for arrays in (zeros, factors))
    return whole._replace(codes=Codes(codes[0].coding, np.stack([part.scale for part in codes]), zero, order, factor))


def transformed(tensors: Sequence[Stored], transform: Callable[..., np.ndarray], *, by_rows: bool) -> Stored:
    """One tensor made of some; still in GGUF's blocks, or codes, where `transform` only moves whole rows of those."""
    first = tensors[0]
    if by_rows and len(tensors) == 1 and first.codes is not None and first.codes.coding.block[0] == 1:
        kept = first.codes
        assert kept.order is None
        zero = None if kept.zero is None else transform(kept.zero)
        factor = None if kept.factor is None else transform(kept.factor[..., None])[..., 0]
        codes = replace(kept, scale=transform(kept.scale), zero=zero, factor=factor)
        return first.with_rows(transform(first.by_rows))._replace(codes=codes)
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
