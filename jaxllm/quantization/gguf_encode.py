"""From floats to GGUF's blocks, of any type that weights are kept in.

As llama.cpp does it (`quantize_row_*_ref` in ggml-quants.c, https://github.com/ggml-org/ggml): a scale is found for
each group, those of a block are rounded to integers, and codes are the nearest under the scales as they are stored.
With `weights`, how much an error of each counts, as `quantize_row_*_impl` does it. For blocks of 32 the `gguf`
package takes a block's extremes for the ends of the codes' range; here scales are searched for as those of k-quants
are, which costs a little time and saves a few percent of the error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, UInt8

from jaxllm.quantization.gguf_decode import FORMATS
from jaxllm.quantization.scale_search import (
    TINY,
    WEIGHTED,
    Members,
    Search,
    Vector,
    fit_affine,
    fit_symmetric,
    half_bytes,
    members,
    nearest,
    peak_of,
    rounded,
    total,
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


SuperBlock = Float32[Array, "n 256"]
Sweep = tuple[Members, Vector, Vector]
"""Codes, and the weighted sums of weight times code and of code times code."""


def _fit_one_by_one(x: Members, most: int) -> Vector:
    """As `fit_symmetric`, for very few codes: each in turn becomes what is best under the scale of the others."""
    peak, zero = peak_of(x)
    codes = [jnp.clip(jnp.round(-most / peak * v), -most, most - 1) for v in x]
    sum_xq = total(v * v * v * c for v, c in zip(x, codes, strict=True))
    sum_q2 = total(v * v * c * c for v, c in zip(x, codes, strict=True))

    _, sum_xq, sum_q2 = lax.fori_loop(0, 5, _sweep(x, [v * v for v in x], -most, most - 1), (codes, sum_xq, sum_q2))
    return jnp.where(zero | (sum_q2 <= 0), 0, sum_xq / jnp.where(sum_q2 > 0, sum_q2, 1))


def _sweep(x: Members, weights: Members, low: int, high: int) -> Callable[[Array, Sweep], Sweep]:
    """One pass over the codes of every group: each becomes what is best under the scale that the others make."""

    def sweep(_: Array, state: Sweep) -> Sweep:
        codes, sum_xq, sum_q2 = state
        chosen = []
        for v, w, old in zip(x, weights, codes, strict=True):
            others_xq, others_q2 = sum_xq - w * v * old, sum_q2 - w * old * old
            new = jnp.clip(jnp.round(v * others_q2 / jnp.where(others_xq > 0, others_xq, 1)), low, high)
            new_xq, new_q2 = others_xq + w * v * new, others_q2 + w * new * new
            better = (others_xq > 0) & (new_q2 > 0) & (new_xq * new_xq * sum_q2 > sum_xq * sum_xq * new_q2)
            chosen.append(jnp.where(better, new, old))
            sum_xq, sum_q2 = jnp.where(better, new_xq, sum_xq), jnp.where(better, new_q2, sum_q2)
        return chosen, sum_xq, sum_q2

    return sweep


def _quarters(codes: Array) -> UInt8[Array, "n 64"]:
    """The two low bits of codes, four groups of 32 in 32 bytes, half a block at a time."""
    parts = (codes & 3).reshape(-1, 2, 4, 32) << (2 * np.arange(4))[:, None]
    return parts.sum(2).reshape(-1, 64).astype(jnp.uint8)


def _high_bits(codes: Array, bit: int) -> UInt8[Array, "n 32"]:
    """Bit `bit` of codes, that of the groups of 32 in turn from the lowest bit of a byte on."""
    return (((codes >> bit) & 1).reshape(-1, 8, 32) << np.arange(8)[:, None]).sum(1).astype(jnp.uint8)


def _to_integers(values: Array, top: Array, most: int) -> Array:
    """`values [n, groups]` as 0 … `most`, where `top [n]` is `most`."""
    inverse = jnp.where(top > 0, most / jnp.where(top > 0, top, 1), 0)
    return jnp.clip(jnp.round(values * inverse[:, None]), 0, most).astype(jnp.int32)


def _shared_scales(
    x: SuperBlock, weights: SuperBlock | None, size: int, most: int, scale_most: int, search: Search
) -> tuple[Array, ...]:
    """Of every block: scale and shift of its groups as integers, those of the block, and the codes."""
    if weights is not None:
        fitted = fit_affine(members(x, size), members(weights, size), most, WEIGHTED)
        counted = weights.reshape(x.shape[0], -1, size).sum(2)
        (d, sc), (dmin, mn) = (_fit_integers(v.reshape(x.shape[0], -1), counted, scale_most) for v in fitted)
    else:
        by_size = size == 16  # the least absolute error, and not the least square
        fitted = fit_affine(
            members(x, size), members(jnp.abs(x), 16) if by_size else with_average(x), most, search, absolute=by_size
        )
        scales, minima = (v.reshape(x.shape[0], -1) for v in fitted)
        sc, mn = _to_integers(scales, scales.max(1), scale_most), _to_integers(minima, minima.max(1), scale_most)
        d, dmin = scales.max(1) / scale_most, minima.max(1) / scale_most
    return sc, mn, d, dmin, nearest(x, rounded(d) * sc, rounded(dmin) * mn, 0, most)


def _fit_integers(values: Float32[Array, "n g"], weights: Float32[Array, "n g"], most: int) -> tuple[Array, Array]:
    """The scale `[n]` and integers 0 … `most` that come nearest to `values`, none of which is below 0.

    `make_qp_quants`: the best of nine scales, then each integer in turn what is best under the scale of the others.
    """
    top = values.max(1)
    zero = top < TINY
    safe = jnp.where(zero, 1, top)

    def codes(step: Array) -> Array:
        return jnp.clip(jnp.round(((most + 0.1 * step) / safe)[:, None] * values), 0, most)

    def error(step: Array) -> Array:
        return (weights * jnp.square(values - (safe / (most + 0.1 * step))[:, None] * codes(step))).sum(1)

    steps = jnp.array([0, -4, -3, -2, -1, 1, 2, 3, 4], jnp.float32)  # the first of equals counts
    best = jnp.argmin(jnp.stack([error(jnp.full(top.shape, step)) for step in steps]), axis=0)
    found = list(codes(steps[best]).T)
    x, w = list(values.T), list(weights.T)
    sum_xq = total(a * v * c for a, v, c in zip(w, x, found, strict=True))
    sum_q2 = total(a * c * c for a, c in zip(w, found, strict=True))
    found, sum_xq, sum_q2 = lax.fori_loop(0, 5, _sweep(x, w, 0, most), (found, sum_xq, sum_q2))
    scale = jnp.where(zero | (sum_q2 <= 0), 0, sum_xq / jnp.where(sum_q2 > 0, sum_q2, 1))
    return scale, jnp.stack(found, axis=1).astype(jnp.int32)


def q2_k(x: SuperBlock, weights: SuperBlock | None = None) -> UInt8[Array, "n 84"]:
    sc, mn, d, dmin, codes = _shared_scales(x, weights, 16, 3, 15, Search(-0.5, 15))
    return jnp.concatenate(
        [(sc | mn << 4).astype(jnp.uint8), _quarters(codes), half_bytes(d), half_bytes(dmin)], axis=1
    )


def q3_k(x: SuperBlock, weights: SuperBlock | None = None) -> UInt8[Array, "n 110"]:
    if weights is None:
        d, sc = _signed_scales(_fit_one_by_one(members(x, 16), 4).reshape(-1, 16), 32)
    else:
        scales = fit_symmetric(members(x, 16), members(weights, 16), 4).reshape(-1, 16)
        d = fit_symmetric(list(scales.T), list(weights.reshape(-1, 16, 16).sum(2).T), 32)
        sc = nearest(scales, rounded(d), None, -32, 31)
    codes = nearest(x, rounded(d) * sc, None, -4, 3) + 4
    six = sc + 32
    low = (six & 15)[:, :8] | (six & 15)[:, 8:] << 4
    top = ((six >> 4).reshape(-1, 4, 4) << (2 * np.arange(4))[:, None]).sum(1)
    packed = jnp.concatenate([low, top], axis=1).astype(jnp.uint8)
    return jnp.concatenate([_high_bits(codes, 2), _quarters(codes), packed, half_bytes(d)], axis=1)


def _signed_scales(scales: Float32[Array, "n 16"], most: int) -> tuple[Array, Array]:
    """A block's scale and those of its groups as -`most` … `most` - 1; the largest is -`most`, whatever its sign."""
    largest = jnp.take_along_axis(scales, jnp.argmax(jnp.abs(scales), axis=1)[:, None], axis=1)
    zero = jnp.abs(largest) < TINY
    inverse = jnp.where(zero, 0, -most / jnp.where(zero, 1, largest))
    d = jnp.where(zero, 0, largest / -most)[:, 0]
    return d, jnp.clip(jnp.round(inverse * scales), -most, most - 1).astype(jnp.int32)


def _packed_k_scales(sc: Array, mn: Array) -> UInt8[Array, "n 12"]:
    """See `gguf_decode.k_scales`."""
    low = [sc[:, :4] | (sc[:, 4:] >> 4) << 6, mn[:, :4] | (mn[:, 4:] >> 4) << 6, sc[:, 4:] & 15 | (mn[:, 4:] & 15) << 4]
    return jnp.concatenate(low, axis=1).astype(jnp.uint8)


def _nibble_pairs(codes: Array) -> UInt8[Array, "n 128"]:
    pairs = (codes & 15).reshape(-1, 4, 2, 32)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128).astype(jnp.uint8)


def q4_k(x: SuperBlock, weights: SuperBlock | None = None) -> UInt8[Array, "n 144"]:
    sc, mn, d, dmin, codes = _shared_scales(x, weights, 32, 15, 63, Search(-1.0, 20))
    return jnp.concatenate([half_bytes(d), half_bytes(dmin), _packed_k_scales(sc, mn), _nibble_pairs(codes)], axis=1)


def q5_k(x: SuperBlock, weights: SuperBlock | None = None) -> UInt8[Array, "n 176"]:
    sc, mn, d, dmin, codes = _shared_scales(x, weights, 32, 31, 63, Search(-0.5, 15))
    parts = [half_bytes(d), half_bytes(dmin), _packed_k_scales(sc, mn), _high_bits(codes, 4), _nibble_pairs(codes)]
    return jnp.concatenate(parts, axis=1)


def q6_k(x: SuperBlock, weights: SuperBlock | None = None) -> UInt8[Array, "n 210"]:
    counted = x * x if weights is None else weights
    scales = fit_symmetric(members(x, 16), members(counted, 16), 32).reshape(-1, 16)
    d, sc = _signed_scales(scales, 128)
    codes = nearest(x, rounded(d) * sc, None, -32, 31) + 32
    halves = (codes & 15).reshape(-1, 2, 2, 64)
    low = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(-1, 128).astype(jnp.uint8)
    signed = lax.bitcast_convert_type(sc.astype(jnp.int8), jnp.uint8)
    return jnp.concatenate([low, _quarters(codes >> 4), signed, half_bytes(d)], axis=1)


ENCODERS: dict[str, Any] = {
    name: jax.jit(encoder)
    for name, encoder in {
        "Q4_0": q4_0,
        "Q4_1": q4_1,
        "Q5_0": q5_0,
        "Q5_1": q5_1,
        "Q8_0": q8_0,
        "Q2_K": q2_k,
        "Q3_K": q3_k,
        "Q4_K": q4_k,
        "Q5_K": q5_k,
        "Q6_K": q6_k,
    }.items()
}
"""What makes blocks `[n, bytes]` of each type of their weights `[n, elements]`, and of how much each counts."""

IMPORTANCE: dict[str, tuple[str, int] | None] = {
    "Q6_K": None,
    "Q2_K": ("block", 1),
    **dict.fromkeys(("Q3_K", "Q4_K", "Q5_K"), ("block", 2)),
    **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1"), ("row", 1)),
}
"""What an importance is multiplied by in each type, as llama.cpp has it: the root of the weight's square plus so many
times the mean square of its block or row; None is nothing. Q8_0 has no choice that it could bear on."""

LEAST = 1e-6
"""Of the largest importance: inputs that the text never used still count a little."""

_CHUNK = 1 << 19
"""Weights encoded at a time: always as many, so that there is one shape to compile."""


def encode(values: np.ndarray, dtype: str, importance: np.ndarray | None = None) -> np.ndarray:
    """Finite floats `[*stack, o, i]` -> uint8 `[*stack, o, i / elements, bytes]`, blocks of GGML type `dtype`.

    `importance` `[*stack, i]` is how much an error of each input counts, as an importance matrix has it.
    """
    elements, nbytes, *_ = FORMATS[dtype]
    *lead, inputs = values.shape
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, elements)
    counts = _block_weights(values, dtype, importance) if importance is not None and dtype in IMPORTANCE else None
    out, step = np.empty((len(blocks), nbytes), np.uint8), _CHUNK // elements
    for start in range(0, len(blocks), step):
        part = slice(start, start + step)
        chunk = (blocks[part],) if counts is None else (blocks[part], counts(part))
        found = ENCODERS[dtype](*(np.pad(a, ((0, step - len(a)), (0, 0))) if len(a) < step else a for a in chunk))
        out[part] = np.asarray(found)[: len(chunk[0])]
    return out.reshape(*lead, inputs // elements, nbytes)


def _block_weights(values: np.ndarray, dtype: str, importance: np.ndarray) -> Callable[[slice], np.ndarray]:
    """How much each weight of some blocks counts."""
    elements, rule = FORMATS[dtype].elements, IMPORTANCE[dtype]
    *lead, inputs = values.shape
    a_row, rows = inputs // elements, lead[-1]
    blocks = values.reshape(-1, elements)
    top = importance.max(axis=-1, keepdims=True)
    relative = np.where(top > 0, np.maximum(importance / np.where(top > 0, top, 1), LEAST), 1)
    kinds = relative.astype(np.float32).reshape(-1, elements)  # of each stacked matrix in turn
    squares = np.einsum("...i,...i->...", values, values).reshape(-1) / inputs

    def weights(part: slice) -> np.ndarray:
        numbers = np.arange(len(blocks))[part]
        row = numbers // a_row
        found = kinds[row // rows * a_row + numbers % a_row]
        if rule is None:
            return found
        x2 = np.square(blocks[part])
        whole = squares[row] if rule[0] == "row" else x2.mean(-1)
        return found * np.sqrt(x2 + rule[1] * whole[:, None])

    return weights
