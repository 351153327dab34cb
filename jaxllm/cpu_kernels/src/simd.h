// The vector operations that kernels need, for the ISA that this file is compiled for; ISA is the namespace's name.
//
// What is compiled for one ISA must call nothing that the linker could share with another one's copy: no templates of
// the standard library here, only C headers and our own functions, which are all local.
#pragma once

#define INLINE static inline __attribute__((always_inline, unused))

#if defined(KERNELS_AVX512)
#include "simd_avx512.h"
#elif defined(KERNELS_AVX2)
#include "simd_avx2.h"
#elif defined(KERNELS_NEON)
#include "simd_neon.h"
#else
#include "simd_plain.h"
#endif

namespace ISA {

constexpr int HALVES = 16 / LANES;  // vectors to a group of 16 rows

template <class T> INLINE constexpr T smaller(T a, T b) { return a < b ? a : b; }
template <class T> INLINE constexpr T larger(T a, T b) { return a > b ? a : b; }

#if defined(KERNELS_AVX512) || defined(KERNELS_AVX2) || defined(KERNELS_NEON)

INLINE Floats exponential(Floats x) {  // Cephes; relative error 2e-7
  x = maximum(broadcast(-87.3f), minimum(broadcast(88.7f), x));  // in this order NaN stays
  const Floats n = rounded(x * broadcast(1.44269504f));
  const Floats r = fma(n, broadcast(2.12194440e-4f), fma(n, broadcast(-0.693359375f), x));
  Floats p = fma(broadcast(1.9875691500e-4f), r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  return times_power_of_two(fma(p, r * r, r + broadcast(1.0f)), n);
}

// 2^y of y up to 1, relative error 2e-7; no less than 2^-126. Coefficients: the least greatest relative error of six terms.
INLINE Floats power_of_two(Floats y) {
  y = maximum(broadcast(-126.0f), y);  // in this order NaN stays
  const Floats n = rounded(y), r = y - n;
  Floats p = fma(broadcast(1.326472731e-3f), r, broadcast(9.671512991e-3f));
  p = fma(p, r, broadcast(5.550733581e-2f));
  p = fma(p, r, broadcast(2.402224243e-1f));
  p = fma(p, r, broadcast(6.931470037e-1f));
  return times_power_of_two(fma(p, r, broadcast(1.0f)), n);
}

#endif

// `count` floats of the bits of bf16.
static inline void widen_bf16(const uint16_t* bits, int count, float* out) {
  int i = 0;
  for (; i + LANES <= count; i += LANES) store(out + i, load_bf16(bits + i));
  for (; i < count; i++) out[i] = float_of_bf16(bits[i]);
}

// `count` floats as the bits of bf16.
static inline void narrow_bf16(const float* x, int count, uint16_t* out) {
  for (int i = 0; i < count; i++) out[i] = bf16_of_float(x[i]);
}

#if !defined(KERNELS_AVX512)

// out[c * out_stride + r] = row(r)[c] of 16 rows by 16 columns.
template <class ROW> INLINE void transpose_16(ROW&& row, float* out, int64_t out_stride) {
#if defined(KERNELS_AVX2) || defined(KERNELS_NEON)
  for (int r = 0; r < 16; r += 8)
    for (int c = 0; c < 16; c += 8)
      transpose_8([&](int i) { return row(r + i) + c; }, out + c * out_stride + r, out_stride);
#else
  for (int c = 0; c < 16; c++)
    for (int r = 0; r < 16; r++) out[c * out_stride + r] = row(r)[c];
#endif
}

// The greatest |x| of 32; not finite where one of them is not.
INLINE float magnitude(const Floats (&v)[32 / LANES]) {
  Floats largest = broadcast(0), nothing = broadcast(0);
#pragma GCC unroll 4
  for (int i = 0; i < 32 / LANES; i++) {
    largest = maximum(largest, maximum(v[i], broadcast(0) - v[i]));
    nothing = fma(v[i], broadcast(0), nothing);  // NaN unless all are finite
  }
  return top(largest) + sum(nothing);
}

// Of the first 16 codes, and of the other 16.
INLINE void sums_of_codes(const int8_t* codes, int (&sums)[2]) {
  for (int h = 0; h < 2; h++) {
    sums[h] = 0;
    for (int i = 0; i < 16; i++) sums[h] += codes[16 * h + i];
  }
}

#endif

}  // namespace ISA
