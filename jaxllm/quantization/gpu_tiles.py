"""Weights of few bits laid out for the kernels of NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.packed_matrix import ROWS, SCALES, PackedFormat, PackedMatrix, block_scale, group_scale
from jaxllm.quantization.gguf_weight import GgufBlocks, GgufKind
from jaxllm.quantization.groups import FLOAT16, Groups, GroupsKind
from jaxllm.quantization.stored import Stored
from jaxllm.quantization.unpacked import BLOCKS, Unpacked, group_format, unpack_blocks, unpack_groups
from jaxllm.quantization.weight import Weight, WeightKind
from jaxllm.sharding.layout import Layout
from jaxllm.sharding.mesh import Axes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GpuTiles(Weight):
    """Tiles of 16 rows; what is in them says `PackedFormat`.

    Attributes:
        tiles: the arrays.
    """

    tiles: PackedMatrix

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tiles.shape

    def dequantize(self) -> Float[Array, "*stack o i"]:
        return _expand(_by_row(self.tiles)).astype(self.tiles.dtype)

    def rows(self, ids: Int[Array, "T"]) -> Float[Array, "T i"]:
        """The rows `ids` of a matrix; no other is expanded."""
        tile, lane = jnp.divmod(ids, ROWS)
        taken = PackedMatrix(
            self.tiles.low[tile, :, lane],
            None if self.tiles.high is None else self.tiles.high[tile, :, lane],
            None if self.tiles.words is None else self.tiles.words[tile, :, :, lane],
            tuple(half[tile, :, lane] for half in self.tiles.halves),
            self.tiles.format,
            self.tiles.dtype,
            self.tiles.scale,
        )
        return _expand(taken).astype(self.tiles.dtype)

    def axes(self, axes: Axes) -> list[Axes]:
        tiles = [(*axes, None, None)] * (1 if self.tiles.high is None else 2)
        words = [] if self.tiles.words is None else [(*axes, None, None)]
        return [*tiles, *words, *[(*axes, None)] * len(self.tiles.halves)]

    @property
    def kernel_matrices(self) -> tuple[PackedMatrix, ...]:
        return (self.tiles,)


@dataclass(frozen=True)
class GpuTiledKind:
    """Tiles of what another kind keeps."""

    stored: GgufKind | GroupsKind
    joins: bool = True

    @property
    def dtype(self) -> np.dtype:
        return self.stored.dtype

    @property
    def block(self) -> int:
        return self._format.unit

    @property
    def _format(self) -> PackedFormat:
        if isinstance(self.stored, GgufKind):
            return BLOCKS[self.stored.type].format
        raise NotImplementedError


def tile(kept: GgufBlocks | Groups) -> GpuTiles:
    """What another kind keeps, on the host, moved into tiles."""
    format = tile_format(kept)
    assert format is not None
    unpacked = unpack_blocks(kept.blocks, kept.type) if isinstance(kept, GgufBlocks) else unpack_groups(kept, format)
    scale = FLOAT16 if isinstance(kept, GgufBlocks) else np.dtype(kept.scale.dtype)
    low = _plane(unpacked.codes & np.uint8((1 << format.bits) - 1), format.bits, format.width)
    high = _plane(unpacked.codes >> np.uint8(format.bits), format.high, format.width) if format.high else None
    words = None if unpacked.words is None else _tiled_words(unpacked.words)
    halves = tuple(_tiled_halves(half) for half in unpacked.halves)
    return GpuTiles(PackedMatrix(low, high, words, halves, format, kept.dtype, scale))


def tile_format(kept: Any) -> PackedFormat | None:
    """The tiles that hold what is kept, exactly; None if there are none."""
    rows, inputs = kept.shape[-2:]
    format = None
    if isinstance(kept, GgufBlocks):
        format = BLOCKS[kept.type].format
    elif isinstance(kept, Groups) and not kept.levels:
        group = inputs // kept.scale.shape[-1]
        format = group_format(kept.bits, group, np.dtype(kept.scale.dtype), symmetric=kept.zero is None, inputs=inputs)
    return format if format is not None and rows % ROWS == 0 and inputs % format.unit == 0 else None


def _plane(codes: np.ndarray, bits: int, width: int) -> np.ndarray:
    *stack, rows, inputs = codes.shape
    per_byte = 8 // bits
    parts = codes.reshape(*stack, rows // ROWS, ROWS, inputs // (width * per_byte), per_byte, width)
    packed = np.zeros((*parts.shape[:-2], width), np.uint8)
    for index in range(per_byte):
        packed |= parts[..., index, :] << np.uint8(index * bits)
    return np.ascontiguousarray(packed.swapaxes(-3, -2))


def _tiled_words(words: np.ndarray) -> np.ndarray:
    *stack, rows, blocks, count = words.shape
    parts = words.reshape(*stack, rows // ROWS, ROWS, blocks, count)
    return np.ascontiguousarray(np.moveaxis(parts, -3, -1))


def _tiled_halves(half: np.ndarray) -> np.ndarray:
    *stack, rows, blocks = half.shape
    return np.ascontiguousarray(half.reshape(*stack, rows // ROWS, ROWS, blocks).swapaxes(-1, -2))


def _by_row(tiles: PackedMatrix) -> PackedMatrix:
    """The same arrays with `o` in place of tiles and the rows of each."""

    def of_plane(plane: Any) -> Any:
        *stack, count, blocks, rows, width = plane.shape
        return plane.swapaxes(-3, -2).reshape(*stack, count * rows, blocks, width)

    def of_words(words: Any) -> Any:
        *stack, count, blocks, number, rows = words.shape
        return jnp.moveaxis(words, -1, -3).reshape(*stack, count * rows, blocks, number)

    def of_half(half: Any) -> Any:
        *stack, count, blocks, rows = half.shape
        return half.swapaxes(-1, -2).reshape(*stack, count * rows, blocks)

    return replace(
        tiles,
        low=of_plane(tiles.low),
        high=None if tiles.high is None else of_plane(tiles.high),
        words=None if tiles.words is None else of_words(tiles.words),
        halves=tuple(map(of_half, tiles.halves)),
    )


def _expand(tiles: PackedMatrix) -> Float[Array, "*n i"]:
    """Rows of tiles as float32, exactly what the kinds that they were made of give."""
    format, kind = tiles.format, SCALES[tiles.format.scales]
    codes = _codes(tiles).astype(jnp.float32) - format.offset
    words = [] if tiles.words is None else [tiles.words[..., index] for index in range(kind.words)]
    groups = codes.reshape(*codes.shape[:-1], -1, format.group)
    if format.scales == "zero":
        scale, zero = (half.astype(jnp.float32)[..., None] for half in tiles.halves)
        return ((groups - zero) * scale).reshape(codes.shape)
    found = [group_scale(format, words, tiles.halves, group, tiles.scale) for group in range(kind.groups)]
    whole = block_scale(format, words, tiles.halves) if kind.blocks else (None, None)

    def spread(index: int) -> Any:
        numbers = jnp.stack([each[index] for each in found], axis=-1)
        numbers = numbers if whole[index] is None else numbers * whole[index][..., None]
        return numbers.reshape(*codes.shape[:-1], -1)[..., None]

    values = groups * spread(0)
    return (values + spread(1) if kind.shifts else values).reshape(codes.shape)


def _codes(tiles: PackedMatrix) -> Int[Array, "*n i"]:
    format = tiles.format
    if format.bits == 8:
        flat = tiles.low.reshape(*tiles.low.shape[:-2], -1)
        return lax.bitcast_convert_type(flat, jnp.int8).astype(jnp.int32)

    def of_plane(plane: Any, bits: int) -> Any:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
        codes = (plane[..., None, :] >> shifts) & np.uint8((1 << bits) - 1)
        return codes.reshape(*plane.shape[:-2], -1).astype(jnp.int32)

    low = of_plane(tiles.low, format.bits)
    return low if tiles.high is None else low | (of_plane(tiles.high, format.high) << format.bits)
