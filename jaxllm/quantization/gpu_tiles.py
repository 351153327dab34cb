"""Weights of few bits laid out for the kernels of NVIDIA GPUs: taken apart on the host, and put into tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from jaxllm.pallas_kernels.matrices import E2M1, ROWS, SCALES, PackedFormat, PackedMatrix, block_scale, group_scale
from jaxllm.quantization.coded import FLOAT16, FLOAT32, Coded, CodedKind, OrderedKind
from jaxllm.quantization.gguf_decode import FORMATS, k_scales, q3_scales
from jaxllm.quantization.gguf_weight import IQ4_CODINGS, GgufBlocks, GgufKind
from jaxllm.quantization.stored import E8M0, UINT8, Coding, Stored, packed, unpacked
from jaxllm.quantization.weight import Quantized, WeightKind
from jaxllm.sharding.mesh import Axes, Layout

INT32 = np.dtype(np.int32)
BlocksOfRows = UInt8[np.ndarray, "*n bytes"]

MOST_GROUP = 256
"""Inputs of a group that a kernel walks at a time; the scale of a longer one is repeated."""


class Unpacked(NamedTuple):
    """A weight's codes, one a byte, and its scales as tiles have them, but row by row.

    Attributes:
        codes: uint8 `[*stack, o, i]`; those of eight bits are signed.
        words: int32 `[*stack, o, blocks, words]`, or None.
        halves: `[*stack, o, blocks]` each.
    """

    codes: np.ndarray
    words: np.ndarray | None = None
    halves: tuple[np.ndarray, ...] = ()


def block_format(type: str, inputs: int) -> PackedFormat:
    """The format for GGUF's blocks of a type of `BLOCKS`, of rows of that many inputs."""
    format = BLOCKS[type].format
    if format.scales == "pair" and inputs % format.block:
        format = replace(format, scales="float")
    return _fitting(format, inputs)


def unpack_blocks(blocks: BlocksOfRows, type: str, format: PackedFormat) -> Unpacked:
    """GGUF's blocks `[*stack, o, blocks, bytes]`, for the format that `block_format` gives."""
    codes = FORMATS[type].codes(blocks).reshape(*blocks.shape[:-2], -1)
    words, half = BLOCKS[type].words, BLOCKS[type].half
    if format.scales == "power":
        return Unpacked(codes, None, (blocks[..., 0],))
    halves = () if half is None else (np.ascontiguousarray(blocks[..., half : half + 2]).view(FLOAT16)[..., 0],)
    if format.scales == "pair":
        return Unpacked(codes, _pairs(*halves))
    return Unpacked(codes, None if words is None else words(blocks), halves)


def group_format(coding: Coding, inputs: int) -> PackedFormat | None:
    """The format for groups of codes without levels, of rows of that many inputs; None if there is none."""
    bits, group, scale, symmetric = coding.bits, coding.block[1], coding.scale, coding.symmetric
    if coding.factored:
        format = PackedFormat(bits, 0, 16, 16, scales="e4m3")
        return format if group == 16 and inputs % format.block == 0 else None
    powers = scale == E8M0
    parted = group > MOST_GROUP and group % MOST_GROUP > 0
    if bits not in (2, 4, 8) or group % 16 or parted or (powers and not symmetric):
        return None
    group = min(group, MOST_GROUP)
    width = 32 if group % 32 == 0 else 16
    pairs = symmetric and group == 32 and scale.itemsize == 2 and inputs % (2 * group) == 0
    offset = 0 if bits == 8 else 1 << (bits - 1)
    scales = "power" if powers else "pair" if pairs else "float" if symmetric else "zero"
    return _fitting(PackedFormat(bits, 0, width, group, offset, scales), inputs)


def _fitting(format: PackedFormat, inputs: int) -> PackedFormat:
    """`format`, or with tiles half as wide where rows are no whole ones, which pads less."""
    return format if inputs % format.unit == 0 else replace(format, width=16)


def unpack_groups(weight: Coded, format: PackedFormat) -> Unpacked:
    bits = weight.coding.bits
    codes = unpacked(weight.codes, bits).reshape(*weight.scale.shape[:-1], -1)
    repeats = codes.shape[-1] // weight.scale.shape[-1] // format.group
    if format.scales == "e4m3":
        words = np.ascontiguousarray(weight.scale).view(INT32)[..., None]
        return Unpacked(codes, words, (np.repeat(weight.factor[..., None], words.shape[-2], axis=-1),))
    scale = np.repeat(weight.scale, repeats, axis=-1)
    if bits == 8:
        codes = codes ^ np.uint8(128)
    if format.scales == "pair":
        return Unpacked(codes, _pairs(scale))
    if weight.zero is None:
        return Unpacked(codes, None, (scale.view(np.uint8) if format.scales == "power" else scale,))
    zero = (np.repeat(weight.zero, repeats, axis=-1).astype(np.int16) - (1 << (bits - 1))).astype(np.int8)
    return Unpacked(codes, None, (scale, zero))


def _words(blocks: BlocksOfRows, start: int, stop: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[..., start:stop]).view(INT32)


def _pairs(scales: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(scales).view(INT32)[..., None]


def _k_pairs(blocks: BlocksOfRows) -> np.ndarray:
    both = np.stack(k_scales(blocks[..., 4:16]), axis=-1).reshape(*blocks.shape[:-1], 16)
    return np.concatenate([_six_bits(both), _words(blocks, 0, 4)], axis=-1)


def _six_bits(values: UInt8[np.ndarray, "*n 16"]) -> np.ndarray:
    """Sixteen numbers of six bits as three words; see `matrices.fourth_of_six`."""
    fours = values.reshape(*values.shape[:-1], 4, 4)
    last = (fours[..., 3:, :] >> np.array([0, 2, 4], np.uint8)[:, None]) & np.uint8(3)
    return np.ascontiguousarray(fours[..., :3, :] | last << 6).view(INT32)[..., 0]


class GpuFormat(NamedTuple):
    """The tiles of a type of block, what makes words of a block, and the byte where a scale that is kept begins."""

    format: PackedFormat
    words: Callable[[BlocksOfRows], np.ndarray] | None = None
    half: int | None = None


BLOCKS = {
    "Q4_0": GpuFormat(PackedFormat(4, offset=8, scales="pair"), half=0),
    "Q4_1": GpuFormat(PackedFormat(4, scales="minimum"), lambda b: _words(b, 0, 4)),
    "Q5_0": GpuFormat(PackedFormat(4, 1, offset=16, scales="pair"), half=0),
    "Q5_1": GpuFormat(PackedFormat(4, 1, scales="minimum"), lambda b: _words(b, 0, 4)),
    "Q8_0": GpuFormat(PackedFormat(8, scales="pair"), half=0),
    "Q2_K": GpuFormat(
        PackedFormat(2, width=16, group=16, scales="k_nibbles"),
        lambda b: np.concatenate([_words(b, 0, 16), _words(b, 80, 84)], axis=-1),
    ),
    "Q3_K": GpuFormat(
        PackedFormat(2, 1, width=16, group=16, offset=4, scales="k_six"),
        lambda b: _six_bits(q3_scales(b[..., 96:108])), half=108,
    ),
    "Q4_K": GpuFormat(PackedFormat(4, scales="k_pairs"), _k_pairs),
    "Q5_K": GpuFormat(PackedFormat(4, 1, scales="k_pairs"), _k_pairs),
    "Q6_K": GpuFormat(
        PackedFormat(4, 2, width=16, group=16, offset=32, scales="k_bytes"), lambda b: _words(b, 192, 208), half=208
    ),
    "MXFP4": GpuFormat(PackedFormat(4, scales="power", e2m1=True)),
}  # fmt: skip
"""GGUF's types as tiles have them."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GpuTiles(PackedMatrix, Quantized):
    @property
    def rows_together(self) -> int:
        return ROWS

    def dequantize(self) -> Float[Array, "*stack o i"]:
        return _expand(_by_row(self)).astype(self.dtype)

    def rows(self, ids: Int[Array, "T"]) -> Float[Array, "T i"]:
        tile, lane = jnp.divmod(ids, ROWS)
        taken = replace(
            self,
            low=self.low[tile, :, lane],
            high=None if self.high is None else self.high[tile, :, lane],
            words=None if self.words is None else self.words[tile, :, :, lane],
            halves=tuple(half[tile, :, lane] for half in self.halves),
        )
        return _expand(taken).astype(self.dtype)

    def axes(self, axes: Axes) -> list[Axes]:
        tiles = [(*axes, None, None)] * (1 if self.high is None else 2)
        words = [] if self.words is None else [(*axes, None, None)]
        return [*tiles, *words, *[(*axes, None)] * len(self.halves)]

    @property
    def kernel_matrices(self) -> tuple[PackedMatrix, ...]:
        return (self,)


@dataclass(frozen=True)
class GpuTiledKind:
    """Tiles of another kind in a format that holds it exactly; each device's last ones are padded to its `inputs`."""

    stored: GgufKind | CodedKind
    format: PackedFormat
    inputs: int
    joins: ClassVar[bool] = True

    @property
    def dtype(self) -> np.dtype:
        return self.stored.dtype

    @property
    def block(self) -> int:
        return self.stored.block

    def abstract(self, shape: tuple[int, ...]) -> GpuTiles:
        *stack, rows, inputs = shape
        format, kind = self.format, SCALES[self.format.scales]
        lead, blocks, devices = (*stack, rows // ROWS), inputs // format.block, inputs // self.inputs

        def plane(index: int) -> jax.ShapeDtypeStruct:
            tiles = devices * format.num_tiles(self.inputs, index)
            return jax.ShapeDtypeStruct((*lead, tiles, ROWS, format.width), jnp.uint8)

        words = jax.ShapeDtypeStruct((*lead, blocks, kind.words, ROWS), jnp.int32) if kind.words else None
        types = (np.uint8 if format.scales == "power" else self.scale, np.int8)[: kind.halves]
        halves = tuple(jax.ShapeDtypeStruct((*lead, blocks, ROWS), type_) for type_ in types)
        high = plane(1) if format.high else None
        return GpuTiles(plane(0), high, words, halves, format, self.dtype, self.scale)

    @property
    def scale(self) -> np.dtype:
        if isinstance(self.stored, GgufKind):
            return FLOAT16
        return FLOAT32 if self.stored.coding.factored else self.stored.coding.scale

    def pack(self, tensors: Sequence[Stored], layout: Layout | None) -> GpuTiles:
        kept = self.stored.pack(tensors, layout)
        format = self.format
        if isinstance(kept, GgufBlocks):
            apart = unpack_blocks(kept.blocks, kept.type, format)
        else:
            apart = unpack_groups(kept, format)

        def plane(index: int, codes: np.ndarray, bits: int) -> np.ndarray:
            return _plane(_padded(codes, self.inputs, format.tile_inputs(index)), bits, format.width)

        low = plane(0, apart.codes & np.uint8((1 << format.bits) - 1), format.bits)
        high = plane(1, apart.codes >> np.uint8(format.bits), format.high) if format.high else None
        words = None if apart.words is None else _tiled(apart.words, 2)
        halves = tuple(_tiled(half, 1) for half in apart.halves)
        return GpuTiles(low, high, words, halves, format, self.dtype, self.scale)


def gpu_tiled(kind: WeightKind, rows: Sequence[int], inputs: int) -> WeightKind:
    """`kind` in tiles if it has such, and a device has whole tiles of `rows` and blocks of `inputs`; or as codes."""
    if isinstance(kind, OrderedKind):
        return replace(kind, kind=gpu_tiled(kind.kind, rows, inputs))
    if isinstance(kind, GgufKind) and kind.type in IQ4_CODINGS:
        return CodedKind(IQ4_CODINGS[kind.type], kind.dtype)
    if any(count % ROWS for count in rows) or inputs % kind.block:
        return kind
    format = None
    if isinstance(kind, GgufKind):
        format = block_format(kind.type, inputs) if kind.type in BLOCKS else None
    elif isinstance(kind, CodedKind) and kind.coding.codes == UINT8 and kind.coding.levels in ((), E2M1):
        format = group_format(kind.coding, inputs)
        if kind.coding.levels and format is not None:
            format = replace(format, offset=0, e2m1=True)
    return kind if format is None else GpuTiledKind(kind, format, inputs)  # type: ignore[arg-type]


def _padded(codes: np.ndarray, inputs: int, tile: int) -> np.ndarray:
    missing = -inputs % tile
    if missing == 0:
        return codes
    parts = codes.reshape(*codes.shape[:-1], -1, inputs)
    return np.pad(parts, [(0, 0)] * (parts.ndim - 1) + [(0, missing)]).reshape(*codes.shape[:-1], -1)


def _plane(codes: np.ndarray, bits: int, width: int) -> np.ndarray:
    *stack, rows, inputs = codes.shape
    per_byte = 8 // bits
    parts = codes.reshape(*stack, rows // ROWS, ROWS, inputs // (width * per_byte), per_byte, width)
    return np.ascontiguousarray(packed(parts, bits).swapaxes(-3, -2))


def _tiled(array: np.ndarray, kept: int) -> np.ndarray:
    """Rows 16 at a time, which become the last axis, after the `kept` last ones."""
    parts = array.reshape(*array.shape[: -1 - kept], -1, ROWS, *array.shape[-kept:])
    return np.ascontiguousarray(np.moveaxis(parts, -1 - kept, -1))


def _by_row(tiles: PackedMatrix) -> PackedMatrix:
    def of_plane(plane: Any) -> Any:
        return _rows_together(plane, -2, 2)

    return replace(
        tiles,
        low=of_plane(tiles.low),
        high=None if tiles.high is None else of_plane(tiles.high),
        words=None if tiles.words is None else _rows_together(tiles.words, -1, 2),
        halves=tuple(_rows_together(half, -1, 1) for half in tiles.halves),
    )


def _rows_together(array: Any, axis: int, kept: int) -> Any:
    """The rows of all tiles, which are an `axis`, as one axis; the last `kept` axes stay."""
    moved = jnp.moveaxis(array, axis, -1 - kept)
    return moved.reshape(*moved.shape[: -2 - kept], -1, *moved.shape[-kept:])


def _expand(tiles: PackedMatrix) -> Float[Array, "*n i"]:
    """Rows of tiles as float32, exactly what the kinds that they were made of give."""
    format, kind = tiles.format, SCALES[tiles.format.scales]
    codes = _codes(tiles)
    codes = jnp.asarray(E2M1, jnp.float32)[codes] if format.e2m1 else codes.astype(jnp.float32) - format.offset
    words = [] if tiles.words is None else [tiles.words[..., index] for index in range(kind.words)]
    groups = codes.reshape(*codes.shape[:-1], -1, format.group)
    if format.scales == "zero":
        scale, zero = (half.astype(jnp.float32)[..., None] for half in tiles.halves)
        return ((groups - zero) * scale).reshape(codes.shape)
    found = [group_scale(format, words, tiles.halves, group, tiles.scale) for group in range(kind.groups)]
    whole = block_scale(format, words, tiles.halves) if kind.blocks else (None, None)
    after = whole[0] if format.scales == "e4m3" else None  # the products before it are exact
    whole = (None, None) if after is not None else whole

    def spread(numbers: Sequence[Any], factor: Any) -> Any:
        stacked = jnp.stack(list(numbers), axis=-1)
        stacked = stacked if factor is None else stacked * factor[..., None]
        return stacked.reshape(*codes.shape[:-1], -1)[..., None]

    values = groups * spread([scale for scale, _ in found], whole[0])
    values = values + spread([shift for _, shift in found], whole[1]) if kind.shifts else values
    values = values.reshape(codes.shape)
    return values if after is None else values * jnp.repeat(after, format.block, axis=-1)


def _codes(tiles: PackedMatrix) -> Int[Array, "*n i"]:
    format = tiles.format
    inputs = (tiles.halves[0].shape[-1] if tiles.halves else tiles.words.shape[-2]) * format.block
    if format.bits == 8:
        flat = tiles.low.reshape(*tiles.low.shape[:-2], -1)[..., :inputs]
        return lax.bitcast_convert_type(flat, jnp.int8).astype(jnp.int32)

    def of_plane(plane: Any, bits: int) -> Any:
        return unpacked(plane, bits).reshape(*plane.shape[:-2], -1)[..., :inputs].astype(jnp.int32)

    low = of_plane(tiles.low, format.bits)
    return low if tiles.high is None else low | (of_plane(tiles.high, format.high) << format.bits)
