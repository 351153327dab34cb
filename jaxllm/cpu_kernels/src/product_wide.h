// Integer products with 16 lanes. One row takes a group at a time, many rows two, so that each quad of activations is read once
// for both; between them it depends on the processor.
#pragma once

namespace ISA {

#if defined(KERNELS_AVX512)
constexpr int FEW_ROWS = 8;
#else
constexpr int FEW_ROWS = 1;
#endif

template <Format F> INLINE void load_quads(const uint8_t* codes, Bytes (&w)[8]) {
  unroll<0, 8>([&](auto p) __attribute__((always_inline)) { w[p.value] = quad<F, p.value>(codes, 0); });
}

// In two chains, which hide each other's latency.
template <Format F> INLINE Floats dots(const Bytes (&w)[8], const Scales& s, const int8_t* x, const RowBlock& scale) {
  constexpr bool split = splits(F);
  Ints first = start<F>(split ? scale.negative_sum_16 : scale.negative_sum);
  Ints second = split ? start<F>(scale.negative_sum - scale.negative_sum_16) : ints(0);
#pragma GCC unroll 4
  for (int p = 0; p < 4; p++) {
    first = dot(first, w[p], broadcast_quad(x + 4 * p));
    second = dot(second, w[p + 4], broadcast_quad(x + 4 * p + 16));
  }
  return joined<F>(split ? first : add(first, second), second, s);
}

// One group's codes are unpacked once for R rows, whose sums stay in registers.
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
      const int8_t* v = x.x(b, m);
      const RowBlock* scale = &x.scale(b, m);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) acc[r] = add_block<F>(acc[r], dots<F>(w, s, v + r * BLOCK, scale[r]), s, scale[r]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) store(out + (m + r) * PANEL_COLUMNS, acc[r]);
}

#if defined(KERNELS_AVX512)

constexpr int MANY_ROWS = 8;  // from here on it pays to unpack weights once for all rows of a panel
constexpr int MOST_BY_GROUP = 24;  // up to here it pays more to read weights in one stream, where a processor `reads_by_group`

// R rows by two groups, whose sums stay in registers.
template <Format F, int R> static void add_up(const uint8_t* const (&groups)[2], int inputs, const Panel& x, int m, float* out) {
  constexpr Layout form = layout(F);
  constexpr bool split = splits(F);
  const uint8_t* tiles[2] = {groups[0], groups[1]};
  Floats acc[2][R];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) acc[0][r] = acc[1][r] = broadcast(0);
  for (int b = 0; b < inputs / BLOCK; tiles[0] += form.bytes(), tiles[1] += form.bytes()) {
    for (int sub = 0; sub < form.blocks(); sub++, b++) {
      const uint8_t* codes[2];
      Scales s[2];
#pragma GCC unroll 2
      for (int g = 0; g < 2; g++) {
        codes[g] = tiles[g] + form.header + sub * form.codes;
        if (form.blocks() > 1 && sub == 0) prefetch_block(tiles[g], form.header);
        prefetch_block(codes[g], form.codes + (form.blocks() > 1 ? 0 : form.header));
        s[g] = scales<F>(tiles[g], sub, 0);
      }
      const int8_t* inputs_of_rows = x.x(b, m);
      const RowBlock* scale = &x.scale(b, m);
      Ints first[2][R], second[2][R];  // second: of the other 16 inputs, where they have a scale of their own
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        first[0][r] = first[1][r] = start<F>(split ? scale[r].negative_sum_16 : scale[r].negative_sum);
        if constexpr (split) second[0][r] = second[1][r] = start<F>(scale[r].negative_sum - scale[r].negative_sum_16);
      }
      unroll<0, 8>([&](auto p) __attribute__((always_inline)) {
        const Bytes w0 = quad<F, p.value>(codes[0], 0), w1 = quad<F, p.value>(codes[1], 0);
        auto& sums = split && p.value >= 4 ? second : first;
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          const Bytes v = broadcast_quad(inputs_of_rows + r * BLOCK + 4 * p.value);
          sums[0][r] = dot(sums[0][r], w0, v);
          sums[1][r] = dot(sums[1][r], w1, v);
        }
      });
#pragma GCC unroll 4
      for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int g = 0; g < 2; g++) {
          const Floats sum = joined<F>(first[g][r], (split ? second : first)[g][r], s[g]);
          acc[g][r] = add_block<F>(acc[g][r], sum, s[g], scale[r]);
        }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
    for (int g = 0; g < 2; g++) store(out + (m + r) * PANEL_COLUMNS + g * ROWS, acc[g][r]);
}

// The codes of 32 inputs by two groups, a vector for each four inputs of a group.
typedef uint8_t Quads[8][2][64];

// Adds one block of R rows' products to their sums of two groups. Their dot products are as many chains as hide the latency
// of one, and each vector of weights and each quad of activations is read once for all that take it.
template <Format F, int R>
INLINE void add_rows(const Quads& w, const Scales (&s)[2], const Panel& x, int block, int row, float* sums) {
  constexpr bool split = splits(F);
  Ints dots[R][2][split ? 2 : 1];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    const RowBlock& scale = x.scale(block, row + r);
    dots[r][0][0] = dots[r][1][0] = start<F>(split ? scale.negative_sum_16 : scale.negative_sum);
    if constexpr (split) dots[r][0][1] = dots[r][1][1] = start<F>(scale.negative_sum - scale.negative_sum_16);
  }
  const int8_t* inputs = x.x(block, row);
#pragma GCC unroll 8
  for (int p = 0; p < 8; p++) {
    const Bytes low = load_bytes(w[p][0]), high = load_bytes(w[p][1]);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Bytes v = broadcast_quad(inputs + r * BLOCK + 4 * p);
      Ints &a = dots[r][0][split ? p / 4 : 0], &b = dots[r][1][split ? p / 4 : 0];
      a = dot(a, low, v);
      b = dot(b, high, v);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++, sums += PANEL_COLUMNS) {
    Floats acc[2];
#pragma GCC unroll 2
    for (int g = 0; g < 2; g++) {
      const Floats sum = joined<F>(dots[r][g][0], dots[r][g][split], s[g]);
      acc[g] = add_block<F>(load(sums + g * ROWS), sum, s[g], x.scale(block, row + r));
    }
    store(sums, acc[0]);
    store(sums + ROWS, acc[1]);
  }
}

// Two groups at a time; one that is left counts as both. From MANY_ROWS on the weights of one block lie unpacked in L1 while
// all rows pass, and so do the rows' sums.
template <Format F> static bool many_rows(const Matrix& w, const Panel& x, int count, int group, int groups, float* out) {
#if defined(__AMX_INT8__)
  if (count >= FEWEST_IN_TILES) return tile_product<F>({w.group(group), w.group(group + groups - 1)}, w.inputs, x, count, out), true;
#endif
  if (count == 1 || (reads_by_group && count <= MOST_BY_GROUP)) return false;
  const uint8_t* tiles[2] = {w.group(group), w.group(group + groups - 1)};
  if (count < MANY_ROWS) {
    int m = 0;
    for (; m + 4 <= count; m += 4) add_up<F, 4>(tiles, w.inputs, x, m, out);
    if (count - m == 3) add_up<F, 3>(tiles, w.inputs, x, m, out);  // the rest in one pass: each reads all weights
    if (count - m == 2) add_up<F, 2>(tiles, w.inputs, x, m, out);
    if (count - m == 1) add_up<F, 1>(tiles, w.inputs, x, m, out);
    return true;
  }
  constexpr Layout form = layout(F);
  constexpr int AT_ONCE = splits(F) ? 4 : 8;
  memset(out, 0, size_t(count) * PANEL_COLUMNS * sizeof(float));
  for (int b = 0; b < w.inputs / BLOCK; tiles[0] += form.bytes(), tiles[1] += form.bytes()) {
    for (int sub = 0; sub < form.blocks(); sub++, b++) {
      alignas(64) Quads quads;
      Scales s[2];
#pragma GCC unroll 2
      for (int g = 0; g < 2; g++) {
        const uint8_t* codes = tiles[g] + form.header + sub * form.codes;
        prefetch_block(codes, form.codes + (form.blocks() > 1 ? 0 : form.header));
        unroll<0, 8>([&](auto p) __attribute__((always_inline)) { store_bytes(quads[p.value][g], quad<F, p.value>(codes, 0)); });
        s[g] = scales<F>(tiles[g], sub, 0);
      }
      int m = 0;
      for (; m + AT_ONCE <= count; m += AT_ONCE) add_rows<F, AT_ONCE>(quads, s, x, b, m, out + m * PANEL_COLUMNS);
      if constexpr (AT_ONCE > 4)
        for (; m + 4 <= count; m += 4) add_rows<F, 4>(quads, s, x, b, m, out + m * PANEL_COLUMNS);
      for (; m < count; m++) add_rows<F, 1>(quads, s, x, b, m, out + m * PANEL_COLUMNS);
    }
  }
  return true;
}

#else

template <Format F> static bool many_rows(const Matrix&, const Panel&, int, int, int, float*) { return false; }

#endif

}  // namespace ISA
