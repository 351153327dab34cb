// Products with bf16 and f32 weights.
#pragma once

namespace ISA {

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

template <int R, int G, bool MORE> INLINE void bf16_rows(const uint8_t* w0, const uint8_t* w1, int inputs, const uint16_t* x, int stride, float* out) {
  Floats acc[G][R];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    for (int g = 0; g < G; g++) acc[g][r] = MORE ? load(out + r * PANEL_COLUMNS + g * ROWS) : broadcast(0);
  for (int i = 0; i < inputs; i += 2, w0 += 64, w1 += 64) {
    prefetch_ahead(w0);
    if (G == 2) prefetch_ahead(w1);
    const Bytes v0 = load_bytes(w0), v1 = load_bytes(w1);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Bytes pair = broadcast_quad((const int8_t*)(x + int64_t(r) * stride + i));
      acc[0][r] = dot_bf16(acc[0][r], v0, pair);
      if (G == 2) acc[G - 1][r] = dot_bf16(acc[G - 1][r], v1, pair);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    for (int g = 0; g < G; g++) store(out + r * PANEL_COLUMNS + g * ROWS, acc[g][r]);
}

INLINE int rows_in_tiles(int count) { return count; }

template <int G, bool MORE>
static void bf16_panel(const uint8_t* w0, const uint8_t* w1, int inputs, const uint16_t* x, int stride, int count, float* out) {
  int m = 0;
  for (; m + 8 <= count; m += 8) bf16_rows<8, G, MORE>(w0, w1, inputs, x + int64_t(m) * stride, stride, out + m * PANEL_COLUMNS);
  for (; m + 4 <= count; m += 4) bf16_rows<4, G, MORE>(w0, w1, inputs, x + int64_t(m) * stride, stride, out + m * PANEL_COLUMNS);
  for (; m + 2 <= count; m += 2) bf16_rows<2, G, MORE>(w0, w1, inputs, x + int64_t(m) * stride, stride, out + m * PANEL_COLUMNS);
  for (; m < count; m++) bf16_rows<1, G, MORE>(w0, w1, inputs, x + int64_t(m) * stride, stride, out + m * PANEL_COLUMNS);
}

// Blocks of weights of one group or two, which lie at `weights`, by those of the activations from block `first` on; MORE adds them to
// what `out` holds.
template <bool MORE>
INLINE void multiply_bf16(const uint8_t* const (&weights)[2], int blocks, const Activations& a, int first, int row, int count, int groups, float* out) {
  const uint16_t* x = a.halves + int64_t(row) * a.inputs + first * BLOCK;
  if (groups == 2) return bf16_panel<2, MORE>(weights[0], weights[1], blocks * BLOCK, x, a.inputs, count, out);
  bf16_panel<1, MORE>(weights[0], weights[1], blocks * BLOCK, x, a.inputs, count, out);
}

#endif

#if defined(__AVX512BF16__)

static void bf16_product(const Matrix& w, const Activations& a, int row, int count, int group, int groups, float* out) {
  multiply_bf16<false>({w.group(group), w.group(group + groups - 1)}, w.inputs / BLOCK, a, 0, row, count, groups, out);
}

// A block of 32 inputs of one group, as a tile of bf16 has it: rounded once, as the numbers before are exact.
template <Format F> INLINE void unpack_to_bf16(const uint8_t* tile, int sub, uint8_t* out) {
  constexpr Layout form = layout(F);
  const uint8_t* codes = tile + form.header + sub * form.codes;
  const Scales s = scales<F>(tile, sub, 0);
  prefetch_block(codes, form.codes + (form.blocks() > 1 ? 0 : form.header));
  unroll<0, 8>([&](auto p) __attribute__((always_inline)) {
    const Floats scale = splits(F) ? s.scale * half_scale<F>(s, p.value >= 4) : s.scale;
    const Floats least = form.minimum ? s.minimum : scale * broadcast(-float(1 << (form.zero_log2 < 0 ? 0 : form.zero_log2)));
    const Bytes quads = quad<F, p.value>(codes, 0);
    const auto number = [&](int i) __attribute__((always_inline)) {
      return fma(scale, to_floats(_mm512_and_si512(_mm512_srli_epi32(quads, 8 * i), ints(255))), least);
    };
    store_bytes(out + 128 * p.value, paired(number(0), number(1)));
    store_bytes(out + 128 * p.value + 64, paired(number(2), number(3)));
  });
}

constexpr int UNPACKED_BLOCKS = 8;  // of two groups, which lie in L1 while all rows pass

template <Format F> static void in_bf16(const Matrix& w, const Activations& a, int row, int count, int group, int groups, float* out) {
  constexpr Layout form = layout(F);
  alignas(64) uint8_t tiles[2][UNPACKED_BLOCKS][layout(Format::bf16).bytes()];
  float whole[PANEL_ROWS * PANEL_COLUMNS];  // of more rows, as those that fill no tile must not be added twice
  const int rows = rows_in_tiles(count);
  float* const sums = rows == count ? out : whole;
  for (int first = 0; first < w.inputs / BLOCK; first += UNPACKED_BLOCKS) {
    const int blocks = smaller(UNPACKED_BLOCKS, w.inputs / BLOCK - first);
    for (int g = 0; g < groups; g++)
      for (int b = 0; b < blocks; b++)
        unpack_to_bf16<F>(w.group(group + g) + int64_t((first + b) / form.blocks()) * form.bytes(), (first + b) % form.blocks(), tiles[g][b]);
    if (first) multiply_bf16<true>({tiles[0][0], tiles[1][0]}, blocks, a, first, row, rows, groups, sums);
    else multiply_bf16<false>({tiles[0][0], tiles[1][0]}, blocks, a, first, row, rows, groups, sums);
  }
  if (rows != count) memcpy(out, whole, size_t(count) * PANEL_COLUMNS * sizeof(float));
}

#endif

// What a line of 64 bytes holds of 16 rows, widened: one input (f32), two (bf16, as pairs) or four (e4m3, as 1/256 of it).
INLINE void widen(const uint8_t* w, int half, Floats (&v)[1]) { v[0] = load((const float*)w + half * LANES); }

INLINE void widen(const uint8_t* w, int half, Floats (&v)[2]) {
  const Ints pairs = load_bits(w + half * LANES * 4);
  v[0] = low_bf16(pairs);
  v[1] = high_bf16(pairs);
}

INLINE void widen(const uint8_t* w, int half, Floats (&v)[4]) {
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) v[j] = load_e4m3(w + j * ROWS + half * LANES);
}

// `scales` [16] of a run of inputs, whose sums are added to what `out` holds; null where weights have none.
template <Format F, int R>
static void float_rows(const uint8_t* w, int inputs, const float* x, int stride, const float* scales, bool first, float* out) {
  constexpr int inputs_a_line = F == Format::e4m3 ? 4 : F == Format::bf16 ? 2 : 1, chains = F == Format::e4m3 ? 2 : 1;
  Floats acc[chains][HALVES][R];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    for (int h = 0; h < HALVES; h++)
      for (int c = 0; c < chains; c++) acc[c][h][r] = broadcast(0);
  for (int i = 0; i < inputs; i += inputs_a_line, w += 64) {
    prefetch_ahead(w);
    for (int h = 0; h < HALVES; h++) {
      Floats v[inputs_a_line];
      widen(w, h, v);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int j = 0; j < inputs_a_line; j++) {
          Floats& sum = acc[j % chains][h][r];
          sum = fma(v[j], broadcast(x[int64_t(r) * stride + i + j]), sum);
        }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    for (int h = 0; h < HALVES; h++) {
      float* to = out + r * PANEL_COLUMNS + h * LANES;
      Floats sum = acc[0][h][r];
      if constexpr (F == Format::e4m3) sum = fma(sum + acc[chains - 1][h][r], load(scales + h * LANES) * broadcast(256), first ? broadcast(0) : load(to));
      store(to, sum);
    }
}

constexpr int FLOAT_ROWS = 8 / HALVES;  // sums enough to hide the latency of additions, and registers for them

template <Format F> static void float_product(const Matrix& w, const Activations& a, int row, int count, int group, int groups, float* out) {
  const float* x = a.values + int64_t(row) * a.inputs;
  const int runs = has_scales(F) ? w.runs : 1, inputs = w.inputs / runs;
  for (int g = 0; g < groups; g++, out += ROWS) {
    const uint8_t* tiles = w.group(group + g);
    for (int run = 0; run < runs; run++, tiles += inputs / BLOCK * layout(F).bytes()) {
      const float *scales = has_scales(F) ? w.scales_of(group + g) + run * ROWS : nullptr, *part = x + run * inputs;
      int m = 0;
      const auto take = [&](auto rows) {
        for (; m + rows.value <= count; m += rows.value)
          float_rows<F, rows.value>(tiles, inputs, part + int64_t(m) * a.inputs, a.inputs, scales, run == 0, out + m * PANEL_COLUMNS);
      };
      take(Const<FLOAT_ROWS>{});
      if constexpr (FLOAT_ROWS > 4) take(Const<4>{});
      take(Const<1>{});
    }
  }
}

#if !defined(__AVX512BF16__)

static void bf16_product(const Matrix& w, const Activations& a, int row, int count, int group, int groups, float* out) {
  float_product<Format::bf16>(w, a, row, count, group, groups, out);
}

#endif

}  // namespace ISA
