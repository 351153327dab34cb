// Vectors of 16 lanes in the compiler's own vector types: correct everywhere, and what the other ISAs are held against.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "half.h"

namespace ISA {

constexpr int LANES = 16;
constexpr bool HAS_MIXED_DOT = false, HAS_BF16 = false;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Uints __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(64)));

template <class V> INLINE V load_as(const void* p) { V v; memcpy(&v, p, sizeof v); return v; }
template <class T> INLINE Floats widen(const T* p) { Floats v; for (int i = 0; i < 16; i++) v[i] = float(p[i]); return v; }

INLINE Floats broadcast(float x) { return Floats{} + x; }
INLINE Floats load(const float* p) { return load_as<Floats>(p); }
INLINE void store(float* p, Floats v) { memcpy(p, &v, sizeof v); }
INLINE Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }
INLINE Floats maximum(Floats a, Floats b) { return a > b ? a : b; }
INLINE Floats where_greater(Floats a, Floats b, Floats x, Floats y) { return a > b ? x : y; }
INLINE Floats load_halves(const uint8_t* p) { Floats v; for (int i = 0; i < 16; i++) v[i] = float_of_half(load_as<uint16_t>(p + 2 * i)); return v; }
INLINE Floats load_bf16(const uint16_t* p) { Floats v; for (int i = 0; i < 16; i++) v[i] = float_of_bf16(p[i]); return v; }
INLINE Floats load_e4m3(const uint8_t* p) { Floats v; for (int i = 0; i < 16; i++) v[i] = float_of_e4m3(p[i]) / 256; return v; }  // 1/256 of it, as the others have it
INLINE Floats load_u8(const uint8_t* p) { return widen(p); }
INLINE Floats load_e8m0(const uint8_t* p) { Floats v; for (int i = 0; i < 16; i++) v[i] = float_of_bits(uint32_t(p[i]) << 23) * 0.5f; return v; }
INLINE Ints load_i8(const uint8_t* p) { Ints v; for (int i = 0; i < 16; i++) v[i] = int8_t(p[i]); return v; }
INLINE float sum(Floats v) {  // in halves, as all have it
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++) v[i] += v[n + i];
  return v[0];
}
INLINE float top(Floats v) { float s = v[0]; for (int i = 1; i < 16; i++) s = v[i] > s ? v[i] : s; return s; }
INLINE Floats counting() { Floats v; for (int i = 0; i < 16; i++) v[i] = float(i); return v; }
INLINE Floats exponential(Floats v) { for (int i = 0; i < 16; i++) v[i] = expf(v[i]); return v; }
INLINE Floats power_of_two(Floats v) { for (int i = 0; i < 16; i++) v[i] = exp2f(v[i]); return v; }

INLINE Ints ints(int32_t x) { return Ints{} + x; }
INLINE Ints add(Ints a, Ints b) { return a + b; }
INLINE Ints multiply(Ints a, Ints b) { return a * b; }
INLINE Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }

INLINE Ints load_bits(const uint8_t* p) { return load_as<Ints>(p); }
INLINE Floats low_bf16(Ints v) { v = Ints(Uints(v) << 16u); return load_as<Floats>(&v); }
INLINE Floats high_bf16(Ints v) { v = v & int32_t(0xffff0000); return load_as<Floats>(&v); }
INLINE void store_codes(int8_t* out, const Floats (&v)[2]) { for (int i = 0; i < 32; i++) out[i] = int8_t(v[i / 16][i % 16]); }
INLINE Bytes load_bytes(const uint8_t* p) { return load_as<Bytes>(p); }
INLINE Bytes low_nibbles(Bytes v) { return v & uint8_t(15); }
INLINE Bytes high_nibbles(Bytes v) { return v >> uint8_t(4); }
INLINE Bytes looked_up(const uint8_t* table, Bytes v) { for (int i = 0; i < 64; i++) v[i] = table[v[i]]; return v; }
// Moves the bits of `plane` from position `from` to position 4 and adds those of `mask` to the nibbles.
template <int FROM, int MASK> INLINE Bytes with_high_bits(Bytes nibbles, Bytes plane) {
  return nibbles | ((FROM > 4 ? plane >> uint8_t(FROM > 4 ? FROM - 4 : 0) : plane << uint8_t(FROM > 4 ? 0 : 4 - FROM)) & uint8_t(MASK));
}
// Four signed codes, the same for every row.
INLINE Bytes broadcast_quad(const int8_t* p) { Bytes v; for (int i = 0; i < 16; i++) memcpy((uint8_t*)&v + 4 * i, p, 4); return v; }
INLINE Ints dot(Ints acc, Bytes codes, Bytes x) {
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 4; j++) acc[i] += int(codes[4 * i + j]) * int8_t(x[4 * i + j]);
  return acc;
}

}  // namespace ISA
