// Products with bf16 and f32 weights.
#pragma once

namespace ISA {

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

template <int R, int G> INLINE void bf16_rows(const Matrix& w, int group, const uint16_t* x, int stride, float* out) {
  const uint8_t *w0 = w.group(group), *w1 = w.group(group + G - 1);
  Floats acc[G][R];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    for (int g = 0; g < G; g++) acc[g][r] = broadcast(0);
  for (int i = 0; i < w.inputs; i += 2, w0 += 64, w1 += 64) {
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

template <int G> static void bf16_panel(const Matrix& w, const uint16_t* x, int stride, int count, int group, float* out) {
  int m = 0;
  for (; m + 8 <= count; m += 8) bf16_rows<8, G>(w, group, x + int64_t(m) * stride, stride, out + m * PANEL_COLUMNS);
  for (; m + 4 <= count; m += 4) bf16_rows<4, G>(w, group, x + int64_t(m) * stride, stride, out + m * PANEL_COLUMNS);
  for (; m + 2 <= count; m += 2) bf16_rows<2, G>(w, group, x + int64_t(m) * stride, stride, out + m * PANEL_COLUMNS);
  for (; m < count; m++) bf16_rows<1, G>(w, group, x + int64_t(m) * stride, stride, out + m * PANEL_COLUMNS);
}

static void bf16_product(const Matrix& w, const Activations& a, int row, int count, int group, int groups, float* out) {
  const uint16_t* x = a.halves + int64_t(row) * a.inputs;
  if (groups == 2) return bf16_panel<2>(w, x, a.inputs, count, group, out);
  bf16_panel<1>(w, x, a.inputs, count, group, out);
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
