"""Weights of few bits taken apart, on the host: a code for each number, and the bits of their scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from jaxllm.pallas_kernels.matrices import PackedFormat
from jaxllm.quantization.coded import Coded
from jaxllm.quantization.gguf_blocks import k_scales
from jaxllm.quantization.stored import E8M0, Coding, unpacked

F16, INT32 = np.dtype(np.float16), np.dtype(np.int32)

BlocksOfRows = UInt8[np.ndarray, "*n bytes"]


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
    found = BLOCKS[type].unpack(blocks)
    found = found._replace(codes=found.codes.reshape(*blocks.shape[:-2], -1))
    return found._replace(words=_pairs(*found.halves), halves=()) if format.scales == "pair" else found


def group_format(coding: Coding, inputs: int) -> PackedFormat | None:
    """The format for groups of codes without levels, of rows of that many inputs; None if there is none."""
    bits, group, scale, symmetric = coding.bits, coding.block[1], coding.scale, coding.symmetric
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


MOST_GROUP = 256
"""Inputs of a group that a kernel walks at a time; the scale of a longer one is repeated."""


def _fitting(format: PackedFormat, inputs: int) -> PackedFormat:
    """`format`, or with tiles half as wide where rows are no whole ones: less is padded then, mostly nothing."""
    return format if inputs % format.unit == 0 else replace(format, width=16)


def unpack_groups(weight: Coded, format: PackedFormat) -> Unpacked:
    """Groups of codes, for the format that `group_format` gives."""
    bits = weight.coding.bits
    codes = unpacked(weight.codes, bits).reshape(*weight.scale.shape[:-1], -1)
    repeats = codes.shape[-1] // weight.scale.shape[-1] // format.group
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


def _half(blocks: BlocksOfRows, start: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(F16)[..., 0]


def _pairs(scales: np.ndarray) -> np.ndarray:
    """16-bit floats, two in a word."""
    return np.ascontiguousarray(scales).view(INT32)[..., None]


def _shifted(packed: BlocksOfRows, shifts: list[int], mask: int) -> np.ndarray:
    """`packed` once for each of `shifts`: the bits of `mask` from there on, `[…, shifts, bytes]`."""
    return (packed[..., None, :] >> np.array(shifts, np.uint8)[:, None]) & np.uint8(mask)


def _nibbles(packed: BlocksOfRows, run: int) -> np.ndarray:
    """Each run of bytes holds as many codes in its low nibbles, and then as many in its high ones."""
    return _shifted(packed.reshape(*packed.shape[:-1], -1, run), [0, 4], 15).reshape(*packed.shape[:-1], -1)


def _two_bits(packed: BlocksOfRows) -> np.ndarray:
    """Each 32 bytes hold four times 32 codes."""
    return _shifted(packed.reshape(*packed.shape[:-1], -1, 32), [0, 2, 4, 6], 3).reshape(*packed.shape[:-1], -1)


def _bits(packed: BlocksOfRows) -> np.ndarray:
    """32 bytes hold eight times 32 bits."""
    return _shifted(packed, list(range(8)), 1).reshape(*packed.shape[:-1], -1)


def _flags(packed: BlocksOfRows) -> np.ndarray:
    return np.unpackbits(packed, axis=-1, bitorder="little")


def _q2_k(blocks: BlocksOfRows) -> Unpacked:
    words = np.concatenate([_words(blocks, 0, 16), _words(blocks, 80, 84)], axis=-1)
    return Unpacked(_two_bits(blocks[..., 16:80]), words)


def _q3_k(blocks: BlocksOfRows) -> Unpacked:
    codes = _two_bits(blocks[..., 32:96]) | _bits(blocks[..., :32]) << 2
    packed = blocks[..., 96:108]
    lead = packed.shape[:-1]
    low = _shifted(packed[..., :8], [0, 4], 15).reshape(*lead, 16)
    top = _shifted(packed[..., 8:], [0, 2, 4, 6], 3).reshape(*lead, 16)
    return Unpacked(codes, _six_bits(low | top << 4), (_half(blocks, 108),))


def _k_pairs(blocks: BlocksOfRows) -> np.ndarray:
    """Scales and minima as `SCALES` says."""
    both = np.stack(k_scales(blocks[..., 4:16]), axis=-1).reshape(*blocks.shape[:-1], 16)
    return np.concatenate([_six_bits(both), _words(blocks, 0, 4)], axis=-1)


def _six_bits(values: UInt8[np.ndarray, "*n 16"]) -> np.ndarray:
    """Sixteen numbers of six bits as three words; see `matrices.fourth_of_six`."""
    fours = values.reshape(*values.shape[:-1], 4, 4)
    last = (fours[..., 3:, :] >> np.array([0, 2, 4], np.uint8)[:, None]) & np.uint8(3)
    return np.ascontiguousarray(fours[..., :3, :] | last << 6).view(INT32)[..., 0]


def _q6_k(blocks: BlocksOfRows) -> Unpacked:
    codes = _nibbles(blocks[..., :128], 64) | _two_bits(blocks[..., 128:192]) << 4
    return Unpacked(codes, _words(blocks, 192, 208), (_half(blocks, 208),))


class GpuFormat(NamedTuple):
    format: PackedFormat
    unpack: Callable[[BlocksOfRows], Unpacked]


BLOCKS = {
    "Q4_0": GpuFormat(
        PackedFormat(4, offset=8, scales="pair"), lambda b: Unpacked(_nibbles(b[..., 2:], 16), None, (_half(b, 0),))
    ),
    "Q4_1": GpuFormat(PackedFormat(4, scales="minimum"), lambda b: Unpacked(_nibbles(b[..., 4:], 16), _words(b, 0, 4))),
    "Q5_0": GpuFormat(
        PackedFormat(4, 1, offset=16, scales="pair"),
        lambda b: Unpacked(_nibbles(b[..., 6:], 16) | _flags(b[..., 2:6]) << 4, None, (_half(b, 0),)),
    ),
    "Q5_1": GpuFormat(
        PackedFormat(4, 1, scales="minimum"),
        lambda b: Unpacked(_nibbles(b[..., 8:], 16) | _flags(b[..., 4:8]) << 4, _words(b, 0, 4)),
    ),
    "Q8_0": GpuFormat(PackedFormat(8, scales="pair"), lambda b: Unpacked(b[..., 2:], None, (_half(b, 0),))),
    "Q2_K": GpuFormat(PackedFormat(2, width=16, group=16, scales="k_nibbles"), _q2_k),
    "Q3_K": GpuFormat(PackedFormat(2, 1, width=16, group=16, offset=4, scales="k_six"), _q3_k),
    "Q4_K": GpuFormat(PackedFormat(4, scales="k_pairs"), lambda b: Unpacked(_nibbles(b[..., 16:], 32), _k_pairs(b))),
    "Q5_K": GpuFormat(
        PackedFormat(4, 1, scales="k_pairs"),
        lambda b: Unpacked(_nibbles(b[..., 48:], 32) | _bits(b[..., 16:48]) << 4, _k_pairs(b)),
    ),
    "Q6_K": GpuFormat(PackedFormat(4, 2, width=16, group=16, offset=32, scales="k_bytes"), _q6_k),
}
"""GGUF's types as tiles have them, and what takes their blocks apart."""
