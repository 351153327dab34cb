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

}  // namespace ISA
