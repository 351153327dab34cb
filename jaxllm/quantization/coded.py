"""Weights kept as codes: integers or floats of a few bits, with scales for rows, groups or blocks of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int8

from jaxllm.errors import CheckpointError
from jaxllm.pallas_kernels.matrices import RUN, KernelMatrix, PackedMatrix, arranged, quantize_runs
from jaxllm.quantization.gguf_weight import as_codes
from jaxllm.quantization.stored import FP8, INT8, UINT8, Codes, Coding, Stored, packed, unpacked
from jaxllm.quantization.weight import Quantized, Weight, WeightKind, product
from jaxllm.sharding.mesh import Axes, Layout, place

FLOAT16, FLOAT32 = np.dtype(np.float16), np.dtype(np.float32)
LARGEST = {INT8: 127.0, FP8: float(ml_dtypes.finfo(FP8).max)}
"""The largest code of each type: it stands for the largest weight of a channel."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Coded(Quantized):
    """`(code - zero) * scale`, or `levels[code] * scale`.

    Attributes:
        codes: where whole rows share a scale `[*stack, o, i]`, where blocks of rows do `[*stack, o / rows, rows, i]`;
            of groups uint8 `[*stack, o, i / group, group * bits / 8]`: of four bits, low ones are a group's first half,
            high ones its second.
        scale: floats `[*stack, o]`, `[*stack, o / rows, i / columns]` or `[*stack, o, i / group]`.
        zero: uint8, as `scale`; None where codes are symmetric, about the middle one.
        factor: float32 `[*stack, o]`, by which each row's scales are multiplied; None unless the coding is `factored`.
        coding: what they are. Blocks of `(1, 0)` are whole rows; only codes of e4m3 may have blocks of rows.
        dtype: of the numbers that `rows` and `dequantize` give.
    """

    codes: Any
    scale: Any
    zero: Any
    coding: Coding = field(metadata={"static": True})
    dtype: np.dtype = field(metadata={"static": True})
    factor: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        if self.coding.of_rows:
            return self.codes.shape
        *lead, groups, size = self.codes.shape
        if self.coding.of_blocks:
            return (*lead[:-1], lead[-1] * groups, size)
        return (*lead, groups * size * 8 // self.coding.bits)

    @property
    def rows_together(self) -> int:
        return self.codes.shape[-2] if self.coding.of_blocks else 1

    def dequantize(self) -> Float[Array, "*stack o i"]:
        if self.coding.of_blocks:
            codes = self.codes.astype(jnp.float32)
            codes = codes.reshape(*self.scale.shape[:-1], self.rows_together, self.scale.shape[-1], -1)
            return (codes * self.scale[..., None, :, None]).reshape(self.shape).astype(self.dtype)
        if self.coding.of_rows:
            return (self.codes.astype(jnp.float32) * self.scale[..., None]).astype(self.dtype)
        codes = unpacked(self.codes, self.coding.bits).reshape(*self.scale.shape, -1)
        if self.coding.levels:
            values = jnp.asarray(self.coding.levels, jnp.float32)[codes]
        else:
            zero = self.coding.middle if self.zero is None else self.zero.astype(jnp.float32)[..., None]
            values = codes.astype(jnp.float32) - zero
        values = (values * self.scale.astype(jnp.float32)[..., None]).reshape(self.shape)
        values = values if self.factor is None else values * self.factor[..., None]
        return values.astype(self.dtype)

    def axes(self, axes: Axes) -> list[Axes]:
        if self.coding.of_rows:
            return [axes, axes[:-1]]
        codes = (*axes[:-1], None, axes[-1]) if self.coding.of_blocks else (*axes, None)
        zero, factor = [axes] * (self.zero is not None), [axes[:-1]] * (self.factor is not None)
        return [codes, axes, *zero, *factor]

    @property
    def kernel_matrices(self) -> tuple[KernelMatrix, ...] | None:
        coding, (*outputs, inputs) = self.coding, self.shape
        if coding.factored:
            return None
        scale = self.scale[..., None] if coding.of_rows else self.scale
        return (
            KernelMatrix(
                self.codes if coding.of_rows else self.codes.reshape(*outputs, -1),
                self.dtype,
                scale,
                self.zero,
                scale_rows=self.rows_together,
                scale_columns=inputs // scale.shape[-1],
                bits=coding.bits,
                middle=coding.middle,
                levels=coding.levels,
                rounds=coding.activations,
            ),
        )

    def matmul(self, x: Float[Array, "T i"]) -> Float[Array, "T o"]:
        return self._by_integers(x) if self.coding.activations else super().matmul(x)

    def product(self, x: Float[Array, "T i"]) -> Float[Array, "T o"]:
        """Codes of whole rows are exact in every float type, so that scales come last, in float32."""
        return product(x, self.codes.astype(x.dtype)) * self.scale if self.coding.of_rows else super().product(x)

    def rows(self, ids: Int[Array, "T"]) -> Float[Array, "T i"]:
        if not self.coding.of_blocks:
            return super().rows(ids)
        block, row = jnp.divmod(ids, self.rows_together)
        return replace(self, codes=self.codes[block, row][:, None], scale=self.scale[block]).dequantize()

    def _by_integers(self, x: Float[Array, "T i"]) -> Float[Array, "T o"]:
        """Inputs are rounded to int8 as well, with a scale for each RUN of a row (W8A8)."""
        codes, scale = quantize_runs(x)

        def add(run: jax.Array, total: jax.Array) -> jax.Array:
            return total + self._of_run(codes, scale, run * RUN, RUN)

        whole, rest = divmod(self.shape[-1], RUN)
        total = jnp.zeros((len(x), self.shape[0]), jnp.float32)
        if whole:
            total = lax.fori_loop(0, whole, add, total)
        if rest:
            total += self._of_run(codes, scale, whole * RUN, rest)
        return total * self.scale

    def _of_run(
        self, codes: Int8[Array, "T i"], scale: Float[Array, "T r"], start: jax.Array | int, size: int
    ) -> Float[Array, "T o"]:
        inputs, weights = (lax.dynamic_slice_in_dim(each, start, size, 1) for each in (codes, self.codes))
        sums = lax.dot_general(inputs, weights, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
        return sums.astype(jnp.float32) * lax.dynamic_slice_in_dim(scale, start // RUN, 1, 1)


@dataclass(frozen=True)
class CodedKind:
    """Codes as `coding` says, for a model that computes in `dtype`."""

    coding: Coding
    dtype: np.dtype
    joins: ClassVar[bool] = True

    @property
    def block(self) -> int:
        return self.coding.block[1] or 1

    def abstract(self, shape: tuple[int, ...]) -> Coded:
        coding, (*stack, outputs, inputs) = self.coding, shape
        rows, columns = coding.block
        scale = (*stack, outputs // rows, *([] if coding.of_rows else [inputs // columns]))
        if coding.of_rows:
            codes = shape
        elif coding.of_blocks:
            codes = (*scale[:-1], rows, inputs)
        else:
            codes = (*scale, columns * coding.bits // 8)
        zero = None if coding.symmetric else jax.ShapeDtypeStruct(scale, jnp.uint8)
        factor = jax.ShapeDtypeStruct(scale[:-1], jnp.float32) if coding.factored else None
        arrays = jax.ShapeDtypeStruct(codes, coding.codes), jax.ShapeDtypeStruct(scale, coding.scale), zero
        return Coded(*arrays, coding, self.dtype, factor)

    def pack(self, tensors: Sequence[Stored], layout: Layout | None) -> Coded:
        codes, scales, zeros, factors = zip(*map(self._parts, tensors), strict=True)
        coding, rows = self.coding, self.coding.block[0]
        if layout is not None and rows > 1:
            segments = tuple(replace(segment, rows=segment.rows // rows) for segment in layout.segments)
            layout = replace(layout, segments=segments, pad_to=layout.pad_to // rows)
        zero = None if coding.symmetric else place(layout, zeros, UINT8)
        factor = place(layout, factors, FLOAT32) if coding.factored else None
        scale = place(layout, scales, coding.scale)
        return Coded(place(layout, codes, coding.codes), scale, zero, coding, self.dtype, factor)

    def _parts(self, tensor: Stored) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
        tensor = as_codes(tensor)
        coding, kept = self.coding, tensor.codes
        if tensor.packed and kept is not None and kept.coding == coding:
            return tensor.data.reshape(*kept.scale.shape, -1), kept.scale, kept.zero, kept.factor
        tensor, factor = tensor.unpacked(), None if kept is None else kept.factor
        if kept is not None and self._holds(kept, tensor.shape[-1]):
            codes, scale, zero = self._taken(tensor.data, kept)
        else:
            codes, scale, zero = self._by_rows(tensor) if coding.of_rows else self._by_groups(tensor)
        if coding.of_rows:
            return codes, scale[..., 0], None, None
        rows, columns = coding.block
        if coding.of_blocks:
            return codes.reshape(*codes.shape[:-2], -1, rows, codes.shape[-1]), scale, None, None
        runs = codes.reshape(*codes.shape[:-1], -1, 8 // coding.bits, columns * coding.bits // 8)
        return packed(runs, coding.bits), scale, zero, factor

    def _holds(self, kept: Codes, inputs: int) -> bool:
        coding, own = self.coding, kept.coding
        if kept.order is not None or (coding.symmetric and not own.symmetric):
            return False
        if FP8 in (coding.codes, own.codes):
            return coding.codes == own.codes and (coding.of_blocks or own.block[1] >= inputs)
        if coding.of_rows:
            return own.bits == 8 and not own.levels and own.block[1] >= inputs
        alike = own.codes == UINT8 and (own.levels, own.scale) == (coding.levels, coding.scale)
        return alike and own.bits <= coding.bits and own.block[1] % coding.block[1] == 0

    def _taken(self, codes: np.ndarray, kept: Codes) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        coding, block = self.coding, (self.coding.block[0], self.coding.block[1] or codes.shape[-1])
        scale, zero = kept.scales(codes.shape, block), None if coding.symmetric else kept.zeros(codes.shape, block)
        if coding.codes == INT8 and codes.dtype == UINT8:
            codes = (codes ^ np.uint8(128)).view(np.int8)
        elif coding.symmetric and not coding.levels and kept.coding.bits < coding.bits:
            codes = codes + np.uint8(coding.middle - kept.coding.middle)
        return codes, scale, zero

    def _by_rows(self, tensor: Stored) -> tuple[np.ndarray, np.ndarray, None]:
        values = tensor.finite()
        peak = np.maximum(values.max(axis=-1), -values.min(axis=-1))
        scale = np.where(peak > 0, peak / np.float32(LARGEST[self.coding.codes]), 1).astype(np.float32)
        codes = values / scale[..., None]
        if self.coding.codes == INT8:
            np.rint(codes, out=codes)
        return codes.astype(self.coding.codes), scale[..., None], None

    def _by_groups(self, tensor: Stored) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        values, coding = tensor.finite(), self.coding
        assert not coding.of_blocks, "only checkpoints that have blocks of rows give them"
        groups = values.reshape(*values.shape[:-1], -1, coding.block[1])
        high, low = np.maximum(groups.max(-1), 0), np.minimum(groups.min(-1), 0)
        middle, largest = 1 << (coding.bits - 1), (1 << coding.bits) - 1
        step = np.maximum(high / (middle - 1), -low / middle) if coding.symmetric else (high - low) / largest
        scale = step.astype(coding.scale)
        divisor = np.where(scale > 0, scale, 1).astype(np.float32)
        zero = np.full(scale.shape, middle, np.float32) if coding.symmetric else np.rint(-low / divisor)
        zero = np.clip(zero, 0, largest)
        codes = np.clip(np.rint(groups / divisor[..., None] + zero[..., None]), 0, largest).astype(np.uint8)
        return codes.reshape(values.shape), scale, zero.astype(np.uint8)


def per_channel(codes: np.dtype, dtype: np.dtype, activations: bool = False) -> CodedKind:
    """Codes of one type, int8 or float8_e4m3fn, with a scale a row; see `Coding` for `activations`."""
    return CodedKind(Coding(8, (1, 0), FLOAT32, codes=codes, activations=activations), dtype)


def groups(
    dtype: np.dtype, bits: int = 4, block: int = 32, symmetric: bool = False, scale: np.dtype = FLOAT16,
    levels: tuple[float, ...] = (),
) -> CodedKind:  # fmt: skip
    """Codes of 2, 4 or 8 bits with a scale, and a zero unless they are symmetric, for `block` neighbouring inputs."""
    return CodedKind(Coding(bits, (1, block), scale, symmetric, levels), dtype)


def fp8_blocks(dtype: np.dtype, rows: int, block: int, scale: np.dtype = FLOAT32) -> CodedKind:
    """Codes of e4m3 with a scale for each block (DeepSeek-V3, arXiv:2412.19437, section 3.3)."""
    return CodedKind(Coding(8, (rows, block), scale, codes=FP8), dtype)


def as_stored(weight: Weight, dtype: str, origin: str) -> Stored:
    """Codes in host memory, in an order of their own or not, as a tensor of a checkpoint; none are copied."""
    order = weight.order if isinstance(weight, Ordered) else None
    weight = weight.weight if isinstance(weight, Ordered) else weight
    assert isinstance(weight, Coded)
    coding, shape, scale = weight.coding, weight.shape, weight.scale
    if coding.of_rows:
        coding, scale = replace(coding, block=(1, shape[-1])), scale[..., None]
    packed = coding.codes == UINT8
    data = weight.codes if packed else weight.codes.reshape(shape)
    return Stored(data, dtype, shape, packed, Codes(coding, scale, weight.zero, order, weight.factor), origin=origin)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ordered(Weight):
    """A weight with its columns in another order, in which groups of them lie together.

    Attributes:
        weight: column `j` is for input `order[j]`.
        order: int32 `[*stack, i]`.
        divided: whether devices have a part of the columns each, which may be for inputs of any device.
    """

    weight: Weight
    order: Any
    divided: bool = field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def dequantize(self) -> Float[Array, "*stack o i"]:
        """The matrix as floats: the whole of it, where it is divided over devices."""
        place = jnp.argsort(self.order, axis=-1)[..., None, :]
        return jnp.take_along_axis(self.weight.dequantize(), place, -1)

    def axes(self, axes: Axes) -> list[Axes]:
        return [*self.weight.axes(axes), (*axes[:-2], axes[-1])]

    def matmul(self, x: Float[Array, "T i"]) -> Float[Array, "T o"]:
        """`x @ self.T` in float32: the inputs are brought into the columns' order."""
        return self.weight.matmul(arranged(x, self.order, self.divided))

    @property
    def kernel_matrices(self) -> tuple[KernelMatrix | PackedMatrix, ...] | None:
        found = self.weight.kernel_matrices
        return None if found is None else tuple(replace(m, order=self.order, divided=self.divided) for m in found)

    def rows(self, ids: Int[Array, "T"]) -> Float[Array, "T i"]:
        return self.weight.rows(ids)[:, jnp.argsort(self.order)]

    def select(self, index: Int[Array, ""]) -> Ordered:
        return Ordered(self.weight.select(index), self.order[index], self.divided)


@dataclass(frozen=True)
class OrderedKind:
    """Another kind with its columns in the checkpoint's order.

    Attributes:
        kind: what the columns are kept as.
        order: the name of their order; segments of a product that share it are one weight, whose inputs are brought
            into that order once. Empty for an order that is not known before it is read.
        divided: see `Ordered`.
    """

    kind: WeightKind
    order: str = ""
    divided: bool = False

    @property
    def block(self) -> int:
        return self.kind.block

    @property
    def joins(self) -> bool:
        return bool(self.order)

    def abstract(self, shape: tuple[int, ...]) -> Ordered:
        order = jax.ShapeDtypeStruct((*shape[:-2], shape[-1]), jnp.int32)
        return Ordered(self.kind.abstract(shape), order, self.divided)

    def pack(self, tensors: Sequence[Stored], layout: Layout | None) -> Ordered:
        """Raises CheckpointError where an order names an input twice, or is not that of the other segments."""
        kept: list[Stored] = []
        orders: list[np.ndarray] = []
        for tensor in tensors:
            assert tensor.codes is not None and tensor.codes.order is not None
            order = np.asarray(tensor.codes.order, np.int32)
            if not np.array_equal(np.sort(order), np.broadcast_to(np.arange(order.shape[-1]), order.shape)):
                raise CheckpointError(f"{tensor.origin}: its order does not name each of {order.shape[-1]} inputs once")
            if orders and not np.array_equal(order, orders[0]):
                raise CheckpointError(f"{tensor.origin}: its inputs are not in the order of {tensors[0].origin}")
            orders.append(order)
            kept.append(tensor._replace(codes=replace(tensor.codes, order=None)))
        return Ordered(self.kind.pack(kept, layout), orders[0], self.divided)
