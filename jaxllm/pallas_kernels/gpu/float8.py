"""Floats of e4m3 in kernels, by hand: GPUs before compute capability 8.9 convert no such."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def from_e4m3(bits: Int[Array, "..."]) -> Float[Array, "..."]:
    """float32 of e4m3's bits, by way of a float16 whose exponent is 8 too small; of "not a number" it is 480."""
    half = ((bits & 128) << 8 | (bits & 127) << 7).astype(jnp.uint16)
    return lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32) * 2.0**8


def round_to_even(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The nearest integer to a float32, of two the even one."""
    below = jnp.floor(x)
    rest, odd = x - below, below != 2 * jnp.floor(below / 2)
    return jnp.where((rest > 0.5) | ((rest == 0.5) & odd), below + 1, below)


def to_e4m3(x: Float[Array, "..."]) -> Int[Array, "..."]:
    """The bits of the nearest e4m3 of a float32 within its range."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + (magnitude >> 20 & 1)) >> 20) - ((127 - 7) << 3)
    subnormal = round_to_even(jnp.abs(x) * 2.0**9).astype(jnp.int32)
    return jnp.where(jnp.abs(x) < 2.0**-6, subnormal, normal) | (bits >> 24 & 128)
