// 16-bit floats in plain C++.
#pragma once
#include <stdint.h>
#include <string.h>

namespace {

inline float float_of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

inline uint32_t bits_of_float(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

inline float float_of_bf16(uint16_t x) { return float_of_bits(uint32_t(x) << 16); }

// Rounds to nearest, ties to even. A NaN stays one.
inline uint16_t bf16_of_float(float x) {
  uint32_t bits = bits_of_float(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float float_of_half(uint16_t half) {
  uint32_t sign = uint32_t(half & 0x8000) << 16, rest = half & 0x7fff;
  if (rest >= 0x7c00) return float_of_bits(sign | 0x7f800000 | rest << 13);      // infinity, NaN
  if (rest < 0x400) return float_of_bits(sign | bits_of_float(rest * 0x1p-24f));  // subnormal
  return float_of_bits(sign | ((rest << 13) + 0x38000000));
}

// Of sign, four bits of exponent and three of fraction; what is there a NaN is 480 here. As a half it is 1/256 of it.
inline float float_of_e4m3(uint8_t x) { return float_of_half(uint16_t((x & 0x80) << 8 | (x & 0x7f) << 7)) * 256; }

}  // namespace
