// Integer products of many rows with the matrix instructions of I8MM: two rows of weights by two of activations, eight
// inputs at a time. Each does the work of two dot products, once rows lie in pairs.
#pragma once

namespace ISA {

constexpr int MANY_ROWS = 16;  // from here on it pays to put rows in pairs
constexpr int TOGETHER_ROWS = 8;
constexpr int EIGHTS = BLOCK / 8;

// Eight rows of a half's codes by 32 inputs.
template <Format F> INLINE void pair_codes(const uint8_t* codes, int half, uint8x16_t (&out)[EIGHTS][4]) {
  unroll<0, EIGHTS>([&](auto i) __attribute__((always_inline)) {
    const Bytes a = quad<F, 2 * i.value>(codes, half), b = quad<F, 2 * i.value + 1>(codes, half);
    const auto zip = [&](uint8x16_t x, uint8x16_t y, uint8x16_t* pairs) {
      pairs[0] = vreinterpretq_u8_u32(vzip1q_u32(vreinterpretq_u32_u8(x), vreinterpretq_u32_u8(y)));
      pairs[1] = vreinterpretq_u8_u32(vzip2q_u32(vreinterpretq_u32_u8(x), vreinterpretq_u32_u8(y)));
    };
    zip(a.low, b.low, out[i.value]);
    zip(a.high, b.high, out[i.value] + 2);
  });
}

// The activations of one block; the last row is repeated up to a multiple of eight.
static void pair_rows(const Panel& x, int block, int count, int8x16_t (*out)[EIGHTS]) {
  for (int m = 0; m < (count + 7) / 8 * 8; m += 2, out++) {
    const int8_t *a = x.x(block, smaller(m, count - 1)), *b = x.x(block, smaller(m + 1, count - 1));
    for (int i = 0; i < 2; i++) {
      const int64x2_t u = vreinterpretq_s64_s8(vld1q_s8(a + 16 * i)), v = vreinterpretq_s64_s8(vld1q_s8(b + 16 * i));
      (*out)[2 * i] = vreinterpretq_s8_s64(vzip1q_s64(u, v));
      (*out)[2 * i + 1] = vreinterpretq_s8_s64(vzip2q_s64(u, v));
    }
  }
}

// dots [row][lane] over the inputs of eights [BEGIN, END).
template <int BEGIN, int END>
INLINE void multiply_pairs(const uint8x16_t (&codes)[EIGHTS][4], const int8x16_t (*x)[EIGHTS], int32_t (&dots)[TOGETHER_ROWS][LANES]) {
  int32x4_t sums[4][4];  // [rows of activations / 2][lanes / 2]: 2 by 2
#pragma GCC unroll 4
  for (int r = 0; r < 4; r++)
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) sums[r][c] = vdupq_n_s32(0);
#pragma GCC unroll 4
  for (int i = BEGIN; i < END; i++) {
    asm volatile("" : : "r"(codes) : "memory");  // else GCC keeps codes in registers, and has none for the sums
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++)
#pragma GCC unroll 4
      for (int c = 0; c < 4; c++) sums[r][c] = vusmmlaq_s32(sums[r][c], codes[i][c], x[r][i]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < 4; r++)
#pragma GCC unroll 2
    for (int c = 0; c < 4; c += 2) {
      vst1q_s32(dots[2 * r] + 2 * c, vuzp1q_s32(sums[r][c], sums[r][c + 1]));
      vst1q_s32(dots[2 * r + 1] + 2 * c, vuzp2q_s32(sums[r][c], sums[r][c + 1]));
    }
}

INLINE Ints load_ints(const int32_t* p) { return load_bits((const uint8_t*)p); }

// One block of eight output rows: their codes stay unpacked while all rows of activations pass; float sums live in L1.
template <Format F>
static void multiply_half(const uint8_t* tile, int sub, int half, const int8x16_t (*rows)[EIGHTS], const RowBlock* scale, int count, bool first, float* out) {
  constexpr Layout form = layout(F);
  uint8x16_t codes[EIGHTS][4];
  pair_codes<F>(tile + form.header + sub * form.codes, half, codes);
  const Scales s = scales<F>(tile, sub, half);
  for (int m = 0; m < count; m += TOGETHER_ROWS, rows += TOGETHER_ROWS / 2) {
    int32_t low[TOGETHER_ROWS][LANES], high[TOGETHER_ROWS][LANES];
    constexpr bool split = splits(F);
    multiply_pairs<0, split ? EIGHTS / 2 : EIGHTS>(codes, rows, low);
    if constexpr (split) multiply_pairs<EIGHTS / 2, EIGHTS>(codes, rows, high);
    for (int r = 0; r < smaller(TOGETHER_ROWS, count - m); r++, scale++, out += PANEL_COLUMNS) {
      const Ints sum = add(load_ints(low[r]), start<F>(split ? scale->negative_sum_16 : scale->negative_sum));
      Ints rest = sum;
      if constexpr (split) rest = add(load_ints(high[r]), start<F>(scale->negative_sum - scale->negative_sum_16));
      store(out, add_block<F>(first ? broadcast(0) : load(out), joined<F>(sum, rest, s), s, *scale));
    }
  }
}

template <Format F> static bool many_rows(const Matrix& w, const Panel& x, int count, int group, int groups, float* out) {
  if (count < MANY_ROWS) return false;
  constexpr Layout form = layout(F);
  int8x16_t rows[PANEL_ROWS / 2][EIGHTS];
  for (int b = 0; b < w.inputs / BLOCK; b++) {
    const int64_t at = int64_t(b / form.blocks()) * form.bytes();
    pair_rows(x, b, count, rows);
    for (int g = 0; g < groups; g++)
      for (int half = 0; half < HALVES; half++)
        multiply_half<F>(w.group(group + g) + at, b % form.blocks(), half, rows, &x.scale(b, 0), count, b == 0, out + g * ROWS + half * LANES);
  }
  return true;
}

}  // namespace ISA
