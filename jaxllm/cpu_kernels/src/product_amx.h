// Products with AMX's tiles of 16 rows: one of activations by one of 16 outputs' weights, which lie in memory as it takes them.
// A thread's tiles have a shape only while one call runs.
#pragma once
#include <immintrin.h>

namespace ISA {

constexpr int TILE_ROWS = 16;

// Registers 0 to 3 are sums, of rows m + 16 (i / 2) by group i % 2; 4 and 5 activations; 6 and 7 weights.
class Tiles {
 public:
  // Of `rows` rows, by steps of `bytes` of each row's activations; 0 rows take no tiles, and no time.
  Tiles(int rows, int bytes) : shaped_(rows) {
    if (!shaped_) return;
    struct alignas(64) Shapes {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    for (int i = 0; i < 8; i++) {
      shapes.row_bytes[i] = uint16_t(i == 4 || i == 5 ? bytes : 64);
      shapes.rows[i] = uint8_t(i < 6 ? rows : bytes / 4);
    }
    asm volatile("" ::"r"(&shapes) : "memory");  // GCC believes that the next line reads 8 bytes of it
    _tile_loadconfig(&shapes);
  }
  ~Tiles() {
    if (shaped_) _tile_release();
  }
  Tiles(const Tiles&) = delete;

 private:
  bool shaped_;
};

// What was written to memory is there: the intrinsics do not say that they read it.
INLINE void before_tiles_are_read() { asm volatile("" ::: "memory"); }

// Adds one block of T times 16 rows' products to their sums of two groups.
template <Format F, int T, class QUADS>
INLINE void add_tiles(const QUADS& w, const Scales (&s)[2], const Panel& x, int block, int row, float* sums) {
  constexpr bool split = F == Format::q6_k;  // 16 inputs a step, as each have scales of their own
  constexpr int steps = split ? 2 : 1;
  alignas(64) uint8_t dots[steps][T][2][TILE_ROWS][64];
  before_tiles_are_read();
#pragma GCC unroll 2
  for (int i = 0; i < steps; i++) {
    const int8_t* v = x.x(block, row) + i * BLOCK / steps;
    _tile_loadd(6, w[i * 4][0], sizeof w[0]);
    _tile_loadd(7, w[i * 4][1], sizeof w[0]);
    _tile_loadd(4, v, BLOCK);
    _tile_zero(0);
    _tile_zero(1);
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
    if constexpr (T == 2) {
      _tile_loadd(5, v + TILE_ROWS * BLOCK, BLOCK);
      _tile_zero(2);
      _tile_zero(3);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
      _tile_stored(2, dots[i][T - 1][0], 64);
      _tile_stored(3, dots[i][T - 1][1], 64);
    }
    _tile_stored(0, dots[i][0][0], 64);
    _tile_stored(1, dots[i][0][1], 64);
  }
  for (int r = 0; r < T * TILE_ROWS; r++, sums += PANEL_COLUMNS) {
    const RowBlock& scale = x.scale(block, row + r);
    const Ints first = start<F>(split ? scale.negative_sum_16 : scale.negative_sum);
#pragma GCC unroll 2
    for (int g = 0; g < 2; g++) {
      const auto dots_of = [&](int i) { return load_bytes(dots[i][r / TILE_ROWS][g][r % TILE_ROWS]); };
      Ints sum = add(dots_of(0), first);
      if constexpr (split) {
        const Ints second = add(dots_of(1), start<F>(scale.negative_sum - scale.negative_sum_16));
        sum = add(multiply(sum, s[g].first), multiply(second, s[g].second));
      }
      store(sums + g * ROWS, add_block<F>(load(sums + g * ROWS), sum, s[g], scale));
    }
  }
}

// T tiles of rows of bf16, [.][stride], by two groups.
template <int T> INLINE void bf16_tiles(const uint8_t* w0, const uint8_t* w1, int inputs, const uint16_t* x, int stride, float* out) {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (T == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int i = 0; i < inputs; i += BLOCK, w0 += 2 * ROWS * BLOCK, w1 += 2 * ROWS * BLOCK) {
    prefetch_block(w0, 2 * ROWS * BLOCK);
    prefetch_block(w1, 2 * ROWS * BLOCK);
    _tile_loadd(6, w0, 64);
    _tile_loadd(7, w1, 64);
    _tile_loadd(4, x + i, 2 * stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (T == 2) {
      _tile_loadd(5, x + int64_t(TILE_ROWS) * stride + i, 2 * stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out, 4 * PANEL_COLUMNS);
  _tile_stored(1, out + ROWS, 4 * PANEL_COLUMNS);
  if constexpr (T == 2) {
    _tile_stored(2, out + TILE_ROWS * PANEL_COLUMNS, 4 * PANEL_COLUMNS);
    _tile_stored(3, out + TILE_ROWS * PANEL_COLUMNS + ROWS, 4 * PANEL_COLUMNS);
  }
}

// One group that is left counts as both.
static void bf16_product(const Matrix& w, const Activations& a, int row, int count, int group, int groups, float* out) {
  const uint8_t *w0 = w.group(group), *w1 = w.group(group + groups - 1);
  const uint16_t* x = a.halves + int64_t(row) * a.inputs;
  before_tiles_are_read();
  int m = 0;
  if (count >= TILE_ROWS) {
    const Tiles shaped(TILE_ROWS, 2 * BLOCK);
    for (; m + 2 * TILE_ROWS <= count; m += 2 * TILE_ROWS) bf16_tiles<2>(w0, w1, w.inputs, x + int64_t(m) * a.inputs, a.inputs, out + m * PANEL_COLUMNS);
    for (; m + TILE_ROWS <= count; m += TILE_ROWS) bf16_tiles<1>(w0, w1, w.inputs, x + int64_t(m) * a.inputs, a.inputs, out + m * PANEL_COLUMNS);
  }
  if (m == count) return;
  const Tiles shaped(count - m, 2 * BLOCK);
  bf16_tiles<1>(w0, w1, w.inputs, x + int64_t(m) * a.inputs, a.inputs, out + m * PANEL_COLUMNS);
}

}  // namespace ISA
