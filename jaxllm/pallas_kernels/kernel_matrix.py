"""A weight as kernels read it that expand a tile of it at a time, whatever kind it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True)
class KernelMatrix:
    """`(code - zero) * scale` or `levels[code] * scale`, the matrix `[o, i]` or a stack of them `[*stack, o, i]`.

    Worked example, four bits in groups of 32: byte `j` of a row belongs to group `j // 16`; its low bits are input
    `32 * (j // 16) + j % 16`, its high ones the input 16 behind that.

    Attributes:
        codes: `[*stack, o, i * bits / 8]`: floats or integers of eight bits and more, or bytes of several codes.
        dtype: of the numbers that a tile is expanded to.
        scale: floats `[*stack, o / scale_rows, i / scale_columns]`; None where codes are the numbers themselves.
        zero: integers as `scale`; None where `middle` is every group's.
        scale_rows, scale_columns: neighbouring numbers that share a scale.
        bits: of a code.
        middle: the code that stands for zero.
        levels: what each code stands for; empty: itself.
        rounds: whether inputs are rounded to int8 too, by runs (`rounded.quantize_runs`).
    """

    codes: jax.Array
    dtype: np.dtype
    scale: Any = None
    zero: Any = None
    scale_rows: int = 1
    scale_columns: int = 1
    bits: int = 8
    middle: int = 0
    levels: tuple[float, ...] = ()
    rounds: bool = False

    @property
    def planes(self) -> int:
        """Codes in a byte."""
        return max(1, 8 // self.bits)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], self.codes.shape[-1] * self.planes)

    @property
    def group_stored(self) -> int:
        """Stored numbers that hold the codes of a group of a row."""
        return self.scale_columns // self.planes

    @property
    def levels_table(self) -> jax.Array | None:
        """What each code stands for, where that is not itself."""
        return jnp.asarray(self.levels, jnp.float32) if self.levels else None

    def columns(self, at: jax.Array, plane: int) -> jax.Array:
        """The inputs that the codes in a plane of stored numbers `at` of a row are for."""
        if self.planes == 1:
            return at
        group = self.group_stored
        return lax.div(at, group) * self.scale_columns + plane * group + lax.rem(at, group)

    def codes_in(self, stored: jax.Array, plane: int) -> jax.Array:
        """The codes in a plane of some bytes."""
        return (stored.astype(jnp.int32) >> (plane * self.bits)) & ((1 << self.bits) - 1)

    @property
    def scales_whole_rows(self) -> bool:
        """A row's scale can be applied to the product."""
        return self.scale is not None and self.zero is None and self.scale_columns == self.shape[-1]
