"""Weights of a few bits with a scale, and a zero point or none, for each group of neighbouring inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxllm.pallas_kernels.kernel_matrix import KernelMatrix
from jaxllm.quantization.coded import UINT8, Codes
from jaxllm.quantization.quantized import Quantized
from jaxllm.quantization.stored import Stored
from jaxllm.sharding.layout import Layout, place
from jaxllm.sharding.mesh import Axes

FLOAT16 = np.dtype(np.float16)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Groups(Quantized):
    """`(code - zero) * scale`, or `levels[code] * scale`.

    Attributes:
        codes: uint8 `[*stack, o, i / group, group * bits / 8]`: of four bits, low ones are a group's first half, high
            ones its second.
        scale: floats `[*stack, o, i / group]`.
        zero: uint8, likewise; None where groups are symmetric, about the middle code.
        bits: of a code: 2, 4 or 8.
        levels: what each code stands for; empty: itself.
        dtype: of the numbers that `rows` and `dequantize` give.
    """

    codes: Any
    scale: Any
    zero: Any
    bits: int = field(metadata={"static": True})
    levels: tuple[float, ...] = field(metadata={"static": True})
    dtype: np.dtype = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, groups, nbytes = self.codes.shape
        return (*lead, groups * nbytes * 8 // self.bits)

    def dequantize(self) -> Float[Array, "*stack o i"]:
        shifts = np.arange(0, 8, self.bits, dtype=np.uint8)[:, None]
        codes = (self.codes[..., None, :] >> shifts) & np.uint8((1 << self.bits) - 1)
        codes = codes.reshape(*self.scale.shape, -1)
        if self.levels:
            values = jnp.asarray(self.levels, jnp.float32)[codes]
        else:
            zero = 1 << (self.bits - 1) if self.zero is None else self.zero.astype(jnp.float32)[..., None]
            values = codes.astype(jnp.float32) - zero
        return (values * self.scale.astype(jnp.float32)[..., None]).reshape(self.shape).astype(self.dtype)

    def axes(self, axes: Axes) -> list[Axes]:
        return [(*axes, None), axes] if self.zero is None else [(*axes, None), axes, axes]

    @property
    def kernel_matrices(self) -> tuple[KernelMatrix, ...]:
        *lead, groups, nbytes = self.codes.shape
        return (
            KernelMatrix(
                self.codes.reshape(*lead, groups * nbytes),
                self.dtype,
                self.scale,
                self.zero,
                scale_columns=self.shape[-1] // groups,
                bits=self.bits,
                middle=0 if self.levels else 1 << (self.bits - 1),
                levels=self.levels,
            ),
        )


@dataclass(frozen=True)
class GroupsKind:
    """Groups of `block` inputs, for a model that computes in `dtype`; `scale` is the type of the scales."""

    dtype: np.dtype
    bits: int = 4
    block: int = 32
    symmetric: bool = False
    scale: np.dtype = FLOAT16
    levels: tuple[float, ...] = ()
    joins: ClassVar[bool] = True

    def abstract(self, shape: tuple[int, ...]) -> Groups:
        groups = (*shape[:-1], shape[-1] // self.block)
        codes = jax.ShapeDtypeStruct((*groups, self.block * self.bits // 8), jnp.uint8)
        zero = None if self.symmetric else jax.ShapeDtypeStruct(groups, jnp.uint8)
        return Groups(codes, jax.ShapeDtypeStruct(groups, self.scale), zero, self.bits, self.levels, self.dtype)

    def pack(self, tensors: Sequence[Stored], layout: Layout | None) -> Groups:
        """A checkpoint's own codes where they fit; else codes spread over each group's range, made to hold 0."""
        parts = [self._parts(tensor) for tensor in tensors]
        codes = place(layout, (part[0] for part in parts), UINT8)
        scale = place(layout, (part[1] for part in parts), self.scale)
        zero = None if self.symmetric else place(layout, (part[2] for part in parts), UINT8)
        return Groups(codes, scale, zero, self.bits, self.levels, self.dtype)

    def _parts(self, tensor: Stored) -> tuple[np.ndarray, np.ndarray, Any]:
        kept = tensor.weight
        if isinstance(kept, Groups) and self._is_of(kept):
            return kept.codes, kept.scale, kept.zero
        fits = tensor.codes is not None and self._holds(tensor.codes)
        codes, scale, zero = self._taken(tensor) if fits else self._encoded(tensor)
        groups = codes.reshape(*codes.shape[:-1], -1, self.block)
        parts = np.split(groups, 8 // self.bits, axis=-1)
        packed = parts[0]
        for index, part in enumerate(parts[1:], 1):
            packed = packed | part << index * self.bits
        return packed, scale, zero

    def _is_of(self, kept: Groups) -> bool:
        group = kept.shape[-1] // kept.scale.shape[-1]
        own = (kept.bits, group, kept.zero is None, kept.scale.dtype, kept.levels)
        return own == (self.bits, self.block, self.symmetric, self.scale, self.levels)

    def _holds(self, codes: Codes) -> bool:
        own = codes.coding
        return (
            own.codes == UINT8
            and codes.order is None
            and own.bits <= self.bits
            and (own.levels, own.scale) == (self.levels, self.scale)
            and not (self.symmetric and not own.symmetric)
            and own.block[1] % self.block == 0
        )

    def _taken(self, tensor: Stored) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        assert tensor.codes is not None
        block, own = (1, self.block), tensor.codes.coding
        scale, zero = tensor.codes.scales(tensor.shape, block), tensor.codes.zeros(tensor.shape, block)
        codes = tensor.data
        if self.symmetric and not self.levels and own.bits < self.bits:
            codes = codes + np.uint8((1 << (self.bits - 1)) - own.middle)
        return codes, scale, zero

    def _encoded(self, tensor: Stored) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        values = tensor.finite()
        groups = values.reshape(*values.shape[:-1], -1, self.block)
        high, low = np.maximum(groups.max(-1), 0), np.minimum(groups.min(-1), 0)
        middle, largest = 1 << (self.bits - 1), (1 << self.bits) - 1
        step = np.maximum(high / (middle - 1), -low / middle) if self.symmetric else (high - low) / largest
        scale = step.astype(self.scale)
        divisor = np.where(scale > 0, scale, 1).astype(np.float32)
        zero = np.full(scale.shape, middle, np.float32) if self.symmetric else np.rint(-low / divisor)
        zero = np.clip(zero, 0, largest)
        codes = np.clip(np.rint(groups / divisor[..., None] + zero[..., None]), 0, largest).astype(np.uint8)
        return codes.reshape(values.shape), scale, zero.astype(np.uint8)
