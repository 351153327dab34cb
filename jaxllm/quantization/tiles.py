"""Weights laid out for the C++ kernels of CPU hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm import cpu_kernels
from jaxllm.cpu_kernels import GROUP
from jaxllm.errors import CheckpointError
from jaxllm.quantization.coded import FLOAT16, Coded, CodedKind, OrderedKind
from jaxllm.quantization.gguf_weight import GgufKind
from jaxllm.quantization.stored import INT8, NVFP4, UINT8, Stored, unpacked
from jaxllm.quantization.weight import DenseKind, Weight, WeightKind
from jaxllm.sharding.mesh import Axes, Layout

BFLOAT16 = np.dtype(jnp.bfloat16)
FLOATS = {BFLOAT16: "bf16", np.dtype(np.float32): "f32"}
"""Dense weights that lie in tiles; those of float32 are routers: XLA would copy such a small matrix in each step."""

CODES = 32
"""Of a block, where those are of a checkpoint's codes."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiled(Weight):
    """Tiles of 16 rows by a block of inputs; what is in them is the kernels' affair.

    Products with formats of integers round their inputs to int8, with a scale for every 32; or `in_bf16` both their
    inputs and the weights to bfloat16.

    Attributes:
        tiles: uint8 `[*stack, o / 16, i / block, bytes]`.
        scales: float32 `[*stack, o / 16, runs, 16]` of formats whose tiles have none; a run is of inputs.
        format: one of `cpu_kernels.FORMATS`.
        dtype: of the numbers that `dequantize` gives.
    """

    tiles: Any
    scales: Any
    format: str = field(metadata={"static": True})
    dtype: np.dtype = field(metadata={"static": True})
    in_bf16: bool = field(default=False, metadata={"static": True})

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
        matrices = (jax.tree.map(lambda array, at=index: array[at], self) for index in np.ndindex(tuple(stack)))
        parts = [matrix.rows(jnp.arange(rows)) for matrix in matrices]
        return jnp.stack(parts).reshape(*stack, rows, inputs).astype(self.dtype)

    def axes(self, axes: Axes) -> list[Axes]:
        if self.scales is None:
            return [(*axes, None)]
        runs = axes[-1] if self.scales.shape[-2] > 1 else None
        return [(*axes, None), (*axes[:-1], runs, None)]

    @property
    def matrices(self) -> tuple[cpu_kernels.Tiles, ...]:
        return (cpu_kernels.Tiles(self.tiles, self.format, self.shape[-2], self.scales, self.in_bf16),)


@dataclass(frozen=True)
class TiledKind:
    """Tiles of what another kind keeps; segments stay by themselves unless it `joins` them: a kernel takes several."""

    stored: GgufKind | DenseKind | CodedKind
    joins: bool = False
    in_bf16: bool = False

    @property
    def format(self) -> str:
        found = tile_format(self.stored)
        assert found is not None
        return found

    @property
    def block(self) -> int:
        return max(self._run or 1, cpu_kernels.tile_inputs(self.format))

    @property
    def _run(self) -> int | None:
        coded = isinstance(self.stored, CodedKind) and self.stored.coding.of_blocks
        return self.stored.block if coded else None

    def abstract(self, shape: tuple[int, ...]) -> Tiled:
        *stack, rows, inputs = shape
        groups = (*stack, rows // GROUP)
        tiles = (*groups, inputs // cpu_kernels.tile_inputs(self.format), cpu_kernels.tile_bytes(self.format))
        scales = None
        if self.format in cpu_kernels.SCALED:
            scales = jax.ShapeDtypeStruct((*groups, inputs // (self._run or inputs), GROUP), jnp.float32)
        return Tiled(jax.ShapeDtypeStruct(tiles, jnp.uint8), scales, self.format, self.stored.dtype, self.in_bf16)

    def pack(self, tensors: Sequence[Stored], layout: Layout | None) -> Tiled:
        """What the other kind makes of them, in tiles. Raises CheckpointError: an e4m3 float is a NaN."""
        if layout is not None and layout.joins_whole(tensors) and not isinstance(self.stored, CodedKind):
            # Each where it belongs: joining them first would copy them.
            parts = [_blocks(self.stored.pack([tensor], None))[0] for tensor in tensors]
            return Tiled(cpu_kernels.repack(self.format, *parts), None, self.format, self.stored.dtype)
        blocks, scales = _blocks(self.stored.pack(tensors, layout))
        if self.format == "e4m3" and (blocks & 0x7F == 0x7F).any():
            raise CheckpointError(f"{tensors[0].origin}: holds NaN")
        tiles = cpu_kernels.repack(self.format, blocks)
        lanes = None if scales is None else cpu_kernels.lanes(scales)
        return Tiled(tiles, lanes, self.format, self.stored.dtype, self.in_bf16)


def _blocks(kept: Weight) -> tuple[np.ndarray, np.ndarray | None]:
    """What `repack` takes, and scales `[*stack, o, runs]` of weights that have them beside their codes."""
    if isinstance(kept, Coded) and kept.factor is not None:  # two groups of 16 in a block
        pairs = unpacked(kept.codes, 4).reshape(*kept.scale.shape[:-1], -1, 2, CODES // 2)
        scales = np.ascontiguousarray(kept.scale).view(np.uint8).reshape(*pairs.shape[:-2], 2)
        return np.concatenate([scales, pairs[..., 0, :] | pairs[..., 1, :] << 4], axis=-1), kept.factor[..., None]
    if isinstance(kept, Coded) and kept.coding.codes == UINT8:
        zero = [] if kept.zero is None else [kept.zero[..., None]]
        return np.concatenate([kept.scale[..., None].view(np.uint8), *zero, kept.codes], axis=-1), None
    if isinstance(kept, Coded):
        blocks = np.ascontiguousarray(kept.codes).view(np.uint8).reshape(*kept.shape[:-1], -1, CODES)
        if kept.coding.of_rows:
            return blocks, kept.scale[..., None]
        return blocks, np.repeat(kept.scale, kept.rows_together, axis=-2).astype(np.float32)
    (array,) = jax.tree.leaves(kept)
    return array, None


def tile_format(kind: WeightKind) -> str | None:
    """The tiles that hold what `kind` keeps, exactly; None if there are none."""
    if isinstance(kind, DenseKind):
        return FLOATS.get(kind.dtype)
    if isinstance(kind, CodedKind):
        coding = kind.coding
        if coding.codes != UINT8:
            return None if kind.block % CODES and coding.of_blocks else "i8" if coding.codes == INT8 else "e4m3"
        if coding == NVFP4:
            return "nvfp4"
        fits = (coding.bits, kind.block, coding.scale, coding.levels) == (4, CODES, FLOAT16, ())
        return ("q4_0" if coding.symmetric else "u4") if fits else None
    if isinstance(kind, GgufKind) and kind.type.lower() in cpu_kernels.FORMATS:
        return kind.type.lower()
    return None


def tiled(kind: WeightKind, rows: Sequence[int], inputs: int, *, stack: bool, in_bf16: bool = False) -> WeightKind:
    """`kind` in tiles where the kernels have them, and parts of `rows` rows by `inputs` inputs are whole tiles."""
    if isinstance(kind, OrderedKind):
        return replace(kind, kind=tiled(kind.kind, rows, inputs, stack=stack, in_bf16=in_bf16))
    rounds = not isinstance(kind, DenseKind) and kind.dtype != BFLOAT16  # type: ignore[attr-defined]
    if tile_format(kind) is None or rounds or any(count % GROUP for count in rows):
        return kind
    candidate = TiledKind(kind, joins=stack, in_bf16=in_bf16)  # type: ignore[arg-type]
    return candidate if inputs % candidate.block == 0 else kind
