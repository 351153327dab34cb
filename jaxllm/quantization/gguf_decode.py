"""GGUF block formats in JAX: from packed bytes to float32 inside a compiled step.

Each function expands blocks `[..., bytes]` uint8 into `[..., elements]` float32. Every product of a scale and a code is
exact in float32 and at most one sum rounds, so that the result is bit-identical to gguf.quants.dequantize whatever the
compiler contracts. Shifts by a broadcast vector, and not concatenations, keep each of them one loop for XLA.
Layouts: ggml-quants.h, https://github.com/ggml-org/ggml
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, UInt8

BlockBytes = UInt8[Array, "*n bytes"]
Elements = Float32[Array, "*n elements"]


def _half(blocks: BlockBytes, start: int) -> Float32[Array, "*n 1"]:
    return lax.bitcast_convert_type(blocks[..., start : start + 2], jnp.float16).astype(jnp.float32)[..., None]


def _shifted(packed: UInt8[Array, "*n m"], shifts: list[int], mask: int) -> UInt8[Array, "*n s m"]:
    """`packed` once for each of `shifts`: the bits of `mask` from there on."""
    return (packed[..., None, :] >> np.array(shifts, np.uint8)[:, None]) & np.uint8(mask)


def _flat(values: Array, axes: int) -> Array:
    """The last `axes` axes as one."""
    return values.reshape(*values.shape[:-axes], -1)


def _nibbles(packed: BlockBytes) -> Elements:
    return _flat(_shifted(packed, [0, 4], 15), 2).astype(jnp.float32)


def _five_bits(high: UInt8[Array, "*n 4"], packed: UInt8[Array, "*n 16"]) -> Elements:
    bits = _flat((high[..., :, None] >> np.arange(8, dtype=np.uint8)) & np.uint8(1), 2)
    return (_flat(_shifted(packed, [0, 4], 15), 2) | (bits << np.uint8(4))).astype(jnp.float32)


def _two_bits(packed: UInt8[Array, "*n 64"]) -> UInt8[Array, "*n 8 32"]:
    """Each half of 32 bytes holds four groups of 32, two bits each."""
    pairs = _shifted(packed.reshape(*packed.shape[:-1], 2, 32), [0, 2, 4, 6], 3)
    return pairs.reshape(*packed.shape[:-1], 8, 32)


def _q2_k(blocks: BlockBytes) -> Elements:
    scales, codes = blocks[..., :16], _two_bits(blocks[..., 16:80])
    codes = codes.reshape(*codes.shape[:-2], 16, 16).astype(jnp.float32)
    scale = _half(blocks, 80) * (scales & np.uint8(15)).astype(jnp.float32)
    shift = _half(blocks, 82) * (scales >> np.uint8(4)).astype(jnp.float32)
    return _flat(codes * scale[..., None] - shift[..., None], 2)


def _q3_k(blocks: BlockBytes) -> Elements:
    """Codes have two bits among `_two_bits` and one in a mask, where a zero means 4 less."""
    high = _shifted(blocks[..., :32], list(range(8)), 1)
    codes = (_two_bits(blocks[..., 32:96]) | (high << np.uint8(2))).astype(jnp.float32) - 4
    packed = blocks[..., 96:108]
    low = _flat(_shifted(packed[..., :8], [0, 4], 15), 2)
    top = _flat(_shifted(packed[..., 8:], [0, 2, 4, 6], 3), 2)
    scale = _half(blocks, 108) * ((low | (top << np.uint8(4))).astype(jnp.float32) - 32)
    return _flat(codes.reshape(*codes.shape[:-2], 16, 16) * scale[..., None], 2)


def _k_scales(packed: UInt8[Array, "*n 12"]) -> tuple[Array, Array]:
    """Eight 6-bit scales and eight minima, as floats; see `gguf_blocks.k_scales`."""
    scale, minimum, low = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = [scale & np.uint8(63), (low & np.uint8(15)) | ((scale >> np.uint8(2)) & np.uint8(48))]
    minima = [minimum & np.uint8(63), (low >> np.uint8(4)) | ((minimum >> np.uint8(2)) & np.uint8(48))]
    return tuple(jnp.concatenate(parts, axis=-1).astype(jnp.float32) for parts in (scales, minima))  # type: ignore[return-value]


def _scale_and_shift(blocks: BlockBytes, codes: UInt8[Array, "*n 8 32"]) -> Elements:
    scales, minima = _k_scales(blocks[..., 4:16])
    scale, shift = _half(blocks, 0) * scales, _half(blocks, 2) * minima
    return _flat(codes.astype(jnp.float32) * scale[..., None] - shift[..., None], 2)


def _paired_nibbles(packed: UInt8[Array, "*n 128"]) -> UInt8[Array, "*n 8 32"]:
    """Every 32 bytes hold two groups of 32: low nibbles, then high ones."""
    groups = _shifted(packed.reshape(*packed.shape[:-1], 4, 32), [0, 4], 15)
    return groups.reshape(*packed.shape[:-1], 8, 32)


def _q5_k(blocks: BlockBytes) -> Elements:
    high = _shifted(blocks[..., 16:48], list(range(8)), 1)
    return _scale_and_shift(blocks, _paired_nibbles(blocks[..., 48:]) | (high << np.uint8(4)))


def _q6_k(blocks: BlockBytes) -> Elements:
    """Each half of a block: 64 bytes of low nibbles make groups 0, 1 and, above them, 2, 3; 32 bytes have the rest."""
    lead = blocks.shape[:-1]
    low = _shifted(blocks[..., :128].reshape(*lead, 2, 64), [0, 4], 15).reshape(*lead, 8, 32)
    codes = (low | (_two_bits(blocks[..., 128:192]) << np.uint8(4))).astype(jnp.float32) - 32
    scale = _half(blocks, 208) * lax.bitcast_convert_type(blocks[..., 192:208], jnp.int8).astype(jnp.float32)
    return _flat(codes.reshape(*lead, 16, 16) * scale[..., None], 2)


class DeviceFormat(NamedTuple):
    """Weights and bytes of one block, the function that expands blocks, and where their float16 scales lie."""

    elements: int
    nbytes: int
    expand: Callable[[BlockBytes], Elements]
    scales: tuple[int, ...]

    @property
    def density(self) -> float:
        """Bytes a weight."""
        return self.nbytes / self.elements


FORMATS = {
    "Q4_0": DeviceFormat(32, 18, lambda b: (_nibbles(b[..., 2:]) - 8) * _half(b, 0), (0,)),
    "Q4_1": DeviceFormat(32, 20, lambda b: _nibbles(b[..., 4:]) * _half(b, 0) + _half(b, 2), (0, 2)),
    "Q5_0": DeviceFormat(32, 22, lambda b: (_five_bits(b[..., 2:6], b[..., 6:]) - 16) * _half(b, 0), (0,)),
    "Q5_1": DeviceFormat(32, 24, lambda b: _five_bits(b[..., 4:8], b[..., 8:]) * _half(b, 0) + _half(b, 2), (0, 2)),
    "Q8_0": DeviceFormat(
        32, 34, lambda b: lax.bitcast_convert_type(b[..., 2:], jnp.int8).astype(jnp.float32) * _half(b, 0), (0,)
    ),
    "Q2_K": DeviceFormat(256, 84, _q2_k, (80, 82)),
    "Q3_K": DeviceFormat(256, 110, _q3_k, (108,)),
    "Q4_K": DeviceFormat(256, 144, lambda b: _scale_and_shift(b, _paired_nibbles(b[..., 16:])), (0, 2)),
    "Q5_K": DeviceFormat(256, 176, _q5_k, (0, 2)),
    "Q6_K": DeviceFormat(256, 210, _q6_k, (208,)),
}
"""The types of block that weights may be kept in."""


def decode(blocks: UInt8[Array, "*n blocks bytes"], dtype: str) -> Float32[Array, "*n i"]:
    """Rows of blocks of GGML type `dtype` as float32."""
    return _flat(FORMATS[dtype].expand(blocks), 2)
