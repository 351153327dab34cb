"""GGUF's k-quants: from floats to blocks of 256 weights.

As llama.cpp does it (`quantize_row_*_ref` in ggml-quants.c, https://github.com/ggml-org/ggml): a scale is found for
each group, those of a block are rounded to integers, and codes are the nearest under the scales as they are stored.
With `weights`, how much an error of each counts, as `quantize_row_*_impl` does it.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, UInt8

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
    """See `gguf_blocks._k_scales`."""
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
