"""Weights laid out for the C++ kernels of CPU hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm import cpu_kernels
from jaxllm.cpu_kernels import GROUP
from jaxllm.quantization.gguf_weight import GgufKind
from jaxllm.quantization.ordered import OrderedKind
from jaxllm.quantization.stored import Stored
from jaxllm.quantization.weight import DenseKind, Kind, Weight
from jaxllm.sharding.layout import Layout
from jaxllm.sharding.mesh import Axes

FLOATS = {np.dtype(jnp.bfloat16): "bf16"}
"""Dense weights that lie in tiles. Products of float32 are left to XLA: whoever asks for it wants nothing rounded."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiled(Weight):
    """Tiles of 16 rows by a block of inputs; what is in them is the kernels' affair.

    Products with formats of integers round their inputs to int8, with a scale for every 32.

    Attributes:
        tiles: uint8 `[*stack, o / 16, i / block, bytes]`.
        format: one of `cpu_kernels.FORMATS`.
        dtype: of the numbers that `dequantize` gives.
    """

    tiles: Any
    format: str = field(metadata={"static": True})
    dtype: np.dtype = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        *stack, groups, blocks, _ = self.tiles.shape
        return (*stack, groups * GROUP, blocks * cpu_kernels.tile_inputs(self.format))

    def matmul(self, x: Float[Array, "T i"]) -> Float[Array, "T o"]:
        return cpu_kernels.linears(x, self.matrices)[0]

    def rows(self, ids: Int[Array, "T"]) -> Float[Array, "T i"]:
        """float32, whatever the model computes in: the kernels take and give that."""
        return cpu_kernels.embed(ids, self.matrices[0], self.shape[-1])

    def dequantize(self) -> Float[Array, "*stack o i"]:
        *stack, rows, inputs = self.shape
        parts = [
            Tiled(self.tiles[index], self.format, self.dtype).rows(jnp.arange(rows))
            for index in np.ndindex(tuple(stack))
        ]
        return jnp.stack(parts).reshape(*stack, rows, inputs).astype(self.dtype)

    def axes(self, axes: Axes) -> list[Axes]:
        return [(*axes, None)]

    @property
    def matrices(self) -> tuple[cpu_kernels.Tiles, ...]:
        return (cpu_kernels.Tiles(self.tiles, self.format, self.shape[-2]),)


@dataclass(frozen=True)
class TiledKind:
    """Tiles of what another kind keeps.

    Segments of one product stay by themselves unless it `joins` them: the kernels take several at once, and give a
    result for each.
    """

    stored: GgufKind | DenseKind
    joins: bool = False

    @property
    def format(self) -> str:
        return FLOATS[self.stored.dtype] if isinstance(self.stored, DenseKind) else self.stored.type.lower()

    @property
    def block(self) -> int:
        return cpu_kernels.tile_inputs(self.format)

    def abstract(self, shape: tuple[int, ...]) -> Tiled:
        *stack, rows, inputs = shape
        tiles = (*stack, rows // GROUP, inputs // self.block, cpu_kernels.tile_bytes(self.format))
        return Tiled(jax.ShapeDtypeStruct(tiles, jnp.uint8), self.format, self.stored.dtype)

    def pack(self, tensors: Sequence[Stored], layout: Layout | None) -> Tiled:
        """What the other kind makes of them, moved into tiles."""
        (array,) = jax.tree.leaves(self.stored.pack(tensors, layout))
        return Tiled(cpu_kernels.repack(self.format, array), self.format, self.stored.dtype)


def tiled(kind: Kind, rows: Sequence[int], inputs: int, *, stack: bool) -> Kind:
    """`kind` in tiles where the kernels have them, and parts of `rows` rows by `inputs` inputs are whole tiles."""
    if isinstance(kind, OrderedKind):
        return OrderedKind(tiled(kind.kind, rows, inputs, stack=stack))
    known = (isinstance(kind, DenseKind) and kind.dtype in FLOATS) or (
        isinstance(kind, GgufKind) and kind.type.lower() in cpu_kernels.FORMATS and kind.dtype in FLOATS
    )
    if not known or any(count % GROUP for count in rows):
        return kind
    candidate = TiledKind(kind, joins=stack)  # type: ignore[arg-type]
    return candidate if inputs % candidate.block == 0 else kind
