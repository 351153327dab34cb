// Integer products with 16 lanes: the weights of 32 inputs by 16 rows lie in eight vectors while activations pass.
#pragma once

namespace ISA {

#if defined(KERNELS_AVX512)
constexpr int FEW_ROWS = 8;
#else
constexpr int FEW_ROWS = 1;
#endif
constexpr int MANY_ROWS = 12;  // from here on it pays to unpack weights once for all rows of a panel

template <Format F> INLINE void load_quads(const uint8_t* codes, Bytes (&w)[8]) {
  unroll<0, 8>([&](auto p) __attribute__((always_inline)) { w[p.value] = quad<F, p.value>(codes, 0); });
}

// CHAINS: how many dot products run beside each other; two hide their latency where there are few rows.
template <Format F, int CHAINS> INLINE Ints dots(const Bytes (&w)[8], const Scales& s, const int8_t* x, const RowBlock& scale) {
  constexpr bool split = F == Format::q6_k;
  Ints first = start<F>(split ? scale.negative_sum_16 : scale.negative_sum);
  Ints second = split ? start<F>(scale.negative_sum - scale.negative_sum_16) : ints(0);
#pragma GCC unroll 4
  for (int p = 0; p < 4; p++) first = dot(first, w[p], broadcast_quad(x + 4 * p));
#pragma GCC unroll 4
  for (int p = 4; p < 8; p++) {
    Ints& sum = split || CHAINS == 2 ? second : first;
    sum = dot(sum, w[p], broadcast_quad(x + 4 * p));
  }
  if constexpr (split) return add(multiply(first, s.first), multiply(second, s.second));
  return CHAINS == 2 ? add(first, second) : first;
}

template <Format F, int R> static void few_rows(const uint8_t* tile, int inputs, const Panel& x, int m, float* out) {
  constexpr Layout form = layout(F);
  Floats acc[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) acc[r] = broadcast(0);
  for (int b = 0; b < inputs / BLOCK; tile += form.bytes()) {
    const uint8_t* codes = tile + form.header;
    if constexpr (form.blocks() > 1) prefetch_block(tile, form.header);
    for (int sub = 0; sub < form.blocks(); sub++, b++, codes += form.codes) {
      prefetch_block(codes, form.codes + (form.blocks() > 1 ? 0 : form.header));
      Bytes w[8];
      load_quads<F>(codes, w);
      const Scales s = scales<F>(tile, sub, 0);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const RowBlock& scale = x.scale(b, m + r);
        acc[r] = add_block<F>(acc[r], dots<F, R <= 2 ? 2 : 1>(w, s, x.x(b, m + r), scale), s, scale);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) store(out + (m + r) * PANEL_COLUMNS, acc[r]);
}

#if defined(KERNELS_AVX512)

// Adds one block of a row's products to its sums of two groups. All is read before anything is written, which could be
// the same memory for all that the compiler knows, and both groups take an input while it is in a register.
template <Format F>
INLINE void add_row(const Bytes (&w)[2][8], const Scales (&s)[2], const int8_t* x, const RowBlock& scale, bool first, float* sums) {
  constexpr bool split = F == Format::q6_k;
  const Ints low = start<F>(split ? scale.negative_sum_16 : scale.negative_sum);
  const Ints high = split ? start<F>(scale.negative_sum - scale.negative_sum_16) : ints(0);
  Ints dots[2][2] = {{low, high}, {low, high}};  // [group][half]: two chains hide the latency of products
#pragma GCC unroll 8
  for (int p = 0; p < 8; p++) {
    const Bytes v = broadcast_quad(x + 4 * p);
    dots[0][p / 4] = dot(dots[0][p / 4], w[0][p], v);
    dots[1][p / 4] = dot(dots[1][p / 4], w[1][p], v);
  }
  Floats acc[2];
#pragma GCC unroll 2
  for (int g = 0; g < 2; g++) {
    const Ints sum = split ? add(multiply(dots[g][0], s[g].first), multiply(dots[g][1], s[g].second)) : add(dots[g][0], dots[g][1]);
    acc[g] = add_block<F>(first ? broadcast(0) : load(sums + g * ROWS), sum, s[g], scale);
  }
  store(sums, acc[0]);
  store(sums + ROWS, acc[1]);
}

// 32 output rows at a time: the weights of one block sit in 16 registers while all rows pass; their sums live in L1.
template <Format F> static bool many_rows(const Matrix& w, const Panel& x, int count, int group, int groups, float* out) {
  if (count < MANY_ROWS) return false;
  constexpr Layout form = layout(F);
  const uint8_t* tiles[2] = {w.group(group), w.group(group + groups - 1)};
  for (int b = 0; b < w.inputs / BLOCK; tiles[0] += form.bytes(), tiles[1] += form.bytes()) {
    for (int sub = 0; sub < form.blocks(); sub++, b++) {
      Bytes quads[2][8];
      Scales s[2];
#pragma GCC unroll 2
      for (int g = 0; g < 2; g++) {
        const uint8_t* codes = tiles[g] + form.header + sub * form.codes;
        prefetch_block(codes, form.codes + (form.blocks() > 1 ? 0 : form.header));
        load_quads<F>(codes, quads[g]);
#pragma GCC unroll 8
        for (int p = 0; p < 8; p++) asm volatile("" : "+v"(quads[g][p]));  // kept unpacked, in registers
        s[g] = scales<F>(tiles[g], sub, 0);
      }
      for (int m = 0; m < count; m++) add_row<F>(quads, s, x.x(b, m), x.scale(b, m), b == 0, out + m * PANEL_COLUMNS);
    }
  }
  return true;
}

#else

template <Format F> static bool many_rows(const Matrix&, const Panel&, int, int, int, float*) { return false; }

#endif

}  // namespace ISA
