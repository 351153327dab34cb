// Products of quantized activations with quantized weights, a group of 16 output rows at a time.
//
// For every 32 inputs: integer dot products, then one scaled addition in float32. Each output is added up over its
// blocks in the order of the inputs by the same operations whatever the number of rows, so that a row's result does not
// depend on the rows beside it, nor on the width of the vectors.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace ISA {

template <int V> struct Const { static constexpr int value = V; };
template <int BEGIN, int END, class F> INLINE void unroll(F&& f) {
  if constexpr (BEGIN < END) {
    f(Const<BEGIN>{});
    unroll<BEGIN + 1, END>(f);
  }
}

// Codes of quad P of 32 inputs; `half` picks the rows where a vector has less than 16.
template <Format F, int P> INLINE Bytes quad(const uint8_t* codes, int half) {
  constexpr int bits = layout(F).bits;
  codes += half * 2 * LANES * 2;
  if constexpr (bits == 8) return load_bytes(codes + 64 * P);
  constexpr int planes = bits == 5 ? 1 : bits == 6 ? 2 : 0;
  const Bytes line = load_bytes(codes + 64 * (planes + P / 2));
  const Bytes nibbles = P % 2 ? high_nibbles(line) : low_nibbles(line);
  if constexpr (bits == 5) return with_high_bits<P, 0x10>(nibbles, load_bytes(codes));
  if constexpr (bits == 6) return with_high_bits<2 * (P % 4), 0x30>(nibbles, load_bytes(codes + 64 * (P / 4)));
  return has_levels(F) ? looked_up(codes_of(F), nibbles) : nibbles;
}

// Scales of the rows of one half for block `sub` of a tile.
struct Scales {
  Floats scale, minimum;
  Ints first, second;  // q6_k: of 16 inputs each
  Floats low, high;    // nvfp4: likewise
};

template <Format F> INLINE Scales scales(const uint8_t* tile, int sub, int half) {
  Scales s{};
  const int at = half * LANES;
  s.scale = has_scales(F) ? broadcast(1) : F == Format::mxfp4 ? load_e8m0(tile + at) : load_halves(tile + 2 * at);
  if constexpr (F == Format::q4_1 || F == Format::q5_1) s.minimum = load_halves(tile + 32 + 2 * at);
  if constexpr (F == Format::u4) s.minimum = s.scale * (broadcast(0) - load_u8(tile + 32 + at));
  if constexpr (F == Format::q4_k || F == Format::q5_k) {
    s.minimum = load_halves(tile + 32 + 2 * at) * (broadcast(0) - load_u8(tile + 192 + 16 * sub + at));
    s.scale = s.scale * load_u8(tile + 64 + 16 * sub + at);
  }
  if constexpr (F == Format::iq4_xs) s.scale = s.scale * to_floats(load_i8(tile + 32 + 16 * sub + at));
  if constexpr (F == Format::q6_k) {
    s.first = load_i8(tile + 32 + 32 * sub + at);
    s.second = load_i8(tile + 48 + 32 * sub + at);
  }
  if constexpr (F == Format::nvfp4) {  // half of each, as codes are doubled
    s.low = load_e4m3(tile + at) * broadcast(128);
    s.high = load_e4m3(tile + 16 + at) * broadcast(128);
  }
  return s;
}

// What an integer sum starts at, so that codes count from their zero.
template <Format F> INLINE Ints start(int32_t negative_sum) {
  if constexpr (layout(F).zero_log2 < 0) return ints(0);
  return ints(int32_t(uint32_t(negative_sum) << (layout(F).zero_log2 < 0 ? 0 : layout(F).zero_log2)));
}

// The scales of the first or the last 16 inputs, where F splits.
template <Format F> INLINE Floats half_scale(const Scales& s, bool last) {
  if constexpr (F == Format::nvfp4) return last ? s.high : s.low;
  return to_floats(last ? s.second : s.first);
}

// The dot products of 32 inputs; where F splits, `first` and `second` are those of 16 each.
template <Format F> INLINE Floats joined(Ints first, Ints second, const Scales& s) {
  if constexpr (F == Format::nvfp4) return fma(to_floats(second), s.high, to_floats(first) * s.low);
  if constexpr (splits(F)) return to_floats(add(multiply(first, s.first), multiply(second, s.second)));
  return to_floats(first);
}

template <Format F> INLINE Floats add_block(Floats acc, Floats dots, const Scales& s, const RowBlock& x) {
  if constexpr (layout(F).minimum) acc = fma(s.minimum, broadcast(x.scaled_sum), acc);
  return fma(dots, s.scale * broadcast(x.scale), acc);
}

// The rows of a panel, from one of them on.
struct Panel {
  const int8_t* codes;
  const RowBlock* blocks;
  int stride;  // rows from one block of 32 inputs to the next

  const int8_t* x(int block, int row) const { return codes + (int64_t(block) * stride + row) * BLOCK; }
  const RowBlock& scale(int block, int row) const { return blocks[int64_t(block) * stride + row]; }
};

// Bytes of weights fetched ahead of their use: into L2, which has more places for misses under way, and from there into L1.
static constexpr int FAR_AHEAD = 16384, AHEAD = 2048;

INLINE void prefetch_ahead(const uint8_t* p) {
  __builtin_prefetch(p + FAR_AHEAD, 0, 2);
  if (!reads_by_group) __builtin_prefetch(p + AHEAD, 0, 3);
}

INLINE void prefetch_block(const uint8_t* p, int bytes) {
  for (int i = 0; i < bytes; i += 64) prefetch_ahead(p + i);
}

}  // namespace ISA

#if defined(__AMX_TILE__)
#include "product_amx.h"
#else
namespace ISA {
static void rest() {}
}
#endif
#if defined(KERNELS_AVX2) || defined(KERNELS_NEON)
#include "product_narrow.h"
#else
#include "product_wide.h"
#endif
#include "product_float.h"

namespace ISA {

// `count` rows, at most MOST, while the weights are read once.
template <Format F, int MOST>
INLINE void one_pass(const uint8_t* tiles, int inputs, const Panel& x, int m, int count, float* out) {
  if (count == MOST) return few_rows<F, MOST>(tiles, inputs, x, m, out);
  if constexpr (MOST > 1) one_pass<F, MOST - 1>(tiles, inputs, x, m, count, out);
}

template <Format F>
static void quantized_product(const Matrix& w, const Panel& x, int count, int group, int groups, float* out) {
  if (many_rows<F>(w, x, count, group, groups, out)) return;
  for (int g = 0; g < groups; g++) {
    int m = 0;
    for (int passes = (count + FEW_ROWS - 1) / FEW_ROWS; passes > 0; passes--) {
      const int taken = (count - m + passes - 1) / passes;
      one_pass<F, FEW_ROWS>(w.group(group + g), w.inputs, x, m, taken, out + g * ROWS);
      m += taken;
    }
  }
}

// By each row's own scale, where blocks have none.
static void multiply_by_scales(const Matrix& w, int count, int group, int groups, float* out) {
  for (int m = 0; m < count; m++, out += PANEL_COLUMNS)
    for (int i = 0; i < groups * ROWS; i += LANES) store(out + i, load(out + i) * load(w.scales_of(group) + i));
}

#if defined(__AVX512BF16__)

// As `product` has it, of weights that are unpacked with their scales.
static __attribute__((noinline)) void unpacked_product(const Matrix& w, const Activations& a, int row, int count, int group, int groups, float* out) {
  const auto take = [&](auto format) { in_bf16<Format(format.value)>(w, a, row, count, group, groups, out); };
  switch (w.format) {
    case Format::q4_0: return take(Const<int(Format::q4_0)>{});
    case Format::q4_1: return take(Const<int(Format::q4_1)>{});
    case Format::q5_0: return take(Const<int(Format::q5_0)>{});
    case Format::q5_1: return take(Const<int(Format::q5_1)>{});
    case Format::q8_0: return take(Const<int(Format::q8_0)>{});
    case Format::q4_k: return take(Const<int(Format::q4_k)>{});
    case Format::q5_k: return take(Const<int(Format::q5_k)>{});
    case Format::mxfp4: return take(Const<int(Format::mxfp4)>{});
    case Format::iq4_nl: return take(Const<int(Format::iq4_nl)>{});
    case Format::iq4_xs: return take(Const<int(Format::iq4_xs)>{});
    case Format::u4: return take(Const<int(Format::u4)>{});
    case Format::nvfp4:
      take(Const<int(Format::nvfp4)>{});
      return multiply_by_scales(w, count, group, groups, out);
    case Format::i8:
      take(Const<int(Format::i8)>{});
      return multiply_by_scales(w, count, group, groups, out);
    default: return take(Const<int(Format::q6_k)>{});
  }
}

#endif

static void product(const Matrix& w, const Activations& a, int row, int count, int group, int groups, float* out) {
#if defined(__AVX512BF16__)
  if (w.in_bf16) return unpacked_product(w, a, row, count, group, groups, out);
#endif
  if (w.format == Format::bf16) return bf16_product(w, a, row, count, group, groups, out);
  if (w.format == Format::f32) return float_product<Format::f32>(w, a, row, count, group, groups, out);
  if (w.format == Format::e4m3) return float_product<Format::e4m3>(w, a, row, count, group, groups, out);
  const int64_t first = int64_t(row / a.panel_rows) * (a.inputs / BLOCK) * a.panel_rows;
  const Panel x{a.codes + first * BLOCK, a.blocks + first, a.panel_rows};
  switch (w.format) {
    case Format::q4_0: return quantized_product<Format::q4_0>(w, x, count, group, groups, out);
    case Format::q4_1: return quantized_product<Format::q4_1>(w, x, count, group, groups, out);
    case Format::q5_0: return quantized_product<Format::q5_0>(w, x, count, group, groups, out);
    case Format::q5_1: return quantized_product<Format::q5_1>(w, x, count, group, groups, out);
    case Format::q8_0: return quantized_product<Format::q8_0>(w, x, count, group, groups, out);
    case Format::q4_k: return quantized_product<Format::q4_k>(w, x, count, group, groups, out);
    case Format::q5_k: return quantized_product<Format::q5_k>(w, x, count, group, groups, out);
    case Format::mxfp4: return quantized_product<Format::mxfp4>(w, x, count, group, groups, out);
    case Format::iq4_nl: return quantized_product<Format::iq4_nl>(w, x, count, group, groups, out);
    case Format::iq4_xs: return quantized_product<Format::iq4_xs>(w, x, count, group, groups, out);
    case Format::u4: return quantized_product<Format::u4>(w, x, count, group, groups, out);
    case Format::nvfp4:
      quantized_product<Format::nvfp4>(w, x, count, group, groups, out);
      return multiply_by_scales(w, count, group, groups, out);
    case Format::i8:
      quantized_product<Format::i8>(w, x, count, group, groups, out);
      return multiply_by_scales(w, count, group, groups, out);
    default: return quantized_product<Format::q6_k>(w, x, count, group, groups, out);
  }
}

}  // namespace ISA
