"""Codes of quantized checkpoints as GGUF's blocks of 32 that hold the same numbers: what the C++ kernels take."""

from __future__ import annotations

import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.quantization.coded import UINT8, Codes, Coding

BLOCK = 32
HALVES = ("float16", "bfloat16", "float8_e8m0fnu")
"""Scales that a block's float16 holds: bfloat16 is narrower, but for scales under 2^-17, which round to 2^-24."""


def block_type(coding: Coding) -> str | None:
    """The GGML type whose blocks hold such numbers exactly; None if there is none.

    Q5_0 counts from -16 to 15: what is left of four bits once a zero point is taken off, or twice a four-bit float.
    """
    if coding.codes != UINT8 or coding.block[1] % BLOCK or coding.scale.name not in HALVES:
        return None
    if coding.levels:
        doubled = 2 * np.asarray(coding.levels)
        return "Q5_0" if (np.rint(doubled) == doubled).all() and np.abs(doubled).max() < 16 else None
    if coding.bits <= 4:
        return "Q4_0" if coding.symmetric else "Q5_0"
    return "Q8_0" if coding.symmetric else None


def coded_blocks(data: np.ndarray, codes: Codes, type: str, origin: str) -> np.ndarray:
    """Blocks `[*stack, o, i / 32, bytes]` of the codes `data` `[*stack, o, i]`.

    Raises:
        CheckpointError: a scale is more than float16 holds.
    """
    coding, block = codes.coding, (1, BLOCK)
    groups = data.reshape(*data.shape[:-1], -1, BLOCK)
    scale = codes.scales(data.shape, block).astype(np.float32)
    if coding.levels:
        numbers = np.rint(2 * np.asarray(coding.levels)).astype(np.int16)[groups]
        scale = scale * np.float32(0.5)
    else:
        numbers = groups.astype(np.int16) - codes.zeros(data.shape, block)[..., None]
    with np.errstate(over="ignore"):
        halves = scale.astype(np.float16)
    if not np.isfinite(halves).all():
        raise CheckpointError(f"{origin}: its largest scale, {np.max(scale):g}, is more than float16 holds")
    return np.concatenate([halves[..., None].view(np.uint8), *_PACKERS[type](numbers)], axis=-1)


def _q4_0(numbers: np.ndarray) -> list[np.ndarray]:
    return [_nibbles((numbers + 8).astype(np.uint8))]


def _q5_0(numbers: np.ndarray) -> list[np.ndarray]:
    raised = (numbers + 16).astype(np.uint8)
    return [np.packbits(raised >> 4, axis=-1, bitorder="little"), _nibbles(raised & 15)]


def _q8_0(numbers: np.ndarray) -> list[np.ndarray]:
    return [numbers.astype(np.int8).view(np.uint8)]


def _nibbles(codes: np.ndarray) -> np.ndarray:
    low, high = np.split(codes, 2, axis=-1)
    return low | high << 4


_PACKERS = {"Q4_0": _q4_0, "Q5_0": _q5_0, "Q8_0": _q8_0}
