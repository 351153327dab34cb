"""Floats of e4m3 in kernels, by hand: GPUs before compute capability 8.9 convert no such."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from jaxllm.compat import triton_elementwise_asm


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


def numbers_of_e4m3(bits: UInt8[Array, "..."], dtype: np.dtype, *, plain: bool) -> Float[Array, "..."]:
    """16-bit floats of e4m3's bits in bytes, four at a time; `plain` is what an interpreter can do.

    A byte's sign and the seven bits after it are put where such a float has its own, whose exponent is then too small
    by the difference of the two biases. Of "not a number" it is 480.
    """
    if plain:
        return from_e4m3(bits.astype(jnp.int32)).astype(dtype)
    return triton_elementwise_asm(e4m3_program(dtype), [bits], constraints="=r,=r,r", pack=4, dtype=dtype)


def e4m3_program(dtype: np.dtype) -> str:
    """PTX that makes two pairs of floats ($0, $1) of four bytes ($2)."""
    exponent_bits, kind = (8, "bf16x2") if dtype == jnp.bfloat16 else (5, "f16x2")
    shift, bias = exponent_bits - 4, 2 ** (exponent_bits - 1) - 1
    factor = int(np.asarray(2.0 ** (bias - 7), dtype).view(np.uint16))
    mask = (0x7F00 >> shift) * 0x10001
    return (
        "{ .reg .b32 a, b, c, d, times, zero;"
        " prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424;"  # bytes 0 and 1, 2 and 3, each above an empty one
        f" shr.u32 c, a, {shift}; shr.u32 d, b, {shift}; and.b32 c, c, 0x{mask:08X}; and.b32 d, d, 0x{mask:08X};"
        " lop3.b32 a, a, 0x80008000, c, 0xEA; lop3.b32 b, b, 0x80008000, d, 0xEA;"  # (a & signs) | c
        f" mov.b32 times, 0x{factor * 0x10001:08X}; mov.b32 zero, 0x80008000;"
        f" fma.rn.{kind} $0, a, times, zero; fma.rn.{kind} $1, b, times, zero; }}"
    )
