"""Weights of four bits with a scale, and a zero point or none, for each group of neighbouring inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxllm.quantization.quantized import Quantized
from jaxllm.quantization.stored import Stored
from jaxllm.sharding.layout import Layout, place
from jaxllm.sharding.mesh import Axes

MIDDLE = 8
"""The zero point of symmetric groups."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int4(Quantized):
    """`(code - zero) * scale`, codes 0 … 15.

    Attributes:
        codes: uint8 `[*stack, o, i / group, group / 2]`: low nibbles are a group's first half, high ones its second.
        scale: float16 `[*stack, o, i / group]`.
        zero: uint8, likewise; None where groups are symmetric, about 8.
        dtype: of the numbers that `rows` and `dequantize` give.
    """

    codes: Any
    scale: Any
    zero: Any
    dtype: np.dtype = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, groups, half = self.codes.shape
        return (*lead, groups * half * 2)

    def dequantize(self) -> Float[Array, "*stack o i"]:
        shifts = np.array([0, 4], np.uint8)[:, None]
        codes = ((self.codes[..., None, :] >> shifts) & np.uint8(15)).reshape(*self.scale.shape, -1)
        zero = MIDDLE if self.zero is None else self.zero.astype(jnp.float32)[..., None]
        values = (codes.astype(jnp.float32) - zero) * self.scale.astype(jnp.float32)[..., None]
        return values.reshape(self.shape).astype(self.dtype)

    def axes(self, axes: Axes) -> list[Axes]:
        return [(*axes, None), axes] if self.zero is None else [(*axes, None), axes, axes]


@dataclass(frozen=True)
class Int4Kind:
    """Groups of `block` inputs, for a model that computes in `dtype`."""

    dtype: np.dtype
    block: int = 32
    symmetric: bool = False
    joins: ClassVar[bool] = True

    def abstract(self, shape: tuple[int, ...]) -> Int4:
        groups = (*shape[:-1], shape[-1] // self.block)
        codes = jax.ShapeDtypeStruct((*groups, self.block // 2), jnp.uint8)
        zero = None if self.symmetric else jax.ShapeDtypeStruct(groups, jnp.uint8)
        return Int4(codes, jax.ShapeDtypeStruct(groups, jnp.float16), zero, self.dtype)

    def pack(self, tensors: Sequence[Stored], layout: Layout | None) -> Int4:
        """Codes spread over each group's range, which is made to hold 0."""
        parts = [self._encode(tensor) for tensor in tensors]
        codes = place(layout, (part[0] for part in parts), np.dtype(np.uint8))
        scale = place(layout, (part[1] for part in parts), np.dtype(np.float16))
        zero = None if self.symmetric else place(layout, (part[2] for part in parts), np.dtype(np.uint8))
        return Int4(codes, scale, zero, self.dtype)

    def _encode(self, tensor: Stored) -> tuple[np.ndarray, np.ndarray, Any]:
        kept = tensor.weight
        if isinstance(kept, Int4) and kept.codes.shape[-1] * 2 == self.block and (kept.zero is None) == self.symmetric:
            return kept.codes, kept.scale, kept.zero
        values = tensor.finite()
        groups = values.reshape(*values.shape[:-1], -1, self.block)
        high, low = np.maximum(groups.max(-1), 0), np.minimum(groups.min(-1), 0)
        step = np.maximum(high / 7, -low / 8) if self.symmetric else (high - low) / 15
        scale = step.astype(np.float16)
        divisor = np.where(scale > 0, scale, 1).astype(np.float32)
        zero = np.full(scale.shape, MIDDLE, np.float32) if self.symmetric else np.clip(np.rint(-low / divisor), 0, 15)
        codes = np.clip(np.rint(groups / divisor[..., None] + zero[..., None]), 0, 15).astype(np.uint8)
        low_half, high_half = np.split(codes, 2, axis=-1)
        return low_half | high_half << 4, scale, zero.astype(np.uint8)
