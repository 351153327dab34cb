"""GGUF block formats: codes and scales from packed bytes, and float32 from both inside a compiled step.

Every product of a scale and a code is exact in float32 and at most one sum rounds, so that the result is bit-identical
to gguf.quants.dequantize whatever the compiler contracts. Shifts by a broadcast vector, and not concatenations, keep
each decoder one loop for XLA. Layouts: ggml-quants.h, https://github.com/ggml-org/ggml
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, UInt8

from jaxllm.pallas_kernels.matrices import E2M1, power_of_two
from jaxllm.quantization.stored import unpacked

CodeBytes = Any
"""uint8 `[*n, bytes]` of NumPy or JAX; functions of it give arrays of the same library."""
BlockBytes = UInt8[Array, "*n bytes"]
BlockScales = tuple[Float32[Array, "*n groups"], Float32[Array, "*n groups"] | None]
"""The scale of each group in a block, and where the format has one its shift: `(code - offset) * scale + shift`."""


def _codes(packed: CodeBytes, run: int, bits: int) -> CodeBytes:
    """Each `run` bytes hold `8 / bits` runs of codes: the first in the lowest bits."""
    runs = packed.reshape(*packed.shape[:-1], -1, run)
    return unpacked(runs, bits).reshape(*packed.shape[:-1], -1)


def k_scales(packed: CodeBytes) -> tuple[CodeBytes, CodeBytes]:
    """Eight 6-bit scales and minima from 12 bytes of Q4_K or Q5_K: 0-3: two high bits of scale 4-7, then scale 0-3;
    4-7: the same of the minima; 8-11: four low bits of minimum 4-7, then of scale 4-7.
    """
    scale, minimum, low = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    join = jnp.concatenate if isinstance(packed, jax.Array) else np.concatenate
    scales = join([scale & 63, (low & 15) | ((scale >> 2) & 48)], axis=-1)
    minima = join([minimum & 63, (low >> 4) | ((minimum >> 2) & 48)], axis=-1)
    return scales, minima


def q3_scales(packed: CodeBytes) -> CodeBytes:
    """The sixteen 6-bit scales of Q3_K's 12 bytes: four low bits of each, then the two high ones."""
    return _codes(packed[..., :8], 8, 4) | _codes(packed[..., 8:], 4, 2) << 4


IQ4_LEVELS = tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)))
"""What the codes of IQ4_NL and IQ4_XS stand for."""


def iq4_scales(packed: CodeBytes) -> CodeBytes:
    """The eight 6-bit scales of IQ4_XS's six bytes: the two high bits of each, then the four low ones."""
    low, high = packed[..., 2:6, None] >> NIBBLES, packed[..., :2, None] >> PAIRS
    return (low & 15).reshape(*packed.shape[:-1], 8) | ((high & 3) << 4).reshape(*packed.shape[:-1], 8)


def ternary_codes(packed: CodeBytes) -> CodeBytes:
    """TQ1_0's 256 codes: five base-3 digits a byte, of 32 bytes and then of 16, and four of each of the last four.

    A byte holds digits as a fraction of 256: its carry when it is tripled is the first; what is left has the others.
    """
    parts = (packed[..., :32], THIRDS), (packed[..., 32:48], THIRDS), (packed[..., 48:52], THIRDS[:4])
    shifted = [(part[..., None, :] * thirds).reshape(*packed.shape[:-1], -1) for part, thirds in parts]
    join = jnp.concatenate if isinstance(packed, jax.Array) else np.concatenate
    return ((join(shifted, axis=-1).astype(np.uint16) * np.uint16(3)) >> np.uint16(8)).astype(np.uint8)


NIBBLES, PAIRS = np.array([0, 4], np.uint8), np.array([0, 2, 4, 6], np.uint8)
THIRDS = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]


def _power(blocks: BlockBytes) -> BlockScales:
    return power_of_two(blocks[..., :1]), None


def _half(blocks: BlockBytes, start: int) -> Float32[Array, "*n 1"]:
    return lax.bitcast_convert_type(blocks[..., start : start + 2], jnp.float16).astype(jnp.float32)[..., None]


def _scale_at(start: int) -> Callable[[BlockBytes], BlockScales]:
    return lambda blocks: (_half(blocks, start), None)


def _scale_and_minimum(blocks: BlockBytes) -> BlockScales:
    return _half(blocks, 0), _half(blocks, 2)


def _q2_k(blocks: BlockBytes) -> BlockScales:
    both = blocks[..., :16]
    return _half(blocks, 80) * (both & 15).astype(jnp.float32), -_half(blocks, 82) * (both >> 4).astype(jnp.float32)


def _q3_k(blocks: BlockBytes) -> BlockScales:
    return _half(blocks, 108) * (q3_scales(blocks[..., 96:108]).astype(jnp.float32) - 32), None


def _k_pairs(blocks: BlockBytes) -> BlockScales:
    scales, minima = (numbers.astype(jnp.float32) for numbers in k_scales(blocks[..., 4:16]))
    return _half(blocks, 0) * scales, -_half(blocks, 2) * minima


def _q6_k(blocks: BlockBytes) -> BlockScales:
    scales = lax.bitcast_convert_type(blocks[..., 192:208], jnp.int8).astype(jnp.float32)
    return _half(blocks, 208) * scales, None


def _iq4_xs(blocks: BlockBytes) -> BlockScales:
    return _half(blocks, 0) * (iq4_scales(blocks[..., 2:8]).astype(jnp.float32) - 32), None


class BlockFormat(NamedTuple):
    """A type of block.

    Attributes:
        elements, nbytes: weights and bytes of one block.
        codes: from blocks to uint8 `[*n, elements]`, one code a byte; codes of eight bits are signed.
        scales: from blocks to the scales and shifts of their groups.
        halves: the bytes at which float16 scales begin.
        offset: the code that stands for zero, before the shift.
        levels: what each code stands for, where that is not the code itself.
    """

    elements: int
    nbytes: int
    codes: Callable[[CodeBytes], CodeBytes]
    scales: Callable[[BlockBytes], BlockScales]
    halves: tuple[int, ...]
    offset: int = 0
    levels: tuple[float, ...] = ()

    @property
    def density(self) -> float:
        return self.nbytes / self.elements


FORMATS = {
    "Q4_0": BlockFormat(32, 18, lambda b: _codes(b[..., 2:], 16, 4), _scale_at(0), (0,), 8),
    "Q4_1": BlockFormat(32, 20, lambda b: _codes(b[..., 4:], 16, 4), _scale_and_minimum, (0, 2)),
    "Q5_0": BlockFormat(
        32, 22, lambda b: _codes(b[..., 6:], 16, 4) | _codes(b[..., 2:6], 1, 1) << 4, _scale_at(0), (0,), 16
    ),
    "Q5_1": BlockFormat(
        32, 24, lambda b: _codes(b[..., 8:], 16, 4) | _codes(b[..., 4:8], 1, 1) << 4, _scale_and_minimum, (0, 2)
    ),
    "Q8_0": BlockFormat(32, 34, lambda b: b[..., 2:], _scale_at(0), (0,)),
    "Q2_K": BlockFormat(256, 84, lambda b: _codes(b[..., 16:80], 32, 2), _q2_k, (80, 82)),
    "Q3_K": BlockFormat(
        256, 110, lambda b: _codes(b[..., 32:96], 32, 2) | _codes(b[..., :32], 32, 1) << 2, _q3_k, (108,), 4
    ),
    "Q4_K": BlockFormat(256, 144, lambda b: _codes(b[..., 16:], 32, 4), _k_pairs, (0, 2)),
    "Q5_K": BlockFormat(
        256, 176, lambda b: _codes(b[..., 48:], 32, 4) | _codes(b[..., 16:48], 32, 1) << 4, _k_pairs, (0, 2)
    ),
    "Q6_K": BlockFormat(
        256, 210, lambda b: _codes(b[..., :128], 64, 4) | _codes(b[..., 128:192], 32, 2) << 4, _q6_k, (208,), 32
    ),
    "MXFP4": BlockFormat(32, 17, lambda b: _codes(b[..., 1:], 16, 4), _power, (), levels=E2M1),
    "IQ4_NL": BlockFormat(32, 18, lambda b: _codes(b[..., 2:], 16, 4), _scale_at(0), (0,), levels=IQ4_LEVELS),
    "IQ4_XS": BlockFormat(256, 136, lambda b: _codes(b[..., 8:], 16, 4), _iq4_xs, (0,), levels=IQ4_LEVELS),
    "TQ1_0": BlockFormat(256, 54, lambda b: ternary_codes(b[..., :52]), _scale_at(52), (52,), 1),
    "TQ2_0": BlockFormat(256, 66, lambda b: _codes(b[..., :64], 32, 2), _scale_at(64), (64,), 1),
}
"""The types of block that weights may be kept in."""


def decode(blocks: UInt8[Array, "*n blocks bytes"], dtype: str) -> Float32[Array, "*n i"]:
    """Rows of blocks of GGML type `dtype` as float32."""
    format = FORMATS[dtype]
    codes = format.codes(blocks)
    codes = lax.bitcast_convert_type(codes, jnp.int8) if dtype == "Q8_0" else codes
    scale, shift = format.scales(blocks)
    numbers = jnp.asarray(format.levels, jnp.float32)[codes] if format.levels else codes.astype(jnp.float32)
    groups = numbers.reshape(*scale.shape, -1) - format.offset
    values = groups * scale[..., None]
    values = values if shift is None else values + shift[..., None]
    return values.reshape(*blocks.shape[:-2], -1)
