"""Random weights in every format, with what they stand for, and activations as the kernels round them."""

from __future__ import annotations

from typing import NamedTuple

import gguf
import ml_dtypes
import numpy as np
import pytest

from jaxllm import cpu_kernels

QUANTIZED = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", "mxfp4", "iq4_nl", "iq4_xs")
CODED = ("u4", "i8", "e4m3", "nvfp4")
FORMATS = (*QUANTIZED, *CODED, "bf16", "f32")
ISAS = tuple(cpu_kernels.runnable_isas()) if cpu_kernels.available() else ()

needs_kernels = pytest.mark.skipif(not cpu_kernels.available(), reason=f"no kernels: {cpu_kernels.reason()}")


class Weights(NamedTuple):
    blocks: np.ndarray
    """As a checkpoint has them."""
    values: np.ndarray
    """float64 [o, i]"""
    tiles: cpu_kernels.Tiles


def random_weights(format: str, rows: int, inputs: int, seed: int = 0) -> Weights:
    rng = np.random.default_rng(seed)
    if format in ("i8", "e4m3"):
        return _random_codes(format, rows, inputs, rng)
    if format == "nvfp4":
        return _random_nvfp4(rows, inputs, rng)
    if format == "u4":
        blocks, values = _random_groups(rows, inputs, rng)
    elif format in QUANTIZED:
        blocks, values = _random_blocks(format, rows, inputs, rng)
    else:
        blocks = rng.normal(size=(rows, inputs)).astype({"bf16": ml_dtypes.bfloat16, "f32": np.float32}[format])
        values = blocks
    return Weights(
        blocks, values.astype(np.float64), cpu_kernels.Tiles(cpu_kernels.repack(format, blocks), format, rows)
    )


def _random_blocks(format: str, rows: int, inputs: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Any bytes are codes; only the halves must be sensible numbers. gguf's own decoder says what they mean."""
    kind = gguf.GGMLQuantizationType[format.upper()]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows, inputs // elements, size), dtype=np.uint8)
    halves = rng.uniform(-0.02, 0.02, (rows, inputs // elements, 2)).astype(np.float16).view(np.uint8)
    if format == "mxfp4":
        blocks[..., 0] = rng.integers(112, 123, blocks.shape[:-1])  # 2^-16 to 2^-6
    elif format == "q6_k":
        blocks[..., 208:] = halves[..., :2]
    else:
        blocks[..., :4] = halves if format in ("q4_1", "q5_1", "q4_k", "q5_k") else blocks[..., :4]
        blocks[..., :2] = halves[..., :2]
    return blocks, gguf.quants.dequantize(blocks.reshape(rows, -1), kind)


def _random_groups(rows: int, inputs: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Codes of four bits about a zero of their own, which may be 16 (GPTQ counts from 1)."""
    codes = rng.integers(0, 16, (rows, inputs // 32, 32), dtype=np.uint8)
    scale = rng.uniform(-0.02, 0.02, (rows, inputs // 32, 1)).astype(np.float16)
    zero = rng.integers(0, 17, (rows, inputs // 32, 1), dtype=np.uint8)
    values = (codes.astype(np.float64) - zero) * scale
    blocks = np.concatenate([scale.view(np.uint8), zero, codes[..., :16] | codes[..., 16:] << 4], axis=-1)
    return blocks, values.reshape(rows, inputs)


def _random_codes(format: str, rows: int, inputs: int, rng: np.random.Generator) -> Weights:
    """Every code of eight bits, but for NaN; floats have a scale for each of several runs of a row's inputs."""
    runs = 1 if format == "i8" else int(rng.choice([n for n in range(1, inputs // 32 + 1) if inputs // 32 % n == 0]))
    codes = rng.integers(0, 256, (rows, inputs), dtype=np.uint8)
    if format == "e4m3":
        codes[codes & 0x7F == 0x7F] = 0
    numbers = codes.view({"i8": np.int8, "e4m3": ml_dtypes.float8_e4m3fn}[format]).astype(np.float64)
    scales = rng.uniform(-0.01, 0.01, (rows, runs)).astype(np.float32)
    values = numbers * np.repeat(scales.astype(np.float64), inputs // runs, axis=1)
    tiles = cpu_kernels.repack(format, codes.reshape(rows, -1, 32))
    return Weights(codes, values, cpu_kernels.Tiles(tiles, format, rows, cpu_kernels.lanes(scales)))


def _random_nvfp4(rows: int, inputs: int, rng: np.random.Generator) -> Weights:
    """Floats of four bits with a scale of e4m3 for each 16, and a factor a row."""
    codes, bits = (
        rng.integers(0, 256 // part, (rows, inputs // 16, size), np.uint8) for part, size in ((16, 16), (1, 1))
    )
    bits[bits & 0x7F == 0x7F] = 0
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes & 8, -1, 1)
    factor = rng.uniform(-0.001, 0.001, (rows, 1)).astype(np.float32)
    values = (levels * bits.view(ml_dtypes.float8_e4m3fn).astype(np.float64)).reshape(rows, inputs) * factor
    pairs = codes.reshape(rows, -1, 2, 16)
    blocks = np.concatenate([bits.reshape(rows, -1, 2), pairs[:, :, 0] | pairs[:, :, 1] << 4], axis=-1)
    tiles = cpu_kernels.repack("nvfp4", blocks)
    return Weights(blocks, values, cpu_kernels.Tiles(tiles, "nvfp4", rows, cpu_kernels.lanes(factor)))


def needs_bf16(isa: str) -> None:
    if not cpu_kernels.rounds_to_bf16(isa):
        pytest.skip(f"{isa} does not multiply bfloat16")


def rounded(x: np.ndarray, format: str, isa: str) -> np.ndarray:
    """What a product with weights of `format` takes `x` for, in float64."""
    if format in ("f32", "e4m3") or (format == "bf16" and not cpu_kernels.rounds_to_bf16(isa)):
        return x.astype(np.float64)
    if format == "bf16":
        return x.astype(ml_dtypes.bfloat16).astype(np.float64)
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], x.shape[-1] // 32, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.nan_to_num(np.rint(blocks * (np.float32(127) / largest)))
    return (codes * (largest / np.float32(127)).astype(np.float64)).reshape(x.shape)


def assert_close(y: np.ndarray, x: np.ndarray, w: np.ndarray, expected: np.ndarray | None = None) -> None:
    """`y` is `x @ w.T` up to float32 sums of that many products."""
    expected = x @ w.T if expected is None else expected
    bound = 2e-6 * (np.abs(x) @ np.abs(w).T) + 1e-6
    assert np.all(np.abs(y - expected) <= bound), np.max(np.abs(y - expected) / bound)
