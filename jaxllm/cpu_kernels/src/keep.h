// How new keys and values are stored in their pages.
#pragma once
#include <float.h>
#include <string.h>

#include "half.h"
#include "kernels.h"
#include "simd.h"

namespace ISA {

INLINE float kept(float x) { return (bits_of_float(x) & 0x7f800000) == 0x7f800000 ? 0 : x; }
INLINE float kept(uint16_t x) { return kept(float_of_bf16(x)); }

// XLA takes what is below the smallest normal number as zero, and so do codes.
INLINE float normal(float x) { return (bits_of_float(x) & 0x7f800000) ? x : float_of_bits(bits_of_float(x) & 0x80000000); }

// Rounds to nearest, ties to even: what is added leaves the number in the lowest bits.
template <PageFormat F> INLINE uint8_t code_of(float x) {
  if constexpr (F == PageFormat::int8) return uint8_t(bits_of_float(x + 12582912.0f));
  const uint32_t bits = bits_of_float(x), magnitude = bits & 0x7fffffff;
  const uint32_t fraction = (magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20;  // of a normal number
  const uint32_t small = bits_of_float(float_of_bits(magnitude) + 16384.0f);      // in units of 2^-9
  return uint8_t((magnitude < 0x3c800000 ? small : fraction - (120 << 3)) | (bits >> 24 & 0x80));
}

// The largest number becomes the largest code. Products by inverses, as XLA computes these quotients.
template <PageFormat F, class T> static void keep_codes(const T* x, int count, uint8_t* codes) {
  int32_t most = 0;
  for (int i = 0; i < count; i++) most = larger(most, int32_t(bits_of_float(kept(x[i])) & 0x7fffffff));
  const float scale = normal(float_of_bits(most) * (F == PageFormat::int8 ? 1 / 127.0f : 1 / 448.0f));
  const float inverse = scale > 0 ? 1 / scale : 1;
  for (int i = 0; i < count; i++) codes[i] = code_of<F>(normal(kept(x[i])) * inverse);
  memcpy(codes + count, &scale, SCALE_BYTES);
}

template <class T> static void keep_row(const T* x, int count, void* row, PageFormat format) {
  if (format == PageFormat::int8) return keep_codes<PageFormat::int8>(x, count, (uint8_t*)row);
  if (format == PageFormat::e4m3) return keep_codes<PageFormat::e4m3>(x, count, (uint8_t*)row);
  for (int i = 0; i < count; i++) {
    if (format == PageFormat::bf16) ((uint16_t*)row)[i] = bf16_of_float(kept(x[i]));
    else ((float*)row)[i] = kept(x[i]);
  }
}

static void keep(const void* x, bool is_bf16, int count, void* row, PageFormat format) {
  if (is_bf16) keep_row((const uint16_t*)x, count, row, format);
  else keep_row((const float*)x, count, row, format);
}

}  // namespace ISA
