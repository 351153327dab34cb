"""From floats to GGUF's blocks, of any type that weights are kept in.

As llama.cpp does it (`quantize_row_*_ref`, `make_qkx2_quants`, `make_qx_quants` in ggml-quants.c,
https://github.com/ggml-org/ggml): candidates for the scale of each group are tried one after another, for all groups
at once; the scales of a block are rounded to integers, and codes are the nearest under the scales as they are stored.
With `weights`, how much an error of each counts, as `quantize_row_*_impl` does it. Scales of blocks of 32 are searched
for as those of k-quants are, which takes longer than the `gguf` package and saves a few percent of the error.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, UInt8

from jaxllm.quantization.gguf_decode import FORMATS
from jaxllm.quantization.stored import packed

Vector = Float32[Array, "m"]
Members = list[Vector]
"""Groups of neighbouring weights, taken apart: first the first weight of every group, then the second, …

So all sums over a group are written out, and a whole attempt at its scale becomes one loop over vectors of groups.
"""

TINY = 1e-15


def members(x: Float32[Array, "n _"], size: int) -> Members:
    columns = x.reshape(-1, size).T
    return [columns[i] for i in range(size)]


def total(terms: Iterable[Vector]) -> Vector:
    return functools.reduce(operator.add, terms)


class Search(NamedTuple):
    """Candidates for a range of codes: `start`, `start + width`, …, up to `steps` widths, more than fit exactly."""

    start: float
    steps: int
    width: float = 0.1


WEIGHTED = Search(-0.9, 36, 0.05)
"""Where an importance matrix says what counts."""


def fit_affine(
    x: Members, weights: Members, most: int, search: Search, *, absolute: bool = False
) -> tuple[Vector, Vector]:
    """Scale and minimum (as a positive number) of codes 0 … `most` with the least weighted error in each group.

    Candidates spread the codes over a range from the best minimum so far, wider by the `search`'s numbers over `most`,
    and take the scale and minimum that least squares give for the codes that follow.
    """
    low, high = jnp.minimum(functools.reduce(jnp.minimum, x), 0), functools.reduce(jnp.maximum, x)
    flat = high - low < TINY
    sum_w, sum_x = total(weights), total(w * v for w, v in zip(weights, x, strict=True))

    def codes(spread: Array, low: Vector) -> Members:
        inverse = spread / jnp.where(flat, 1, high - low)
        return [jnp.clip(jnp.round(inverse * (v - low)), 0, most) for v in x]

    def error(q: Members, scale: Vector, minimum: Vector) -> Vector:
        differences = (scale * c + minimum - v for c, v in zip(q, x, strict=True))
        terms = (jnp.abs(d) if absolute else d * d for d in differences)
        return total(w * term for w, term in zip(weights, terms, strict=True))

    def attempt(step: jax.Array, best: tuple[Vector, ...]) -> tuple[Vector, ...]:
        q = codes(search.start + search.width * step + most, best[2])
        weighted = [w * c for w, c in zip(weights, q, strict=True)]
        sum_q, sum_q2 = total(weighted), total(w * c for w, c in zip(weighted, q, strict=True))
        sum_xq = total(w * v for w, v in zip(weighted, x, strict=True))
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
    _, scale, minimum = lax.fori_loop(0, search.steps + 1, attempt, first)
    return jnp.where(flat, 0, scale), -minimum


def fit_symmetric(x: Members, weights: Members, most: int) -> Vector:
    """The scale of codes -`most` … `most` - 1 with the least weighted error in each group."""
    peak, zero = peak_of(x)

    def attempt(step: jax.Array, best: tuple[Vector, Vector]) -> tuple[Vector, Vector]:
        inverse = -(most + 0.1 * (step - 9)) / peak
        codes = [jnp.clip(jnp.round(inverse * v), -most, most - 1) for v in x]
        sum_xq = total(w * v * c for w, v, c in zip(weights, x, codes, strict=True))
        sum_q2 = total(w * c * c for w, c in zip(weights, codes, strict=True))
        scale = sum_xq / jnp.where(sum_q2 > 0, sum_q2, 1)
        better = scale * sum_xq > best[0]
        return jnp.where(better, scale * sum_xq, best[0]), jnp.where(better, scale, best[1])

    _, scale = lax.fori_loop(0, 19, attempt, (jnp.zeros_like(peak), jnp.zeros_like(peak)))
    return jnp.where(zero, 0, scale)


def peak_of(x: Members) -> tuple[Vector, Bool[Array, "m"]]:
    """The weight of largest size in each group (1 for none), and whether there is none but zeros."""
    peak = functools.reduce(lambda a, b: jnp.where(jnp.abs(b) > jnp.abs(a), b, a), x)
    zero = jnp.abs(peak) < TINY
    return jnp.where(zero, 1, peak), zero


def half_bytes(half: Float32[Array, "n"]) -> UInt8[Array, "n 2"]:
    return lax.bitcast_convert_type(half.astype(jnp.float16), jnp.uint8)


def rounded(half: Float32[Array, "n"]) -> Float32[Array, "n 1"]:
    return half.astype(jnp.float16).astype(jnp.float32)[:, None]


def nearest(x: Float32[Array, "n _"], scale: Array, shift: Array | None, low: int, high: int) -> Array:
    """Codes `[n, i]` of groups that have these scales and shifts `[n, groups]`; 0 where a scale is."""
    x = x.reshape(*scale.shape, -1)
    x = x if shift is None else x + shift[..., None]
    codes = jnp.where(scale == 0, 0, 1)[..., None] * jnp.round(x / jnp.where(scale == 0, 1, scale)[..., None])
    return jnp.clip(codes, low, high).astype(jnp.int32).reshape(scale.shape[0], -1)


def with_average(x: Float32[Array, "n _"]) -> Members:
    """How much the error of each weight counts: its size plus the group's root mean square."""
    group = members(x, 32)
    average = jnp.sqrt(total(v * v for v in group) / 32)
    return [average + jnp.abs(v) for v in group]


Block = Float32[Array, "n 32"]


def _packed(codes: Array, run: int, bits: int) -> UInt8[Array, "n _"]:
    """The lowest `bits` of codes `[n, i]` as `gguf_decode` takes them apart: each `8 / bits` runs in `run` bytes."""
    runs = (codes & ((1 << bits) - 1)).reshape(len(codes), -1, 8 // bits, run)
    return packed(runs, bits).reshape(len(codes), -1).astype(jnp.uint8)


def _joined(*parts: UInt8[Array, "n _"]) -> UInt8[Array, "n bytes"]:
    return jnp.concatenate(parts, axis=1)


def _symmetric(x: Block, weights: Block | None, most: int) -> tuple[Vector, Array]:
    scale = fit_symmetric(members(x, 32), with_average(x) if weights is None else members(weights, 32), most)
    return scale, nearest(x, rounded(scale), None, -most, most - 1)


def _affine(x: Block, weights: Block | None, most: int, search: Search) -> tuple[Vector, Vector, Array]:
    counted = with_average(x) if weights is None else members(weights, 32)
    scale, minimum = fit_affine(members(x, 32), counted, most, search if weights is None else WEIGHTED)
    return scale, -minimum, nearest(x, rounded(scale), rounded(minimum), 0, most)


def q4_0(x: Block, weights: Block | None = None) -> UInt8[Array, "n 18"]:
    scale, codes = _symmetric(x, weights, 8)
    return _joined(half_bytes(scale), _packed(codes + 8, 16, 4))


def q4_1(x: Block, weights: Block | None = None) -> UInt8[Array, "n 20"]:
    scale, minimum, codes = _affine(x, weights, 15, Search(-1.0, 20))
    return _joined(half_bytes(scale), half_bytes(minimum), _packed(codes, 16, 4))


def q5_0(x: Block, weights: Block | None = None) -> UInt8[Array, "n 22"]:
    scale, codes = _symmetric(x, weights, 16)
    return _joined(half_bytes(scale), _packed((codes + 16) >> 4, 1, 1), _packed(codes + 16, 16, 4))


def q5_1(x: Block, weights: Block | None = None) -> UInt8[Array, "n 24"]:
    scale, minimum, codes = _affine(x, weights, 31, Search(-0.5, 15))
    return _joined(half_bytes(scale), half_bytes(minimum), _packed(codes >> 4, 1, 1), _packed(codes, 16, 4))


def q8_0(x: Block) -> UInt8[Array, "n 34"]:
    """As `gguf` does: the largest weight is the largest code."""
    scale = jnp.abs(x).max(1) / 127
    codes = jnp.round(x / jnp.where(scale > 0, scale, 1)[:, None])
    return _joined(half_bytes(scale), lax.bitcast_convert_type(codes.astype(jnp.int8), jnp.uint8))


SuperBlock = Float32[Array, "n 256"]


def _swept(x: Members, weights: Members, codes: Members, low: int, high: int) -> tuple[Members, Vector]:
    """The codes of every group, each in turn made what is best under the scale of the others, and the scales."""

    def sweep(_: Array, state: tuple[Members, Vector, Vector]) -> tuple[Members, Vector, Vector]:
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

    sum_xq = total(w * v * c for w, v, c in zip(weights, x, codes, strict=True))
    sum_q2 = total(w * c * c for w, c in zip(weights, codes, strict=True))
    codes, sum_xq, sum_q2 = lax.fori_loop(0, 5, sweep, (codes, sum_xq, sum_q2))
    return codes, jnp.where(sum_q2 <= 0, 0, sum_xq / jnp.where(sum_q2 > 0, sum_q2, 1))


def _fit_one_by_one(x: Members, most: int) -> Vector:
    peak, zero = peak_of(x)
    codes = [jnp.clip(jnp.round(-most / peak * v), -most, most - 1) for v in x]
    _, scale = _swept(x, [v * v for v in x], codes, -most, most - 1)
    return jnp.where(zero, 0, scale)


def _to_integers(values: Array, top: Array, most: int) -> Array:
    inverse = jnp.where(top > 0, most / jnp.where(top > 0, top, 1), 0)
    return jnp.clip(jnp.round(values * inverse[:, None]), 0, most).astype(jnp.int32)


def _shared_scales(
    x: SuperBlock, weights: SuperBlock | None, size: int, most: int, scale_most: int, search: Search
) -> tuple[Array, ...]:
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
    found, scale = _swept(list(values.T), list(weights.T), list(codes(steps[best]).T), 0, most)
    return jnp.where(zero, 0, scale), jnp.stack(found, axis=1).astype(jnp.int32)


def q2_k(x: SuperBlock, weights: SuperBlock | None = None) -> UInt8[Array, "n 84"]:
    sc, mn, d, dmin, codes = _shared_scales(x, weights, 16, 3, 15, Search(-0.5, 15))
    return _joined((sc | mn << 4).astype(jnp.uint8), _packed(codes, 32, 2), half_bytes(d), half_bytes(dmin))


def q3_k(x: SuperBlock, weights: SuperBlock | None = None) -> UInt8[Array, "n 110"]:
    if weights is None:
        d, sc = _signed_scales(_fit_one_by_one(members(x, 16), 4).reshape(-1, 16), 32)
    else:
        scales = fit_symmetric(members(x, 16), members(weights, 16), 4).reshape(-1, 16)
        d = fit_symmetric(list(scales.T), list(weights.reshape(-1, 16, 16).sum(2).T), 32)
        sc = nearest(scales, rounded(d), None, -32, 31)
    codes = nearest(x, rounded(d) * sc, None, -4, 3) + 4
    packed_scales = _packed(sc + 32, 8, 4), _packed((sc + 32) >> 4, 4, 2)
    return _joined(_packed(codes >> 2, 32, 1), _packed(codes, 32, 2), *packed_scales, half_bytes(d))


def _signed_scales(scales: Float32[Array, "n 16"], most: int) -> tuple[Array, Array]:
    """A block's scale and those of its groups as -`most` … `most` - 1; the largest is -`most`, whatever its sign."""
    largest = jnp.take_along_axis(scales, jnp.argmax(jnp.abs(scales), axis=1)[:, None], axis=1)
    zero = jnp.abs(largest) < TINY
    inverse = jnp.where(zero, 0, -most / jnp.where(zero, 1, largest))
    d = jnp.where(zero, 0, largest / -most)[:, 0]
    return d, jnp.clip(jnp.round(inverse * scales), -most, most - 1).astype(jnp.int32)


def _packed_k_scales(sc: Array, mn: Array) -> UInt8[Array, "n 12"]:
    low = [sc[:, :4] | (sc[:, 4:] >> 4) << 6, mn[:, :4] | (mn[:, 4:] >> 4) << 6, sc[:, 4:] & 15 | (mn[:, 4:] & 15) << 4]
    return jnp.concatenate(low, axis=1).astype(jnp.uint8)


def q4_k(x: SuperBlock, weights: SuperBlock | None = None) -> UInt8[Array, "n 144"]:
    sc, mn, d, dmin, codes = _shared_scales(x, weights, 32, 15, 63, Search(-1.0, 20))
    return _joined(half_bytes(d), half_bytes(dmin), _packed_k_scales(sc, mn), _packed(codes, 32, 4))


def q5_k(x: SuperBlock, weights: SuperBlock | None = None) -> UInt8[Array, "n 176"]:
    sc, mn, d, dmin, codes = _shared_scales(x, weights, 32, 31, 63, Search(-0.5, 15))
    packed_codes = _packed(codes >> 4, 32, 1), _packed(codes, 32, 4)
    return _joined(half_bytes(d), half_bytes(dmin), _packed_k_scales(sc, mn), *packed_codes)


def q6_k(x: SuperBlock, weights: SuperBlock | None = None) -> UInt8[Array, "n 210"]:
    counted = x * x if weights is None else weights
    scales = fit_symmetric(members(x, 16), members(counted, 16), 32).reshape(-1, 16)
    d, sc = _signed_scales(scales, 128)
    codes = nearest(x, rounded(d) * sc, None, -32, 31) + 32
    signed = lax.bitcast_convert_type(sc.astype(jnp.int8), jnp.uint8)
    return _joined(_packed(codes, 64, 4), _packed(codes >> 4, 32, 2), signed, half_bytes(d))


ENCODERS: dict[str, Any] = {
    encoder.__name__.upper(): jax.jit(encoder)
    for encoder in (q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k)
}
"""From a type's weights `[n, elements]`, and how much each counts, to its blocks `[n, bytes]`."""

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
"""Weights encoded at a time: a constant, so that one shape is compiled."""


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
