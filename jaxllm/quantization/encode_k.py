"""GGUF's k-quants: from floats to blocks of 256 weights.

The search for scales is llama.cpp's (ggml-quants.c, `quantize_row_*_ref`, https://github.com/ggml-org/ggml), vectorised
over groups: candidates are tried one after another on all groups at once. Codes are then those nearest to the weights
under the scales as they are stored.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, UInt8

Vector = Float32[Array, "m"]
Members = list[Vector]
"""Groups of neighbouring weights, taken apart: first the first weight of every group, then the second, …

So all sums over a group are written out, and a whole attempt at its scale becomes one loop over vectors of groups.
"""

TINY = 1e-15
"""Groups of weights all smaller than that are zeros."""


def _members(x: Float32[Array, "n 256"], size: int) -> Members:
    columns = x.reshape(-1, size).T
    return [columns[i] for i in range(size)]


def _total(terms: Iterable[Vector]) -> Vector:
    return functools.reduce(operator.add, terms)


def _fit_affine(
    x: Members, weights: Members, most: int, start: float, steps: int, *, absolute: bool = False
) -> tuple[Vector, Vector]:
    """Scale and minimum (as a positive number) of codes 0 … `most` with the least weighted error in each group.

    Candidates spread the codes over a range from the best minimum so far, `(start + step / 10) / most` wider, and take
    the scale and minimum that least squares give for the codes that follow.
    """
    low, high = jnp.minimum(functools.reduce(jnp.minimum, x), 0), functools.reduce(jnp.maximum, x)
    flat = high - low < TINY
    sum_w, sum_x = _total(weights), _total(w * v for w, v in zip(weights, x, strict=True))

    def codes(spread: Array, low: Vector) -> Members:
        inverse = spread / jnp.where(flat, 1, high - low)
        return [jnp.clip(jnp.round(inverse * (v - low)), 0, most) for v in x]

    def error(q: Members, scale: Vector, minimum: Vector) -> Vector:
        differences = (scale * c + minimum - v for c, v in zip(q, x, strict=True))
        terms = (jnp.abs(d) if absolute else d * d for d in differences)
        return _total(w * term for w, term in zip(weights, terms, strict=True))

    def attempt(step: jax.Array, best: tuple[Vector, ...]) -> tuple[Vector, ...]:
        q = codes(start + 0.1 * step + most, best[2])
        weighted = [w * c for w, c in zip(weights, q, strict=True)]
        sum_q, sum_q2 = _total(weighted), _total(w * c for w, c in zip(weighted, q, strict=True))
        sum_xq = _total(w * v for w, v in zip(weighted, x, strict=True))
        determinant = sum_w * sum_q2 - sum_q * sum_q
        safe = jnp.where(determinant > 0, determinant, 1)
        scale, minimum = (sum_w * sum_xq - sum_x * sum_q) / safe, (sum_q2 * sum_x - sum_q * sum_xq) / safe
        through_zero = sum_xq / jnp.where(sum_q2 > 0, sum_q2, 1)
        scale, minimum = jnp.where(minimum > 0, through_zero, scale), jnp.minimum(minimum, 0)
        found = (error(q, scale, minimum), scale, minimum)
        better = (determinant > 0) & (found[0] < best[0])
        return tuple(jnp.where(better, new, old) for new, old in zip(found, best, strict=True))

    scale = (high - low) / most
    first = (error(codes(jnp.asarray(most), low), scale, low), scale, low)
    _, scale, minimum = lax.fori_loop(0, steps + 1, attempt, first)
    return jnp.where(flat, 0, scale), -minimum


def _fit_symmetric(x: Members, most: int) -> Vector:
    """The scale of codes -`most` … `most` - 1 with the least error in each group, weighted by the squares of `x`."""
    peak, zero = _peak(x)

    def attempt(step: jax.Array, best: tuple[Vector, Vector]) -> tuple[Vector, Vector]:
        inverse = -(most + 0.1 * (step - 9)) / peak
        codes = [jnp.clip(jnp.round(inverse * v), -most, most - 1) for v in x]
        sum_xq = _total(v * v * v * c for v, c in zip(x, codes, strict=True))
        sum_q2 = _total(v * v * c * c for v, c in zip(x, codes, strict=True))
        scale = sum_xq / jnp.where(sum_q2 > 0, sum_q2, 1)
        better = scale * sum_xq > best[0]
        return jnp.where(better, scale * sum_xq, best[0]), jnp.where(better, scale, best[1])

    _, scale = lax.fori_loop(0, 19, attempt, (jnp.zeros_like(peak), jnp.zeros_like(peak)))
    return jnp.where(zero, 0, scale)


def _fit_one_by_one(x: Members, most: int) -> Vector:
    """As `_fit_symmetric`, for very few codes: each in turn becomes what is best under the scale of the others."""
    peak, zero = _peak(x)
    codes = [jnp.clip(jnp.round(-most / peak * v), -most, most - 1) for v in x]
    sum_xq = _total(v * v * v * c for v, c in zip(x, codes, strict=True))
    sum_q2 = _total(v * v * c * c for v, c in zip(x, codes, strict=True))

    def sweep(_: jax.Array, state: tuple[Members, Vector, Vector]) -> tuple[Members, Vector, Vector]:
        codes, sum_xq, sum_q2 = state
        chosen = []
        for v, old in zip(x, codes, strict=True):
            w = v * v
            others_xq, others_q2 = sum_xq - w * v * old, sum_q2 - w * old * old
            new = jnp.clip(jnp.round(v * others_q2 / jnp.where(others_xq > 0, others_xq, 1)), -most, most - 1)
            new_xq, new_q2 = others_xq + w * v * new, others_q2 + w * new * new
            better = (others_xq > 0) & (new_q2 > 0) & (new_xq * new_xq * sum_q2 > sum_xq * sum_xq * new_q2)
            chosen.append(jnp.where(better, new, old))
            sum_xq, sum_q2 = jnp.where(better, new_xq, sum_xq), jnp.where(better, new_q2, sum_q2)
        return chosen, sum_xq, sum_q2

    _, sum_xq, sum_q2 = lax.fori_loop(0, 5, sweep, (codes, sum_xq, sum_q2))
    return jnp.where(zero | (sum_q2 <= 0), 0, sum_xq / jnp.where(sum_q2 > 0, sum_q2, 1))


def _peak(x: Members) -> tuple[Vector, Bool[Array, "m"]]:
    """The weight of largest size in each group (1 for none), and whether there is none but zeros."""
    peak = functools.reduce(lambda a, b: jnp.where(jnp.abs(b) > jnp.abs(a), b, a), x)
    zero = jnp.abs(peak) < TINY
    return jnp.where(zero, 1, peak), zero


def _bytes(half: Float32[Array, "n"]) -> UInt8[Array, "n 2"]:
    return lax.bitcast_convert_type(half.astype(jnp.float16), jnp.uint8)


def _rounded(half: Float32[Array, "n"]) -> Float32[Array, "n 1"]:
    """What is left of a scale in float16."""
    return half.astype(jnp.float16).astype(jnp.float32)[:, None]


def _nearest(x: Float32[Array, "n 256"], scale: Array, shift: Array | None, low: int, high: int) -> Array:
    """Codes `[n, 256]` of groups that have these scales and shifts `[n, groups]`; 0 where a scale is."""
    x = x.reshape(*scale.shape, -1)
    x = x if shift is None else x + shift[..., None]
    codes = jnp.where(scale == 0, 0, 1)[..., None] * jnp.round(x / jnp.where(scale == 0, 1, scale)[..., None])
    return jnp.clip(codes, low, high).astype(jnp.int32).reshape(x.shape[0], 256)


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
    x: Array, size: int, weights: Members, most: int, scale_most: int, start: float, steps: int, absolute: bool = False
) -> tuple[Array, ...]:
    """Of every block: scale and shift of its groups as integers, those of the block, and the codes."""
    scales, minima = _fit_affine(_members(x, size), weights, most, start, steps, absolute=absolute)
    scales, minima = scales.reshape(x.shape[0], -1), minima.reshape(x.shape[0], -1)
    top_scale, top_minimum = scales.max(1), minima.max(1)
    sc, mn = _to_integers(scales, top_scale, scale_most), _to_integers(minima, top_minimum, scale_most)
    d, dmin = top_scale / scale_most, top_minimum / scale_most
    return sc, mn, d, dmin, _nearest(x, _rounded(d) * sc, _rounded(dmin) * mn, 0, most)


def _q2_k(x: Float32[Array, "n 256"]) -> UInt8[Array, "n 84"]:
    sc, mn, d, dmin, codes = _shared_scales(x, 16, _members(jnp.abs(x), 16), 3, 15, -0.5, 15, absolute=True)
    return jnp.concatenate([(sc | mn << 4).astype(jnp.uint8), _quarters(codes), _bytes(d), _bytes(dmin)], axis=1)


def _q3_k(x: Float32[Array, "n 256"]) -> UInt8[Array, "n 110"]:
    scales = _fit_one_by_one(_members(x, 16), 4).reshape(-1, 16)
    d, sc = _signed_scales(scales, 32)
    codes = _nearest(x, _rounded(d) * sc, None, -4, 3) + 4
    six = sc + 32
    low = (six & 15)[:, :8] | (six & 15)[:, 8:] << 4
    top = ((six >> 4).reshape(-1, 4, 4) << (2 * np.arange(4))[:, None]).sum(1)
    packed = jnp.concatenate([low, top], axis=1).astype(jnp.uint8)
    return jnp.concatenate([_high_bits(codes, 2), _quarters(codes), packed, _bytes(d)], axis=1)


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


def _with_average(x: Float32[Array, "n 256"]) -> Members:
    """How much the error of each weight counts: its size plus the group's root mean square."""
    members = _members(x, 32)
    average = jnp.sqrt(_total(v * v for v in members) / 32)
    return [average + jnp.abs(v) for v in members]


def _nibble_pairs(codes: Array) -> UInt8[Array, "n 128"]:
    pairs = (codes & 15).reshape(-1, 4, 2, 32)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128).astype(jnp.uint8)


def _q4_k(x: Float32[Array, "n 256"]) -> UInt8[Array, "n 144"]:
    sc, mn, d, dmin, codes = _shared_scales(x, 32, _with_average(x), 15, 63, -1.0, 20)
    return jnp.concatenate([_bytes(d), _bytes(dmin), _packed_k_scales(sc, mn), _nibble_pairs(codes)], axis=1)


def _q5_k(x: Float32[Array, "n 256"]) -> UInt8[Array, "n 176"]:
    sc, mn, d, dmin, codes = _shared_scales(x, 32, _with_average(x), 31, 63, -0.5, 15)
    parts = [_bytes(d), _bytes(dmin), _packed_k_scales(sc, mn), _high_bits(codes, 4), _nibble_pairs(codes)]
    return jnp.concatenate(parts, axis=1)


def _q6_k(x: Float32[Array, "n 256"]) -> UInt8[Array, "n 210"]:
    scales = _fit_symmetric(_members(x, 16), 32).reshape(-1, 16)
    d, sc = _signed_scales(scales, 128)
    codes = _nearest(x, _rounded(d) * sc, None, -32, 31) + 32
    halves = (codes & 15).reshape(-1, 2, 2, 64)
    low = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(-1, 128).astype(jnp.uint8)
    signed = lax.bitcast_convert_type(sc.astype(jnp.int8), jnp.uint8)
    return jnp.concatenate([low, _quarters(codes >> 4), signed, _bytes(d)], axis=1)


K_ENCODERS: dict[str, Callable[[Any], Array]] = {
    name: partial(jax.jit, inline=True)(encoder)
    for name, encoder in {"Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}.items()
}
"""What makes blocks of each type, one a row."""

_CHUNK = 2048
"""Blocks encoded at a time: always as many, so that there is one shape to compile."""


def encode_k(values: np.ndarray, dtype: str) -> np.ndarray:
    """Float32 `[n, 256]` -> blocks `[n, bytes]` of GGML type `dtype`."""
    encoder, parts = K_ENCODERS[dtype], []
    for start in range(0, len(values), _CHUNK):
        chunk = values[start : start + _CHUNK]
        count = len(chunk)
        if count < _CHUNK:
            chunk = np.pad(chunk, ((0, _CHUNK - count), (0, 0)))
        parts.append(np.asarray(encoder(chunk))[:count])
    return np.concatenate(parts)
