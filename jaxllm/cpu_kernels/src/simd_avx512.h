// 512-bit vectors: 16 lanes. VNNI is taken for granted, BF16 where the compiler was told so.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "half.h"

namespace ISA {

constexpr int LANES = 16;
constexpr bool HAS_MIXED_DOT = true;
#ifdef __AVX512BF16__
constexpr bool HAS_BF16 = true;
#else
constexpr bool HAS_BF16 = false;
#endif
typedef __m512 Floats;
typedef __m512i Ints;
typedef __m512i Bytes;

INLINE Floats broadcast(float x) { return _mm512_set1_ps(x); }
INLINE Floats load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Floats minimum(Floats a, Floats b) { return _mm512_min_ps(a, b); }  // b where one is NaN, here and in maximum
INLINE Floats maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }
INLINE Floats where_greater(Floats a, Floats b, Floats x, Floats y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), y, x);
}
INLINE Floats load_halves(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE Floats load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
// e4m3 with the bits where a half has them: 1/256 of it
INLINE Floats load_e4m3(const uint8_t* p) {
  const __m256i bits = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi16(bits, 8), _mm256_set1_epi16(int16_t(0x8000)));
  return _mm512_cvtph_ps(_mm256_or_si256(sign, _mm256_and_si256(_mm256_slli_epi16(bits, 7), _mm256_set1_epi16(0x3f80))));
}
INLINE Floats load_u8(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))); }
// 2^(byte - 128); nothing for 0, where that is no normal float.
INLINE Floats load_e8m0(const uint8_t* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), 23)) * broadcast(0.5f); }
INLINE Ints load_i8(const uint8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
// Lanes are added in halves: the first eight to the last, and so on; see `total_of` in attention_tile.h.
INLINE float sum(Floats v) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
INLINE float top(Floats v) { return _mm512_reduce_max_ps(v); }
INLINE Floats counting() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
INLINE Floats parts_of(Floats a, Floats b, bool odd) { return odd ? _mm512_shuffle_f32x4(a, b, 0xdd) : _mm512_shuffle_f32x4(a, b, 0x88); }
// out[c * out_stride + r] = row(r)[c] of 16 rows by 16 columns.
template <class ROW> INLINE void transpose_16(ROW&& row, float* out, int64_t out_stride) {
  Floats a[16], b[16];
#pragma GCC unroll 16
  for (int r = 0; r < 16; r++) a[r] = load(row(r));
#pragma GCC unroll 8
  for (int r = 0; r < 16; r += 2) b[r] = _mm512_unpacklo_ps(a[r], a[r + 1]), b[r + 1] = _mm512_unpackhi_ps(a[r], a[r + 1]);
#pragma GCC unroll 8
  for (int r = 0; r < 16; r += 4)
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      const __m512d x = _mm512_castps_pd(b[r + i]), y = _mm512_castps_pd(b[r + 2 + i]);
      a[r + 2 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), a[r + 2 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
    }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++)  // a[4 i + j] has columns j, 4 + j, 8 + j and 12 + j of rows 4 i to 4 i + 3
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; odd++) {
      const Floats x = parts_of(a[j], a[4 + j], odd), y = parts_of(a[8 + j], a[12 + j], odd);
      store(out + (4 * odd + j) * out_stride, parts_of(x, y, false));
      store(out + (8 + 4 * odd + j) * out_stride, parts_of(x, y, true));
    }
}
INLINE Floats rounded(Floats x) { return _mm512_roundscale_ps(x, 0); }
INLINE Floats times_power_of_two(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }

INLINE Ints ints(int32_t x) { return _mm512_set1_epi32(x); }
INLINE Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
INLINE Ints multiply(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
INLINE Floats to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }

// Pairs of bf16: the first, or the second, of each.
INLINE Ints load_bits(const uint8_t* p) { return _mm512_loadu_si512(p); }
INLINE Floats low_bf16(Ints v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); }
INLINE Floats high_bf16(Ints v) { return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(int(0xffff0000)))); }
// 32 whole numbers of at most 127 as bytes. At once: what reads them all would wait for two stores to be done.
INLINE void store_codes(int8_t* out, const Floats (&v)[2]) {
  const __m128i low = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v[0])), high = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v[1]));
  _mm256_storeu_si256((__m256i*)out, _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
}
// Of the first 16 codes, and of the other 16.
INLINE void sums_of_codes(const int8_t* codes, int (&sums)[2]) {
  const __m256i quads = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), _mm256_loadu_si256((const __m256i*)codes));
  const __m256i pairs = _mm256_add_epi32(quads, _mm256_shuffle_epi32(quads, 0x4e)), all = _mm256_add_epi32(pairs, _mm256_shuffle_epi32(pairs, 0xb1));
  sums[0] = _mm256_extract_epi32(all, 0), sums[1] = _mm256_extract_epi32(all, 4);
}
// The greatest |x| of 32; not finite where one of them is not: the bits of magnitudes are ordered as they are.
INLINE float magnitude(const Floats (&v)[2]) {
  const Ints bits = _mm512_set1_epi32(0x7fffffff);
  return float_of_bits(_mm512_reduce_max_epi32(_mm512_max_epi32(_mm512_and_si512((Ints)v[0], bits), _mm512_and_si512((Ints)v[1], bits))));
}
INLINE Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
INLINE void store_bytes(uint8_t* p, Bytes v) { _mm512_storeu_si512(p, v); }
INLINE Bytes low_nibbles(Bytes v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
INLINE Bytes high_nibbles(Bytes v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
INLINE Bytes looked_up(const uint8_t* table, Bytes nibbles) { return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), nibbles); }
template <int FROM, int MASK> INLINE Bytes with_high_bits(Bytes nibbles, Bytes plane) {
  const Bytes moved = FROM > 4 ? _mm512_srli_epi16(plane, FROM > 4 ? FROM - 4 : 0) : _mm512_slli_epi16(plane, FROM > 4 ? 0 : 4 - FROM);
  return _mm512_ternarylogic_epi32(nibbles, moved, _mm512_set1_epi8(MASK), 0xf8);  // a | (b & c)
}
INLINE Bytes broadcast_quad(const int8_t* p) { int32_t x; memcpy(&x, p, 4); return _mm512_set1_epi32(x); }
INLINE Ints dot(Ints acc, Bytes codes, Bytes x) { return _mm512_dpbusd_epi32(acc, codes, x); }

#ifdef __AVX512BF16__
// Pairs of bf16: acc[i] += a[2i] b[2i] + a[2i + 1] b[2i + 1].
INLINE Floats dot_bf16(Floats acc, Bytes a, Bytes b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
// The first `count` words, and zeros.
INLINE Bytes load_words(const uint16_t* p, int count) { return _mm512_maskz_loadu_epi16(__mmask32((uint64_t(1) << count) - 1), p); }
INLINE void store_bf16(uint16_t* p, Floats v) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(v)); }
// Words of two vectors in turns, a0 b0 a1 b1 ...: of their first halves, or of their second ones.
template <bool SECOND> INLINE Bytes in_turns(Bytes a, Bytes b) {
  const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  return _mm512_permutex2var_epi16(a, SECOND ? _mm512_add_epi16(first, _mm512_set1_epi16(16)) : first, b);
}
#if defined(__AMX_BF16__)
// Rounds to bf16 as numbers that are not below 2^-126 are: by additions, which Intel does several times as fast as conversions.
INLINE Ints rounded_to_bf16(Floats v) {
  const Ints bits = (Ints)v, odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), ints(1));
  return _mm512_and_si512(add(bits, add(odd, ints(0x7fff))), ints(int(0xffff0000)));
}
INLINE Bytes paired(Floats a, Floats b) { return _mm512_or_si512(_mm512_srli_epi32(rounded_to_bf16(a), 16), rounded_to_bf16(b)); }

// While it lives, numbers below 2^-126 count as zero, as they do in tiles.
class TinyIsZero {
 public:
  TinyIsZero() : before_(_mm_getcsr()) {
    _mm_setcsr(before_ | 0x8040);
    asm volatile("" ::: "memory");  // the compiler does not know that arithmetic depends on it; what it reads and writes stays between
  }
  ~TinyIsZero() {
    asm volatile("" ::: "memory");
    _mm_setcsr(before_);
  }

 private:
  unsigned before_;
};
#else
// Pairs of bf16, the first of each from `a`.
INLINE Bytes paired(Floats a, Floats b) {
  const __m256i first = (__m256i)_mm512_cvtneps_pbh(a), second = (__m256i)_mm512_cvtneps_pbh(b);
  return in_turns<false>(_mm512_castsi256_si512(first), _mm512_castsi256_si512(second));
}
#endif
#endif

}  // namespace ISA
