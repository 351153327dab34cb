"""Random weights of every kind, for tests."""

from __future__ import annotations

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType

from jaxllm.quantization.gguf_decode import FORMATS
from jaxllm.quantization.schemes import SCHEMES
from jaxllm.quantization.stored import FP8, NVFP4, Codes, Stored
from jaxllm.quantization.weight import Weight


def random_blocks(dtype: str, *lead: int, seed: int = 0) -> np.ndarray:
    """Blocks `[*lead, bytes]` of a GGML type: scales of moderate size, every other byte anything."""
    rng = np.random.default_rng(seed)
    nbytes, scales = FORMATS[dtype].nbytes, FORMATS[dtype].halves
    blocks = rng.integers(0, 256, (*lead, nbytes), dtype=np.uint8)
    for start in scales:
        blocks[..., start : start + 2] = rng.normal(0, 0.1, (*lead, 1)).astype(np.float16).view(np.uint8)
    if dtype == "MXFP4":
        blocks[..., 0] = rng.integers(110, 130, lead)
    return blocks


def gguf_dequantize(blocks: np.ndarray, dtype: str) -> np.ndarray:
    """Blocks `[*lead, n, bytes]` as `gguf` expands them: `[*lead, i]`."""
    return gguf.quants.dequantize(blocks.reshape(*blocks.shape[:-2], -1), GGMLQuantizationType[dtype])


def stored(values: np.ndarray) -> Stored:
    return Stored(values, "F32", values.shape)


def nvfp4(*shape: int, seed: int = 0) -> Stored:
    """Random codes with every scale that is finite, and a factor a row."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, shape, np.uint8)
    bits = rng.integers(0, 254, (*shape[:-1], shape[-1] // 16), np.uint8)
    scale = (bits + (bits >= 127)).astype(np.uint8).view(FP8)
    factor = rng.uniform(0.001, 0.1, shape[:-1]).astype(np.float32)
    return Stored(codes, "NVFP4", shape, codes=Codes(NVFP4, scale, factor=factor), origin="w")


def random_weight(scheme: str, *shape: int, seed: int = 0) -> Weight:
    """A float32 weight kept as `scheme`."""
    values = np.random.default_rng(seed).normal(0, 0.05, shape).astype(np.float32)
    return jax.tree.map(jnp.asarray, SCHEMES[scheme](np.dtype(np.float32)).pack([stored(values)], None))
