"""GGUF's blocks of 32: from floats to Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0.

The `gguf` package takes a block's extremes for the ends of the codes' range. Here scales are searched for as those of
k-quants are, which costs a little time and saves a few percent of the error.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, UInt8

from jaxllm.quantization.scale_search import (
    WEIGHTED,
    Search,
    Vector,
    fit_affine,
    fit_symmetric,
    half_bytes,
    members,
    nearest,
    rounded,
    with_average,
)

Block = Float32[Array, "n 32"]


def _nibbles(codes: Array) -> UInt8[Array, "n 16"]:
    return (codes[:, :16] & 15 | (codes[:, 16:] & 15) << 4).astype(jnp.uint8)


def _high(codes: Array) -> UInt8[Array, "n 4"]:
    """Bit 4 of every code, the first in the lowest bit."""
    bits = (codes >> 4 & 1).reshape(-1, 4, 8) << np.arange(8)
    return bits.sum(2).astype(jnp.uint8)


def _symmetric(x: Block, weights: Block | None, most: int) -> tuple[Vector, Array]:
    scale = fit_symmetric(members(x, 32), with_average(x) if weights is None else members(weights, 32), most)
    return scale, nearest(x, rounded(scale), None, -most, most - 1)


def _affine(x: Block, weights: Block | None, most: int, search: Search) -> tuple[Vector, Vector, Array]:
    counted = with_average(x) if weights is None else members(weights, 32)
    scale, minimum = fit_affine(members(x, 32), counted, most, search if weights is None else WEIGHTED)
    return scale, -minimum, nearest(x, rounded(scale), rounded(minimum), 0, most)


def q4_0(x: Block, weights: Block | None = None) -> UInt8[Array, "n 18"]:
    scale, codes = _symmetric(x, weights, 8)
    return jnp.concatenate([half_bytes(scale), _nibbles(codes + 8)], axis=1)


def q4_1(x: Block, weights: Block | None = None) -> UInt8[Array, "n 20"]:
    scale, minimum, codes = _affine(x, weights, 15, Search(-1.0, 20))
    return jnp.concatenate([half_bytes(scale), half_bytes(minimum), _nibbles(codes)], axis=1)


def q5_0(x: Block, weights: Block | None = None) -> UInt8[Array, "n 22"]:
    scale, codes = _symmetric(x, weights, 16)
    return jnp.concatenate([half_bytes(scale), _high(codes + 16), _nibbles(codes + 16)], axis=1)


def q5_1(x: Block, weights: Block | None = None) -> UInt8[Array, "n 24"]:
    scale, minimum, codes = _affine(x, weights, 31, Search(-0.5, 15))
    return jnp.concatenate([half_bytes(scale), half_bytes(minimum), _high(codes), _nibbles(codes)], axis=1)


def q8_0(x: Block) -> UInt8[Array, "n 34"]:
    """As `gguf` does: the largest weight is the largest code."""
    scale = jnp.abs(x).max(1) / 127
    codes = jnp.round(x / jnp.where(scale > 0, scale, 1)[:, None])
    return jnp.concatenate([half_bytes(scale), lax.bitcast_convert_type(codes.astype(jnp.int8), jnp.uint8)], axis=1)
