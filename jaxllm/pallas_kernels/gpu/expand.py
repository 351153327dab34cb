"""Codes of few bits, and e4m3, made numbers in registers: four at a time by byte permutations, or one by one.

A 16-bit float whose last bits are a small integer is that integer and a power of two: bfloat16 0x4300 | c is 128 + c
for 7 bits, float16 0x6400 | c is 1024 + c for 10. One permutation makes two such of two bytes, and one operation
subtracts what is too much from both.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from jaxllm.compat import triton_elementwise_asm
from jaxllm.pallas_kernels.matrices import PackedFormat, from_e4m3

BF16, F16 = np.dtype(jnp.bfloat16), np.dtype(np.float16)


def expand(
    format: PackedFormat,
    low: UInt8[Array, "n w"],
    high: UInt8[Array, "n w"] | None,
    shift: int,
    high_shift: int,
    dtype: np.dtype,
    *,
    plain: bool,
) -> Float[Array, "n w"]:
    """`code - offset` of the codes that begin at bits `shift` of bytes, and `high_shift` of the high plane's."""
    if plain or dtype not in (BF16, F16):
        return _plain(format, low, high, shift, high_shift).astype(dtype)
    if format.e2m1:
        return triton_elementwise_asm(
            "{ .reg .b32 a, b, c, h, one, none; " + _e2m1(shift, dtype) + " }", [low], constraints="=r,=r,r", pack=4,
            dtype=dtype,
        )  # fmt: skip
    gather = [f"{_shifted('c', '$2', shift)} and.b32 c, c, {_bytes((1 << format.bits) - 1)};"]
    if high is not None:
        place = high_shift - format.bits  # where the high bits are, from where they belong
        mask = _bytes(((1 << format.high) - 1) << format.bits)
        gather.append(f"{_shifted('h', '$3', place)} lop3.b32 c, h, {mask}, c, 0xEA;")  # (h & mask) | c
    body = " ".join(gather) + (_signed_bytes() if format.bits == 8 and dtype == BF16 else _small(format, dtype))
    arguments = [low] if high is None else [low, high]
    return triton_elementwise_asm(
        "{ .reg .b32 c, h, a, b, one, less; " + body + " }",
        arguments,
        constraints="=r,=r" + ",r" * len(arguments),
        pack=4,
        dtype=dtype,
    )


def multiply_add(a: Array, b: Array, c: Float[Array, "n t"], *, plain: bool) -> Float[Array, "n t"]:
    """`a * b + c` of float32 at once: Triton as XLA runs it contracts nothing."""
    a, b = jnp.broadcast_to(a, c.shape), jnp.broadcast_to(b, c.shape)
    if plain:
        return a * b + c
    return triton_elementwise_asm(
        "fma.rn.f32 $0, $1, $2, $3;", [a, b, c], constraints="=f,f,f,f", pack=1, dtype=np.dtype(np.float32)
    )


def _plain(format: PackedFormat, low: Array, high: Array | None, shift: int, high_shift: int) -> Array:
    if format.bits == 8:
        return low.astype(jnp.int8).astype(jnp.float32)
    codes = (low.astype(jnp.int32) >> shift) & ((1 << format.bits) - 1)
    if high is not None:
        codes |= ((high.astype(jnp.int32) >> high_shift) & ((1 << format.high) - 1)) << format.bits
    if format.e2m1:
        size = codes & 7
        power = jnp.left_shift(1, jnp.maximum(size >> 1, 1) - 1).astype(jnp.float32)
        value = jnp.where(size < 2, size & 1, 2 + (size & 1)).astype(jnp.float32) * 0.5 * power
        return jnp.where(codes & 8, -value, value)
    return (codes - format.offset).astype(jnp.float32)


def _bytes(value: int) -> str:
    return f"0x{value * 0x01010101:08X}"


def _shifted(to: str, source: str, right: int) -> str:
    if right == 0:
        return f"mov.b32 {to}, {source};"
    return f"shr.u32 {to}, {source}, {right};" if right > 0 else f"shl.b32 {to}, {source}, {-right};"


def _twice(bits: int) -> str:
    return f"0x{bits * 0x10001:08X}"


def _bits_of(value: float, dtype: np.dtype) -> int:
    return int(np.asarray(value, dtype).view(np.uint16))


def _small(format: PackedFormat, dtype: np.dtype) -> str:
    """From four codes in the bytes of `c`, of seven bits and fewer or in float16 of eight, to two pairs of floats."""
    top, power = ("0x43434343", 128) if dtype == BF16 else ("0x64646464", 1024)
    flip = " xor.b32 c, c, 0x80808080;" if format.bits == 8 else ""
    offset = 128 if format.bits == 8 else format.offset
    one, less = _twice(_bits_of(1, dtype)), _twice(_bits_of(-power - offset, dtype))
    kind = "bf16x2" if dtype == BF16 else "f16x2"
    return (
        f"{flip} mov.b32 one, {one}; mov.b32 less, {less};"
        f" prmt.b32 a, c, {top}, 0x4140; prmt.b32 b, c, {top}, 0x4342;"
        f" fma.rn.{kind} $0, a, one, less; fma.rn.{kind} $1, b, one, less;"
    )


def _signed_bytes() -> str:
    """Of bytes in bfloat16: 128 + the low seven bits, less 128, or 256 where the sign is set."""
    return (
        " and.b32 h, c, 0x80808080; and.b32 c, c, 0x7F7F7F7F; mov.b32 one, 0xBF80BF80;"
        " prmt.b32 a, c, 0x43434343, 0x4140; prmt.b32 less, h, 0x43434343, 0x4140; fma.rn.bf16x2 $0, less, one, a;"
        " prmt.b32 b, c, 0x43434343, 0x4342; prmt.b32 less, h, 0x43434343, 0x4342; fma.rn.bf16x2 $1, less, one, b;"
    )


def _e2m1(shift: int, dtype: np.dtype) -> str:
    """Of floats of four bits: sign and exponent go where a 16-bit float has them, which is then too small by a power of
    two. In bfloat16 the bits `seem` become the high byte `s000000e` and the low byte `em000000`."""
    wide = dtype == BF16
    high = [(4 - shift, 0x80), (-2 - shift, 0x01) if wide else (1 - shift, 0x0E)]
    parts = []
    for to, (left, mask) in zip(("a", "b"), high, strict=True):
        parts.append(f"{_shifted(to, '$2', -left)} and.b32 {to}, {to}, {_bytes(mask)};")
    parts.append("or.b32 h, a, b;")
    if wide:
        parts.append(f"{_shifted('c', '$2', shift - 6)} and.b32 c, c, {_bytes(0xC0)};")
    else:
        parts.append("mov.b32 c, 0;")
    power = _twice(_bits_of(2.0**126 if wide else 2.0**14, dtype))
    kind = "bf16x2" if wide else "f16x2"
    parts.append(
        f"prmt.b32 a, c, h, 0x5140; prmt.b32 b, c, h, 0x7362; mov.b32 one, {power}; mov.b32 none, 0x80008000;"
        f" fma.rn.{kind} $0, a, one, none; fma.rn.{kind} $1, b, one, none;"
    )
    return " ".join(parts)


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
