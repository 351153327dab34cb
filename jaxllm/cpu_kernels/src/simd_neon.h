// Two 128-bit registers as one vector of 8 lanes: 32 of them hold what 16 of 256 bits do, so that the kernels for AVX2 fit.
// The dot products of ARMv8.2 are taken for granted, those of I8MM used where the compiler was told so.
#pragma once
#include <arm_neon.h>
#include <stdint.h>

#include "half.h"

namespace ISA {

constexpr int LANES = 8;
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool HAS_MIXED_DOT = true;
#else
constexpr bool HAS_MIXED_DOT = false;
#endif
constexpr bool HAS_BF16 = false;
struct Floats { float32x4_t low, high; };
struct Ints { int32x4_t low, high; };
struct Bytes { uint8x16_t low, high; };

INLINE Floats operator+(Floats a, Floats b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
INLINE Floats operator-(Floats a, Floats b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
INLINE Floats operator*(Floats a, Floats b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
INLINE Floats operator/(Floats a, Floats b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }

INLINE Floats broadcast(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
INLINE Floats load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
INLINE void store(float* p, Floats v) { vst1q_f32(p, v.low), vst1q_f32(p + 4, v.high); }
INLINE Floats fma(Floats a, Floats b, Floats c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
INLINE Floats minimum(Floats a, Floats b) { return {vminq_f32(a.low, b.low), vminq_f32(a.high, b.high)}; }
INLINE Floats maximum(Floats a, Floats b) { return {vmaxq_f32(a.low, b.low), vmaxq_f32(a.high, b.high)}; }
INLINE Floats where_greater(Floats a, Floats b, Floats x, Floats y) {
  return {vbslq_f32(vcgtq_f32(a.low, b.low), x.low, y.low), vbslq_f32(vcgtq_f32(a.high, b.high), x.high, y.high)};
}
INLINE Floats load_halves(const uint8_t* p) {
  const float16x8_t v = vreinterpretq_f16_u8(vld1q_u8(p));
  return {vcvt_f32_f16(vget_low_f16(v)), vcvt_f32_f16(vget_high_f16(v))};
}
INLINE Floats load_bf16(const uint16_t* p) {
  const uint16x8_t v = vld1q_u16(p);
  return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(v), 16)), vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(v), 16))};
}
// e4m3 with the bits where a half has them: 1/256 of it
INLINE Floats load_e4m3(const uint8_t* p) {
  const uint16x8_t bits = vmovl_u8(vld1_u8(p));
  const uint16x8_t sign = vandq_u16(vshlq_n_u16(bits, 8), vdupq_n_u16(0x8000)), rest = vandq_u16(vshlq_n_u16(bits, 7), vdupq_n_u16(0x3f80));
  const float16x8_t halves = vreinterpretq_f16_u16(vorrq_u16(sign, rest));
  return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_f32_f16(vget_high_f16(halves))};
}
INLINE Floats load_u8(const uint8_t* p) {
  const uint16x8_t v = vmovl_u8(vld1_u8(p));
  return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(v))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(v)))};
}
INLINE Floats load_e8m0(const uint8_t* p) {
  const uint16x8_t v = vmovl_u8(vld1_u8(p));
  const auto power = [](uint16x4_t e) { return vmulq_n_f32(vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(e), 23)), 0.5f); };
  return {power(vget_low_u16(v)), power(vget_high_u16(v))};
}
INLINE Ints load_i8(const uint8_t* p) {
  const int16x8_t v = vmovl_s8(vreinterpret_s8_u8(vld1_u8(p)));
  return {vmovl_s16(vget_low_s16(v)), vmovl_s16(vget_high_s16(v))};
}
INLINE float sum(Floats v) {  // in halves, as all have it
  const float32x4_t four = vaddq_f32(v.low, v.high);
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
INLINE float top(Floats v) { return vmaxvq_f32(vmaxq_f32(v.low, v.high)); }
INLINE Floats counting() {
  static const float lanes[8] = {0, 1, 2, 3, 4, 5, 6, 7};
  return load(lanes);
}
// out[c * out_stride + r] = row(r)[c] of eight rows by eight columns.
template <class ROW> INLINE void transpose_8(ROW&& row, float* out, int64_t out_stride) {
  for (int r = 0; r < 8; r += 4)
    for (int c = 0; c < 8; c += 4) {
      const float32x4x2_t a = vtrnq_f32(vld1q_f32(row(r) + c), vld1q_f32(row(r + 1) + c)), b = vtrnq_f32(vld1q_f32(row(r + 2) + c), vld1q_f32(row(r + 3) + c));
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++) {
        vst1q_f32(out + (c + i) * out_stride + r, vcombine_f32(vget_low_f32(a.val[i]), vget_low_f32(b.val[i])));
        vst1q_f32(out + (c + 2 + i) * out_stride + r, vcombine_f32(vget_high_f32(a.val[i]), vget_high_f32(b.val[i])));
      }
    }
}
INLINE float32x4_t power_of_two(int32x4_t n) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23)); }
INLINE Floats rounded(Floats x) { return {vrndnq_f32(x.low), vrndnq_f32(x.high)}; }
INLINE Floats times_power_of_two(Floats x, Floats n) {  // in two steps: 2^128 is no float, but exp(88.7) is
  const Ints whole{vcvtq_s32_f32(n.low), vcvtq_s32_f32(n.high)}, half{vshrq_n_s32(whole.low, 1), vshrq_n_s32(whole.high, 1)};
  x = x * Floats{power_of_two(half.low), power_of_two(half.high)};
  return x * Floats{power_of_two(vsubq_s32(whole.low, half.low)), power_of_two(vsubq_s32(whole.high, half.high))};
}

INLINE Ints ints(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
INLINE Ints add(Ints a, Ints b) { return {vaddq_s32(a.low, b.low), vaddq_s32(a.high, b.high)}; }
INLINE Ints multiply(Ints a, Ints b) { return {vmulq_s32(a.low, b.low), vmulq_s32(a.high, b.high)}; }
INLINE Floats to_floats(Ints v) { return {vcvtq_f32_s32(v.low), vcvtq_f32_s32(v.high)}; }

// Pairs of bf16: the first, or the second, of each.
INLINE Ints load_bits(const uint8_t* p) { return {vreinterpretq_s32_u8(vld1q_u8(p)), vreinterpretq_s32_u8(vld1q_u8(p + 16))}; }
INLINE Floats low_bf16(Ints v) { return {vreinterpretq_f32_s32(vshlq_n_s32(v.low, 16)), vreinterpretq_f32_s32(vshlq_n_s32(v.high, 16))}; }
INLINE Floats high_bf16(Ints v) {
  const int32x4_t mask = vdupq_n_s32(int32_t(0xffff0000));
  return {vreinterpretq_f32_s32(vandq_s32(v.low, mask)), vreinterpretq_f32_s32(vandq_s32(v.high, mask))};
}
// 32 whole numbers of at most 127 as bytes.
INLINE int16x8_t narrowed(Floats v) { return vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(v.low)), vqmovn_s32(vcvtnq_s32_f32(v.high))); }
INLINE void store_codes(int8_t* out, const Floats (&v)[4]) {
  for (int i = 0; i < 4; i++) vst1_s8(out + 8 * i, vqmovn_s16(narrowed(v[i])));
}
INLINE Bytes load_bytes(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16)}; }
INLINE Bytes low_nibbles(Bytes v) { return {vandq_u8(v.low, vdupq_n_u8(15)), vandq_u8(v.high, vdupq_n_u8(15))}; }
INLINE Bytes high_nibbles(Bytes v) { return {vshrq_n_u8(v.low, 4), vshrq_n_u8(v.high, 4)}; }
template <int FROM, int MASK> INLINE uint8x16_t high_bits(uint8x16_t plane) {
  if constexpr (FROM > 4) plane = vshrq_n_u8(plane, FROM - 4);
  if constexpr (FROM < 4) plane = vshlq_n_u8(plane, 4 - FROM);
  return vandq_u8(plane, vdupq_n_u8(MASK));
}
INLINE Bytes looked_up(const uint8_t* table, Bytes nibbles) { return {vqtbl1q_u8(vld1q_u8(table), nibbles.low), vqtbl1q_u8(vld1q_u8(table), nibbles.high)}; }
template <int FROM, int MASK> INLINE Bytes with_high_bits(Bytes nibbles, Bytes plane) {
  return {vorrq_u8(nibbles.low, high_bits<FROM, MASK>(plane.low)), vorrq_u8(nibbles.high, high_bits<FROM, MASK>(plane.high))};
}

// Codes as `dot` takes them: signed ones where nothing multiplies unsigned by signed, which only those of 8 bits are not yet.
template <int BITS> INLINE Bytes dot_codes(Bytes v) {
  if constexpr (BITS == 8 && !HAS_MIXED_DOT) return {veorq_u8(v.low, vdupq_n_u8(128)), veorq_u8(v.high, vdupq_n_u8(128))};
  return v;
}
// Adds the products of four codes by quad P of x in each lane.
template <int P> INLINE int32x4_t dot(int32x4_t acc, uint8x16_t codes, int8x16_t x) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  return vusdotq_laneq_s32(acc, codes, x, P);
#else
  return vdotq_laneq_s32(acc, vreinterpretq_s8_u8(codes), x, P);
#endif
}
template <int P> INLINE Ints dot(Ints acc, Bytes codes, int8x16_t x) { return {dot<P>(acc.low, codes.low, x), dot<P>(acc.high, codes.high, x)}; }

}  // namespace ISA
