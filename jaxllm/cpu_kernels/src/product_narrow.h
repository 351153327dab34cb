// Integer products with 8 lanes and 16 registers of them: integer sums of four rows stay in registers while two vectors of
// weights pass at a time; float sums live in L1.
#pragma once

namespace ISA {

constexpr int FEW_ROWS = 4;

// add_dots: adds the dot products of quads [BEGIN, END) of R rows: sums [half][row].
#if defined(KERNELS_NEON)

template <Format F, int R, int BEGIN, int END> INLINE void add_dots(const uint8_t* codes, const int8_t* x, Ints (&sums)[2][R]) {
  unroll<BEGIN, END>([&](auto p) __attribute__((always_inline)) {
    const Bytes w0 = dot_codes<layout(F).code_bits()>(quad<F, p.value>(codes, 0)), w1 = dot_codes<layout(F).code_bits()>(quad<F, p.value>(codes, 1));
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const int8x16_t v = vld1q_s8(x + r * BLOCK + p.value / 4 * 16);
      Ints &s0 = sums[0][r], &s1 = sums[1][r];
      s0 = dot<p.value % 4>(s0, w0, v);
      s1 = dot<p.value % 4>(s1, w1, v);
      asm volatile("" : "+w"(s0.low), "+w"(s0.high), "+w"(s1.low), "+w"(s1.high));  // else GCC goes row by row, and keeps all weights unpacked
    }
  });
}

#elif defined(__AVXVNNI__) || defined(__AVX512VNNI__)

template <Format F, int R, int BEGIN, int END> INLINE void add_dots(const uint8_t* codes, const int8_t* x, Ints (&sums)[2][R]) {
  unroll<BEGIN, END>([&](auto p) __attribute__((always_inline)) {
    const Bytes w0 = quad<F, p.value>(codes, 0), w1 = quad<F, p.value>(codes, 1);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const Bytes v = broadcast_quad(x + r * BLOCK + 4 * p.value);
      sums[0][r] = dot(sums[0][r], w0, v);
      sums[1][r] = dot(sums[1][r], w1, v);
    }
  });
}

#else

// Without VNNI products are added in pairs to 16 bits: this many quads of n-bit codes fit beside signed 8-bit ones.
constexpr int quads_in_16_bits(int bits) { return bits == 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1; }

template <Format F, int R, int BEGIN, int END> INLINE void add_dots(const uint8_t* codes, const int8_t* x, Ints (&sums)[2][R]) {
  constexpr int step = smaller(quads_in_16_bits(layout(F).code_bits()), END - BEGIN);
  const Ints ones = _mm256_set1_epi16(1);
  unroll<0, (END - BEGIN) / step>([&](auto s) __attribute__((always_inline)) {
    Ints pairs[2][R];
    unroll<0, step>([&](auto i) __attribute__((always_inline)) {
      constexpr int p = BEGIN + decltype(s)::value * step + decltype(i)::value;
      Bytes w0 = quad<F, p>(codes, 0), w1 = quad<F, p>(codes, 1);
      constexpr bool bytes = layout(F).code_bits() == 8;
      if constexpr (bytes) {  // unsigned codes would overflow: the sign goes to the activations instead
        w0 = _mm256_xor_si256(w0, _mm256_set1_epi8(-128));
        w1 = _mm256_xor_si256(w1, _mm256_set1_epi8(-128));
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const Bytes v = broadcast_quad(x + r * BLOCK + 4 * p);
        const Ints d0 = bytes ? _mm256_maddubs_epi16(_mm256_abs_epi8(w0), _mm256_sign_epi8(v, w0)) : _mm256_maddubs_epi16(w0, v);
        const Ints d1 = bytes ? _mm256_maddubs_epi16(_mm256_abs_epi8(w1), _mm256_sign_epi8(v, w1)) : _mm256_maddubs_epi16(w1, v);
        pairs[0][r] = decltype(i)::value ? _mm256_add_epi16(pairs[0][r], d0) : d0;
        pairs[1][r] = decltype(i)::value ? _mm256_add_epi16(pairs[1][r], d1) : d1;
        asm("" : "+x"(pairs[0][r]), "+x"(pairs[1][r]));  // else GCC keeps all products and adds them up in the end
      }
    });
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) sums[h][r] = add(sums[h][r], _mm256_madd_epi16(pairs[h][r], ones));
  });
}

#endif

// Codes of 8 bits are taken as signed where nothing multiplies unsigned by signed ones: they count from zero already.
template <Format F> INLINE Ints start_narrow(int32_t negative_sum) {
  return layout(F).code_bits() == 8 && !HAS_MIXED_DOT ? ints(0) : start<F>(negative_sum);
}

template <Format F, int R> static void few_rows(const uint8_t* tile, int inputs, const Panel& x, int m, float* out) {
  constexpr Layout form = layout(F);
  Floats acc[2][R];
  for (int r = 0; r < R; r++) acc[0][r] = acc[1][r] = broadcast(0);
  for (int b = 0; b < inputs / BLOCK; tile += form.bytes()) {
    const uint8_t* codes = tile + form.header;
    for (int sub = 0; sub < form.blocks(); sub++, b++, codes += form.codes) {
      prefetch_block(codes, form.codes + (form.blocks() > 1 ? 0 : form.header));
      const int8_t* v = x.x(b, m);
      const RowBlock* scale = &x.scale(b, m);
      const Scales s0 = scales<F>(tile, sub, 0), s1 = scales<F>(tile, sub, 1);
      Ints sums[2][R], second[2][R];  // second: of the last 16 inputs, where they have a scale of their own
      if constexpr (splits(F)) {
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          sums[0][r] = sums[1][r] = start<F>(scale[r].negative_sum_16);
          second[0][r] = second[1][r] = start<F>(scale[r].negative_sum - scale[r].negative_sum_16);
        }
        add_dots<F, R, 0, 4>(codes, v, sums);
        add_dots<F, R, 4, 8>(codes, v, second);
      } else {
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) sums[0][r] = sums[1][r] = start_narrow<F>(scale[r].negative_sum);
        add_dots<F, R, 0, 8>(codes, v, sums);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const auto& last = splits(F) ? second : sums;
        acc[0][r] = add_block<F>(acc[0][r], joined<F>(sums[0][r], last[0][r], s0), s0, scale[r]);
        acc[1][r] = add_block<F>(acc[1][r], joined<F>(sums[1][r], last[1][r], s1), s1, scale[r]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int h = 0; h < 2; h++) store(out + (m + r) * PANEL_COLUMNS + h * LANES, acc[h][r]);
}

#if !defined(__ARM_FEATURE_MATMUL_INT8)
template <Format F> static bool many_rows(const Matrix&, const Panel&, int, int, int, float*) { return false; }
#endif

}  // namespace ISA

#if defined(__ARM_FEATURE_MATMUL_INT8)
#include "product_i8mm.h"
#endif
