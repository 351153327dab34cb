"""The search for a group's scale: candidates are tried one after another.

As llama.cpp's (`make_qkx2_quants`, `make_qx_quants` in ggml-quants.c, https://github.com/ggml-org/ggml), for all groups
at once. Codes are then those nearest to the weights under the scales as they are stored.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, UInt8

Vector = Float32[Array, "m"]
Members = list[Vector]
"""Groups of neighbouring weights, taken apart: first the first weight of every group, then the second, …

So all sums over a group are written out, and a whole attempt at its scale becomes one loop over vectors of groups.
"""

TINY = 1e-15
"""Groups of weights all smaller than that are zeros."""


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
    """What is left of a scale in float16."""
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
