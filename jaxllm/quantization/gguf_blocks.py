"""GGUF block formats: from packed bytes to float32.

Each function expands `[n, bytes]` uint8 blocks into `[n, elements]` float32, in ggml's order of operations, so that the
result is bit-identical to gguf.quants.dequantize. Layouts: ggml-quants.h, https://github.com/ggml-org/ggml
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, UInt8

from jaxllm.errors import CheckpointError

Blocks = UInt8[np.ndarray, "n _"]
Values = Float32[np.ndarray, "n _"]

_CHUNK = 1 << 20  # elements expanded at a time, so that temporaries stay in cache


class BlockFormat(NamedTuple):
    """Weights in one block, bytes in one block, and the function that expands blocks in place."""

    elements: int
    nbytes: int
    expand: Callable[[Blocks, Values], None]


def dequantize(data: UInt8[np.ndarray, " b"], dtype: str, shape: tuple[int, ...]) -> Float32[np.ndarray, "..."]:
    """Expand the bytes of one tensor of GGML type `dtype` into float32 of `shape`.

    Types outside `BLOCK_FORMATS` go through gguf's own NumPy code. Raises CheckpointError for a type neither knows, or
    when the byte count does not match the shape.
    """
    block = BLOCK_FORMATS.get(dtype)
    if block is None:
        return _dequantize_by_gguf(data, dtype, shape)
    count, rest = divmod(math.prod(shape), block.elements)
    if rest or data.size != count * block.nbytes:
        raise CheckpointError(f"{data.size:,} bytes are no {dtype} tensor of shape {shape}")
    blocks = data.reshape(count, block.nbytes)
    out = np.empty((count, block.elements), np.float32)
    step = _CHUNK // block.elements
    for start in range(0, count, step):
        block.expand(blocks[start : start + step], out[start : start + step])
    return out.reshape(shape)


def _dequantize_by_gguf(data: np.ndarray, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    from gguf import GGMLQuantizationType, quants

    try:
        return quants.dequantize(data.reshape(*shape[:-1], -1), GGMLQuantizationType[dtype]).reshape(shape)
    except (KeyError, NotImplementedError):
        raise CheckpointError(
            f"GGML type {dtype} cannot be dequantized; known are {', '.join(BLOCK_FORMATS)}"
        ) from None
    except ValueError:
        raise CheckpointError(f"{data.size:,} bytes are no {dtype} tensor of shape {shape}") from None


def _half(blocks: Blocks, start: int, count: int = 1) -> Float32[np.ndarray, "n count"]:
    return blocks[:, start : start + 2 * count].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: Blocks, out: Values) -> None:
    half = packed.shape[1]
    np.bitwise_and(packed, 15, out=out[:, :half])
    np.right_shift(packed, 4, out=out[:, half:])


def _five_bits(high: Blocks, packed: Blocks, out: Values) -> None:
    bits = np.unpackbits(high, axis=1, bitorder="little") << 4
    np.bitwise_or(packed & 15, bits[:, :16], out=out[:, :16])
    np.bitwise_or(packed >> 4, bits[:, 16:], out=out[:, 16:])


def _q4_0(blocks: Blocks, out: Values) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= 8
    out *= _half(blocks, 0)


def _q4_1(blocks: Blocks, out: Values) -> None:
    _nibbles(blocks[:, 4:], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q5_0(blocks: Blocks, out: Values) -> None:
    _five_bits(blocks[:, 2:6], blocks[:, 6:], out)
    out -= 16
    out *= _half(blocks, 0)


def _q5_1(blocks: Blocks, out: Values) -> None:
    _five_bits(blocks[:, 4:8], blocks[:, 8:], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q8_0(blocks: Blocks, out: Values) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks, 0), out=out)


def k_scales(packed: UInt8[np.ndarray, "*n 12"]) -> tuple[np.ndarray, np.ndarray]:
    """Eight 6-bit scales and eight 6-bit minima a block.

    Bytes 0-3: two high bits of scale 4-7, then scale 0-3; 4-7: the same of the minima;
    8-11: four low bits of minimum 4-7, then of scale 4-7.
    """
    scale, minimum, low = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([scale & 63, (low & 15) | ((scale >> 2) & 48)], axis=-1)
    minima = np.concatenate([minimum & 63, (low >> 4) | ((minimum >> 2) & 48)], axis=-1)
    return scales, minima


def _scale_and_shift(blocks: Blocks, groups: Float32[np.ndarray, "n 8 32"]) -> None:
    scales, minima = k_scales(blocks[:, 4:16])
    groups *= (_half(blocks, 0) * scales)[:, :, None]
    groups -= (_half(blocks, 2) * minima)[:, :, None]


def _q4_k(blocks: Blocks, out: Values) -> None:
    packed = blocks[:, 16:].reshape(-1, 4, 32)
    pairs = out.reshape(-1, 4, 2, 32)
    np.bitwise_and(packed, 15, out=pairs[:, :, 0])
    np.right_shift(packed, 4, out=pairs[:, :, 1])
    _scale_and_shift(blocks, out.reshape(-1, 8, 32))


def _q5_k(blocks: Blocks, out: Values) -> None:
    high, packed = blocks[:, 16:48], blocks[:, 48:].reshape(-1, 4, 32)
    groups = out.reshape(-1, 8, 32)
    for pair in range(4):
        low, top = packed[:, pair] & 15, packed[:, pair] >> 4
        np.bitwise_or(low, ((high >> (2 * pair)) & 1) << 4, out=groups[:, 2 * pair])
        np.bitwise_or(top, ((high >> (2 * pair + 1)) & 1) << 4, out=groups[:, 2 * pair + 1])
    _scale_and_shift(blocks, groups)


def _q6_k(blocks: Blocks, out: Values) -> None:
    low, high = blocks[:, :128].reshape(-1, 2, 2, 32), blocks[:, 128:192].reshape(-1, 2, 32)
    groups = out.reshape(-1, 2, 4, 32)
    for part in range(4):
        nibble = low[:, :, part % 2] >> 4 if part >= 2 else low[:, :, part % 2] & 15
        np.bitwise_or(nibble, ((high >> (2 * part)) & 3) << 4, out=groups[:, :, part])
    out -= 32
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    out.reshape(-1, 16, 16)[...] *= scales[:, :, None]


BLOCK_FORMATS = {
    "Q4_0": BlockFormat(32, 18, _q4_0),
    "Q4_1": BlockFormat(32, 20, _q4_1),
    "Q5_0": BlockFormat(32, 22, _q5_0),
    "Q5_1": BlockFormat(32, 24, _q5_1),
    "Q8_0": BlockFormat(32, 34, _q8_0),
    "Q4_K": BlockFormat(256, 144, _q4_k),
    "Q5_K": BlockFormat(256, 176, _q5_k),
    "Q6_K": BlockFormat(256, 210, _q6_k),
}
