"""Weights as kernels read them that expand a tile of a matrix at a time: as they are stored, or in tiles of codes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int8

from jaxllm.sharding.mesh import gather_over_tensor


@dataclass(frozen=True)
class KernelMatrix:
    """`(code - zero) * scale` or `levels[code] * scale`, the matrix `[o, i]` or a stack of them `[*stack, o, i]`.

    Worked example, four bits in groups of 32: byte `j` of a row belongs to group `j // 16`; its low bits are input
    `32 * (j // 16) + j % 16`, its high ones the input 16 after that.

    Attributes:
        codes: `[*stack, o, i * bits / 8]`: floats or integers of eight bits and more, or bytes of several codes.
        dtype: of the numbers that a tile is expanded to.
        scale: floats `[*stack, o / scale_rows, i / scale_columns]`; None where codes are the numbers themselves.
        zero: integers as `scale`; None where `middle` is every group's.
        scale_rows, scale_columns: neighbouring numbers that share a scale.
        bits: of a code.
        middle: the code that stands for zero.
        levels: what each code stands for; empty: itself.
        rounds: whether inputs are rounded to int8 too, by runs (`quantize_runs`).
        order: int32 `[*stack, i]`: column `j` is for input `order[j]`; None where columns lie as inputs do.
        divided: whether the columns are for inputs of all devices.
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
    order: Any = None
    divided: bool = False

    @property
    def planes(self) -> int:
        return max(1, 8 // self.bits)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], self.codes.shape[-1] * self.planes)

    @property
    def group_stored(self) -> int:
        """Stored numbers that hold the codes of a group of a row."""
        return self.scale_columns // self.planes

    @property
    def tables(self) -> dict[str, jax.Array]:
        """The arrays beside the codes that there are, by name."""
        levels = jnp.asarray(self.levels, jnp.float32) if self.levels else None
        tables = {"scale": self.scale, "zero": self.zero, "levels": levels}
        return {name: table for name, table in tables.items() if table is not None}

    def columns(self, at: jax.Array, plane: int) -> jax.Array:
        """The inputs that the codes in a plane of stored numbers `at` of a row are for."""
        if self.planes == 1:
            return at
        group = self.group_stored
        return lax.div(at, group) * self.scale_columns + plane * group + lax.rem(at, group)

    def codes_in(self, stored: jax.Array, plane: int) -> jax.Array:
        return (stored.astype(jnp.int32) >> (plane * self.bits)) & ((1 << self.bits) - 1)

    @property
    def scales_whole_rows(self) -> bool:
        """A row's scale can be applied to the product."""
        return self.scale is not None and self.zero is None and self.scale_columns == self.shape[-1]


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What the codes of floats of four bits stand for."""
ROWS = 16
"""Outputs in a tile, as the C++ kernels have them: what a tensor core multiplies at a time."""

EXPANDED_BYTES = 2**28
"""Of a matrix that are expanded at a time."""


@dataclass(frozen=True)
class PackedFormat:
    """How codes and scales lie in tiles.

    A code is cut into a low plane and a high one of `bits` and `high` bits. In either, a byte holds the codes of inputs
    that are `width` apart: worked example, bits 4 and width 32: byte `j` of a tile's row has input `j` in its low
    nibble, and input `32 + j` in its high one. So shifts by the same amount give neighbouring inputs.

    Attributes:
        bits, high: of a code, in the low plane and in the high plane; `high` is 0 where there is none.
        width: neighbouring inputs whose codes lie at the same bits of neighbouring bytes.
        group: neighbouring inputs that share a scale.
        offset: the code that stands for zero; codes of eight bits are signed, and have none.
        scales: how scales are kept; one of `SCALES`.
        e2m1: whether codes of four bits are floats: a sign, two bits of exponent, and one of mantissa.
    """

    bits: int
    high: int = 0
    width: int = 32
    group: int = 32
    offset: int = 0
    scales: str = "float"
    e2m1: bool = False

    @property
    def block(self) -> int:
        """Inputs whose scales are read together."""
        return SCALES[self.scales].groups * self.group

    @property
    def unit(self) -> int:
        """The fewest inputs that a kernel walks at a time: whole tiles with whole blocks of scales."""
        return math.lcm(*(self.tile_inputs(plane) for plane in range(len(self.planes))), self.block)

    @property
    def has_shift(self) -> bool:
        return SCALES[self.scales].shifts

    @property
    def expanded_from(self) -> int:
        """The fewest rows for which a matrix is expanded in memory and multiplied by a library, measured on an H100.

        That writes and reads each number once more, which a few hundred rows outweigh; fewer where a kernel's steps are
        so long that it can load none ahead.
        """
        return 257 if self.unit <= 64 else 129

    @property
    def planes(self) -> tuple[int, ...]:
        """Bits of a code in the low plane, and in the high one if there is one."""
        return (self.bits, self.high) if self.high else (self.bits,)

    def tile_inputs(self, plane: int) -> int:
        """Inputs that a tile of a plane holds: of the low one (0) or the high one (1)."""
        return self.width * 8 // self.planes[plane]

    def num_tiles(self, inputs: int, plane: int) -> int:
        """Tiles of a row, of which the last may be padded."""
        return -(-inputs // self.tile_inputs(plane))

    def place(self, number: int, plane: int) -> tuple[int, int]:
        """Of the `number`th `width` inputs: the tile of a plane, and the bit of its bytes where their codes begin."""
        tile, part = divmod(number, 8 // self.planes[plane])
        return tile, part * self.planes[plane]


@dataclass(frozen=True)
class Scales:
    """A way of keeping scales.

    Attributes:
        groups: whose scales lie together in a block.
        words, halves: numbers of 32 bits, and of another type, that a block has for each output.
        shifts: whether a group has something that is added to its numbers.
        blocks: whether a block has a scale of its own, by which those of its groups are multiplied.
    """

    groups: int
    words: int
    halves: int
    shifts: bool = False
    blocks: bool = False


SCALES = {
    "float": Scales(1, 0, 1),
    "power": Scales(1, 0, 1),
    "pair": Scales(2, 1, 0),
    "zero": Scales(1, 0, 2, shifts=True),
    "minimum": Scales(1, 1, 0, shifts=True),
    "e4m3": Scales(4, 1, 1, blocks=True),
    "k_pairs": Scales(8, 4, 0, shifts=True, blocks=True),
    "k_nibbles": Scales(16, 5, 0, shifts=True, blocks=True),
    "k_bytes": Scales(16, 4, 1, blocks=True),
    "k_six": Scales(16, 3, 1, blocks=True),
}
"""What scales are kept as.

float: a float a group. power: a power of two, by the byte of its exponent. pair: the 16-bit floats of two groups in a
word. zero: a float, and the code of zero. e4m3: a word of four groups' scales in e4m3, and a float of the whole row.
minimum: a scale and what is added, float16 both, in a word. k_pairs: scales and minima of six bits: a word's bytes have
those of two groups, (scale, minimum) twice, and the fourth such word lies in the two upper bits of each byte of three
others; then float16 scales of both in a word. k_nibbles: a scale and a minimum of four bits in a byte; then those.
k_bytes: signed bytes, and a float16. k_six: four words of six bits a byte as in k_pairs, about 32, and a float16.
"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedMatrix:
    """A matrix `[o, i]`, or a stack of them, in tiles.

    Scales are for whole blocks of inputs; a row's last tiles may hold codes after those, which are zero.

    Attributes:
        low, high: uint8 `[*stack, o / 16, i / inputs of a tile, 16, width]`; `high` may be None.
        words: int32 `[*stack, o / 16, i / block, words, 16]`, or None.
        halves: floats (or the zeros' uint8) `[*stack, o / 16, i / block, 16]`, as many as the format has.
    """

    low: Any
    high: Any
    words: Any
    halves: tuple[Any, ...]
    format: PackedFormat = field(metadata={"static": True})
    dtype: np.dtype = field(metadata={"static": True})
    scale: np.dtype = field(metadata={"static": True})
    """Of the floats in words."""
    order: Any = None
    divided: bool = field(default=False, metadata={"static": True})
    """As of a `KernelMatrix`."""

    @property
    def shape(self) -> tuple[int, ...]:
        *stack, tiles, _, rows, _ = self.low.shape
        blocks = self.halves[0].shape[-2] if self.halves else self.words.shape[-3]
        return (*stack, tiles * rows, blocks * self.format.block)


def half_in(word: jax.Array, index: int, dtype: np.dtype) -> jax.Array:
    """The low (0) or high (1) 16 bits of words, which are floats of `dtype`, as float32."""
    half = (word >> (16 * index)).astype(jnp.int16)
    return lax.bitcast_convert_type(half, dtype).astype(jnp.float32)


def byte_in(word: jax.Array, index: int, mask: int = 255) -> jax.Array:
    return (word >> (8 * index)) & mask


def fourth_of_six(words: Sequence[jax.Array]) -> jax.Array:
    """The word of six bits a byte that has two bits of each byte in each of three others."""
    first, second, third = words
    return ((first >> 6) & 0x03030303) | ((second >> 4) & 0x0C0C0C0C) | ((third >> 2) & 0x30303030)


def power_of_two(exponents: jax.Array) -> jax.Array:
    """E8M0 as float32: 127 means 1, and 0 means 2 ** -127, which is a subnormal number. 255 is not to come."""
    smallest = 0x00400000
    return lax.bitcast_convert_type(jnp.maximum(exponents.astype(jnp.int32) << 23, smallest), jnp.float32)


def from_e4m3(bits: Int[Array, "..."]) -> Float[Array, "..."]:
    """float32 of e4m3's bits, by way of a float16 whose exponent is 8 too small; of "not a number" it is 480."""
    half = ((bits & 128) << 8 | (bits & 127) << 7).astype(jnp.uint16)
    return lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32) * 2.0**8


def group_scale(
    format: PackedFormat, words: Sequence[jax.Array], halves: Sequence[jax.Array], group: int, scale: np.dtype
) -> tuple[jax.Array, jax.Array | None]:
    """The scale and the shift of one group of a block, without what `block_scale` gives: `code * scale + shift`."""
    kind = format.scales
    if kind == "float":
        return halves[0].astype(jnp.float32), None
    if kind == "power":
        return power_of_two(halves[0]), None
    if kind == "pair":
        return half_in(words[0], group, scale), None
    if kind == "zero":
        own = halves[0].astype(jnp.float32)
        return own, -own * halves[1].astype(jnp.float32)
    if kind == "minimum":
        return half_in(words[0], 0, scale), half_in(words[0], 1, scale)
    if kind == "e4m3":
        return from_e4m3(byte_in(words[0], group)), None
    if kind == "k_pairs":
        pair, second = divmod(group, 2)
        word = words[pair] if pair < 3 else fourth_of_six(words[:3])
        own, minimum = (byte_in(word, 2 * second + index, 63).astype(jnp.float32) for index in range(2))
        return own, minimum
    if kind == "k_nibbles":
        byte = byte_in(words[group // 4], group % 4)
        return (byte & 15).astype(jnp.float32), (byte >> 4).astype(jnp.float32)
    if kind == "k_bytes":
        signed = (words[group // 4] << (24 - 8 * (group % 4))) >> 24
        return signed.astype(jnp.float32), None
    assert kind == "k_six"
    word = words[group // 4] if group < 12 else fourth_of_six(words[:3])
    return (byte_in(word, group % 4, 63) - 32).astype(jnp.float32), None


def block_scale(
    format: PackedFormat, words: Sequence[jax.Array], halves: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array | None]:
    """What a block's scales and shifts are multiplied by, where it has that."""
    if SCALES[format.scales].shifts:
        return half_in(words[-1], 0, np.dtype(np.float16)), -half_in(words[-1], 1, np.dtype(np.float16))
    return halves[0].astype(jnp.float32), None


def arranged(x: jax.Array, order: jax.Array, divided: bool = False) -> jax.Array:
    """The inputs `order` of `x` `[n, i]`, which is `divided` over the devices or whole on each."""
    x = gather_over_tensor(x) if divided else x
    return x.at[:, order].get(mode="promise_in_bounds", unique_indices=True)


RUN = 64
"""Inputs that are rounded by one scale. A few of a token's inputs are a hundred times as large as the others, which one
scale for all would round away: that costs SmolLM2 five percent of perplexity, runs of 64 cost one."""


def quantize_runs(x: Float[Array, "T i"]) -> tuple[Int8[Array, "T i"], Float[Array, "T r"]]:
    """The nearest `codes * scale`, a scale for each RUN inputs of a row; a run of zeros has the scale 1."""
    size = x.shape[1]
    runs = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -size % RUN))).reshape(len(x), -1, RUN)
    peak = jnp.abs(runs).max(axis=2)
    scale = jnp.where(peak > 0, peak / 127, 1)
    codes = jnp.round(runs / scale[..., None]).astype(jnp.int8)
    return codes.reshape(len(x), -1)[:, :size], scale
