// 256-bit vectors: 8 lanes, AVX2 with FMA and F16C; AVX-VNNI where the compiler was told so.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "half.h"

namespace ISA {

constexpr int LANES = 8;
#if defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
constexpr bool HAS_MIXED_DOT = true;
#else
constexpr bool HAS_MIXED_DOT = false;
#endif
constexpr bool HAS_BF16 = false;
typedef __m256 Floats;
typedef __m256i Ints;
typedef __m256i Bytes;

INLINE Floats broadcast(float x) { return _mm256_set1_ps(x); }
INLINE Floats load(const float* p) { return _mm256_loadu_ps(p); }
INLINE void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Floats minimum(Floats a, Floats b) { return _mm256_min_ps(a, b); }  // b where one is NaN, here and in maximum
INLINE Floats maximum(Floats a, Floats b) { return _mm256_max_ps(a, b); }
INLINE Floats where_greater(Floats a, Floats b, Floats x, Floats y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
INLINE Floats load_halves(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE Floats load_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
// e4m3 with the bits where a half has them: 1/256 of it
INLINE Floats load_e4m3(const uint8_t* p) {
  const __m128i bits = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p));
  const __m128i sign = _mm_and_si128(_mm_slli_epi16(bits, 8), _mm_set1_epi16(int16_t(0x8000)));
  return _mm256_cvtph_ps(_mm_or_si128(sign, _mm_and_si128(_mm_slli_epi16(bits, 7), _mm_set1_epi16(0x3f80))));
}
INLINE Floats load_u8(const uint8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
INLINE Floats load_e8m0(const uint8_t* p) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)), 23)) * broadcast(0.5f); }
INLINE Ints load_i8(const uint8_t* p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
INLINE float sum(Floats v) {  // in halves, as all have it
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
INLINE float top(Floats v) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
INLINE Floats counting() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }
// out[c * out_stride + r] = row(r)[c] of eight rows by eight columns.
template <class ROW> INLINE void transpose_8(ROW&& row, float* out, int64_t out_stride) {
  Floats a[8], b[8];
#pragma GCC unroll 4
  for (int r = 0; r < 4; r++) {  // rows r and r + 4 beside each other: of the first four columns, and of the last
    const __m256 x = load(row(r)), y = load(row(r + 4));
    a[r] = _mm256_permute2f128_ps(x, y, 0x20), a[4 + r] = _mm256_permute2f128_ps(x, y, 0x31);
  }
#pragma GCC unroll 2
  for (int half = 0; half < 8; half += 4) {
    b[0] = _mm256_unpacklo_ps(a[half], a[half + 1]), b[1] = _mm256_unpackhi_ps(a[half], a[half + 1]);
    b[2] = _mm256_unpacklo_ps(a[half + 2], a[half + 3]), b[3] = _mm256_unpackhi_ps(a[half + 2], a[half + 3]);
    store(out + half * out_stride, _mm256_shuffle_ps(b[0], b[2], 0x44));
    store(out + (half + 1) * out_stride, _mm256_shuffle_ps(b[0], b[2], 0xee));
    store(out + (half + 2) * out_stride, _mm256_shuffle_ps(b[1], b[3], 0x44));
    store(out + (half + 3) * out_stride, _mm256_shuffle_ps(b[1], b[3], 0xee));
  }
}
INLINE Floats rounded(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE Floats power_of_two(__m256i n) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23)); }
INLINE Floats times_power_of_two(Floats x, Floats n) {  // in two steps: 2^128 is no float, but exp(88.7) is
  const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
  return x * power_of_two(half) * power_of_two(_mm256_sub_epi32(whole, half));
}

INLINE Ints ints(int32_t x) { return _mm256_set1_epi32(x); }
INLINE Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
INLINE Ints multiply(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
INLINE Floats to_floats(Ints v) { return _mm256_cvtepi32_ps(v); }

// Pairs of bf16: the first, or the second, of each.
INLINE Ints load_bits(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
INLINE Floats low_bf16(Ints v) { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); }
INLINE Floats high_bf16(Ints v) { return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(int(0xffff0000)))); }
// 32 whole numbers of at most 127 as bytes.
INLINE void store_codes(int8_t* out, const Floats (&v)[4]) {
  const __m256i low = _mm256_packs_epi32(_mm256_cvtps_epi32(v[0]), _mm256_cvtps_epi32(v[1]));
  const __m256i high = _mm256_packs_epi32(_mm256_cvtps_epi32(v[2]), _mm256_cvtps_epi32(v[3]));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256((__m256i*)out, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order));
}
INLINE Bytes load_bytes(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
INLINE Bytes low_nibbles(Bytes v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
INLINE Bytes high_nibbles(Bytes v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }
INLINE Bytes looked_up(const uint8_t* table, Bytes nibbles) { return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table)), nibbles); }
template <int FROM, int MASK> INLINE Bytes with_high_bits(Bytes nibbles, Bytes plane) {
  const Bytes moved = FROM > 4 ? _mm256_srli_epi16(plane, FROM > 4 ? FROM - 4 : 0) : _mm256_slli_epi16(plane, FROM > 4 ? 0 : 4 - FROM);
  return _mm256_or_si256(nibbles, _mm256_and_si256(moved, _mm256_set1_epi8(MASK)));
}
INLINE Bytes broadcast_quad(const int8_t* p) { int32_t x; memcpy(&x, p, 4); return _mm256_set1_epi32(x); }

#if defined(__AVXVNNI__)
INLINE Ints dot(Ints acc, Bytes codes, Bytes x) { return _mm256_dpbusd_avx_epi32(acc, codes, x); }
#elif defined(__AVX512VNNI__) && defined(__AVX512VL__)
INLINE Ints dot(Ints acc, Bytes codes, Bytes x) { return _mm256_dpbusd_epi32(acc, codes, x); }
#endif

}  // namespace ISA
