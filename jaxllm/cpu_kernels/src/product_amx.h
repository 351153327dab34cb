// Products with AMX's tiles of 16 rows by 64 bytes: activations by 16 outputs' weights, which lie in memory as a tile takes them.
#pragma once
#include <immintrin.h>

namespace ISA {

constexpr int TILE_ROWS = 16;

// The shape that this thread's tiles have: registers 0 to 3 are sums of `rows` rows, 4 and 5 take `bytes` of each of those rows, and
// 6 and 7 as many bytes of 16 columns. Shaping takes hundreds of cycles, so a shape stays until another is wanted or the thread rests;
// a system may have to save what is in tiles that have one.
static thread_local int shaped_rows = 0, shaped_bytes = 0;

// What was written to memory is there: the intrinsics do not say that they read it.
INLINE void before_tiles_are_read() { asm volatile("" ::: "memory"); }

INLINE void shape_tiles(int rows, int bytes) {
  if (rows == shaped_rows && bytes == shaped_bytes) return;
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
  shaped_rows = rows, shaped_bytes = bytes;
}

static void rest() {
  if (shaped_rows) _tile_release();
  shaped_rows = shaped_bytes = 0;
}

// 16 rows of a tile in memory, `stride` bytes apart.
struct TileAt { const void* first; int64_t stride; };

// Sums of 16 rows or TALL, 32, by 16 columns or WIDE, 32: registers 0 and 1 are the first rows, 2 and 3 the others.
template <bool TALL, bool WIDE> INLINE void zero_sums() {
  _tile_zero(0);
  if constexpr (WIDE) _tile_zero(1);
  if constexpr (TALL) _tile_zero(2);
  if constexpr (TALL && WIDE) _tile_zero(3);
}

// Adds 32 inputs, bf16 in pairs: of rows, and of columns [16 pairs][columns].
template <bool TALL, bool WIDE> INLINE void add_tiles(TileAt rows, TileAt more_rows, TileAt columns, TileAt more_columns) {
  _tile_loadd(4, rows.first, rows.stride);
  _tile_loadd(6, columns.first, columns.stride);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (WIDE) {
    _tile_loadd(7, more_columns.first, more_columns.stride);
    _tile_dpbf16ps(1, 4, 7);
  }
  if constexpr (TALL) {
    _tile_loadd(5, more_rows.first, more_rows.stride);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (WIDE) _tile_dpbf16ps(3, 5, 7);
  }
}

template <bool TALL, bool WIDE> INLINE void load_sums(const float* first, const float* more, int stride) {
  _tile_loadd(0, first, 4 * stride);
  if constexpr (WIDE) _tile_loadd(1, first + 16, 4 * stride);
  if constexpr (TALL) _tile_loadd(2, more, 4 * stride);
  if constexpr (TALL && WIDE) _tile_loadd(3, more + 16, 4 * stride);
}

template <bool TALL, bool WIDE> INLINE void store_sums(float* first, float* more, int stride) {
  _tile_stored(0, first, 4 * stride);
  if constexpr (WIDE) _tile_stored(1, first + 16, 4 * stride);
  if constexpr (TALL) _tile_stored(2, more, 4 * stride);
  if constexpr (TALL && WIDE) _tile_stored(3, more + 16, 4 * stride);
}

// Calls f(row, more rows, column, tall, wide) for all sums of `rows` by `columns`, a multiple of 16. From 16 rows on, those that fill
// no tile are taken once more with rows before them, as a second shape would cost more; they come to the same.
template <class F> INLINE void over_tiles(int rows, int columns, F&& f) {
  for (int at = 0; at < rows; at += 2 * TILE_ROWS) {
    const int last = larger(0, rows - TILE_ROWS), row = smaller(at, last), more = smaller(at + TILE_ROWS, last);
    const bool tall = at + TILE_ROWS < rows;
    int column = 0;
    for (; column + 32 <= columns; column += 32) {
      if (tall) f(row, more, column, Const<true>{}, Const<true>{});
      else f(row, more, column, Const<false>{}, Const<true>{});
    }
    if (column == columns) continue;
    if (tall) f(row, more, column, Const<true>{}, Const<false>{});
    else f(row, more, column, Const<false>{}, Const<false>{});
  }
}

// As many rows as whole tiles have, unless they are few.
INLINE int rows_in_tiles(int count) { return count < TILE_ROWS ? count : (count + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS; }

// Blocks of weights of one group or two, which lie at `weights`, by those of the activations from block `first` on; MORE adds them to
// what `out` holds, and takes rows_in_tiles.
template <bool MORE>
static void multiply_bf16(const uint8_t* const (&weights)[2], int blocks, const Activations& a, int first, int row, int count, int groups, float* out) {
  shape_tiles(smaller(count, TILE_ROWS), 2 * BLOCK);
  before_tiles_are_read();
  over_tiles(count, groups * ROWS, [&](int m, int more, int column, auto tall, auto wide) __attribute__((always_inline)) {
    constexpr int bytes = layout(Format::bf16).bytes();
    const uint8_t *w0 = weights[column / ROWS], *w1 = weights[1];
    const uint16_t *x = a.halves + a.place(row + m, first) * BLOCK, *more_x = a.halves + a.place(row + more, first) * BLOCK;
    float *sums = out + m * PANEL_COLUMNS + column, *more_sums = out + more * PANEL_COLUMNS + column;
    if (MORE) load_sums<tall.value, wide.value>(sums, more_sums, PANEL_COLUMNS);
    else zero_sums<tall.value, wide.value>();
    for (int b = 0; b < blocks; b++, w0 += bytes, w1 += bytes, x += a.panel_rows * BLOCK, more_x += a.panel_rows * BLOCK) {
      prefetch_block(w0, bytes);
      if (wide.value) prefetch_block(w1, bytes);
      add_tiles<tall.value, wide.value>({x, 2 * BLOCK}, {more_x, 2 * BLOCK}, {w0, 64}, {w1, 64});
    }
    store_sums<tall.value, wide.value>(sums, more_sums, PANEL_COLUMNS);
  });
}

// One block of 32 inputs of two groups, unpacked for all rows of a panel.
struct alignas(64) Unpacked {
  uint8_t codes[2][8][64];  // signed, less their zero, where the format has one
  float scale[2][ROWS], minimum[2][ROWS];
  float first[2][ROWS], second[2][ROWS];  // scales of 16 inputs each, where the format splits
};

constexpr int CHUNK = 4;             // blocks whose dot products lie in L1
constexpr int IN_REGISTERS = 8;      // rows whose sums do while a chunk is added
constexpr int FEWEST_IN_TILES = 12;  // rows, below which vectors are faster

// Two steps a block, where each 16 inputs have scales of their own.
template <Format F> constexpr int steps_of = splits(F) ? 2 : 1;
template <Format F> struct alignas(64) Dots { int32_t at[steps_of<F>][TILE_ROWS][2][ROWS]; };

// Integer sums start at the bits of this float, so that their bits are those of it plus the sum: within 2^22 of it floats are whole
// numbers. Subtracting it is cheaper beside tiles than a conversion.
constexpr float WHOLE_NUMBERS = 12582912.0f;
struct alignas(64) Line {
  float at[ROWS];
  constexpr explicit Line(float x) : at() {
    for (int i = 0; i < ROWS; i++) at[i] = x;
  }
};
static constexpr Line START(WHOLE_NUMBERS);

template <Format F> INLINE void unpack_block(const uint8_t* const (&groups)[2], int block, Unpacked& to) {
  constexpr Layout form = layout(F);
#pragma GCC unroll 2
  for (int g = 0; g < 2; g++) {
    const int sub = block % form.blocks();
    const uint8_t *tile = groups[g] + int64_t(block / form.blocks()) * form.bytes(), *codes = tile + form.header + sub * form.codes;
    if (form.blocks() > 1 && sub == 0) prefetch_block(tile, form.header);
    prefetch_block(codes, form.codes + (form.blocks() > 1 ? 0 : form.header));
    unroll<0, 8>([&](auto p) __attribute__((always_inline)) {
      Bytes v = quad<F, p.value>(codes, 0);
      if constexpr (form.zero_log2 >= 0) v = _mm512_sub_epi8(v, _mm512_set1_epi8(char(1 << form.zero_log2)));
      store_bytes(to.codes[g][p.value], v);
    });
    const Scales s = scales<F>(tile, sub, 0);
    store(to.scale[g], s.scale);
    if constexpr (form.minimum) store(to.minimum[g], s.minimum);
    if constexpr (steps_of<F> == 2) store(to.first[g], half_scale<F>(s, false)), store(to.second[g], half_scale<F>(s, true));
  }
}

// 16 rows of activations, one block of each, by two groups.
template <Format F> INLINE void multiply_block(const Unpacked& w, const int8_t* x, Dots<F>& dots) {
#pragma GCC unroll 2
  for (int i = 0; i < steps_of<F>; i++) {
    _tile_loadd(4, x + i * BLOCK / 2, BLOCK);
    _tile_loadd(6, w.codes[0][4 * i], 64);
    _tile_loadd(7, w.codes[1][4 * i], 64);
    _tile_loadd(0, &START, 0);
    _tile_loadd(1, &START, 0);
    if constexpr (layout(F).zero_log2 >= 0) {
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
    } else {
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 4, 7);
    }
    _tile_stored(0, dots.at[i][0][0], sizeof dots.at[i][0]);
    _tile_stored(1, dots.at[i][0][1], sizeof dots.at[i][0]);
  }
}

// Adds one block's products of IN_REGISTERS rows to their sums, as add_block does; its products of a dot by a scale of q6_k are whole
// numbers below 2^24, so that floats hold them.
template <Format F> INLINE void add_dots(const Unpacked& w, const Dots<F>& dots, int row, const RowBlock* x, Floats (&acc)[IN_REGISTERS][2]) {
  const Floats whole = broadcast(WHOLE_NUMBERS);
#pragma GCC unroll 8
  for (int r = 0; r < IN_REGISTERS; r++)
#pragma GCC unroll 2
    for (int g = 0; g < 2; g++) {
      const auto dot = [&](int step) { return load((const float*)dots.at[step][row + r][g]) - whole; };
      Floats sum = dot(0);
      if constexpr (steps_of<F> == 2) sum = fma(dot(1), load(w.second[g]), sum * load(w.first[g]));
      if constexpr (layout(F).minimum) acc[r][g] = fma(load(w.minimum[g]), broadcast(x[r].scaled_sum), acc[r][g]);
      acc[r][g] = fma(sum, load(w.scale[g]) * broadcast(x[r].scale), acc[r][g]);
    }
}

// `count` rows by two groups, chunk by chunk of their blocks. Sums of 16 rows are added up in two halves; beside the second, tiles
// multiply the next 16 rows, or the first ones of the next chunk: each block in the place of one whose dots have been read.
template <Format F> static void tile_product(const uint8_t* const (&groups)[2], int inputs, const Panel& x, int count, float* out) {
  Unpacked chunks[2][CHUNK];
  Dots<F> dots[CHUNK];
  const int blocks = inputs / BLOCK;
  const auto end_of = [&](int first) { return smaller(first + CHUNK, blocks); };
  const auto unpacked = [&](int block) -> Unpacked& { return chunks[block / CHUNK % 2][block % CHUNK]; };
  const auto unpack_chunk = [&](int first) {
    for (int b = first; b < end_of(first); b++) unpack_block<F>(groups, b, unpacked(b));
    before_tiles_are_read();
  };
  const auto multiply = [&](int block, int row) { multiply_block<F>(unpacked(block), x.x(block, row), dots[block % CHUNK]); };
  shape_tiles(TILE_ROWS, BLOCK / steps_of<F>);
  unpack_chunk(0);
  for (int b = 0; b < end_of(0); b++) multiply(b, 0);
  for (int first = 0; first < blocks; first += CHUNK)
    for (int row = 0; row < count; row += TILE_ROWS) {
      const bool last = row + TILE_ROWS >= count;
      const int step = last ? CHUNK : 0, next_row = last ? 0 : row + TILE_ROWS;
      if (last) unpack_chunk(first + CHUNK);
      for (int half = 0; half < TILE_ROWS; half += IN_REGISTERS) {
        const int m = row + half;
        float* const sums = out + m * PANEL_COLUMNS;
        Floats acc[IN_REGISTERS][2] = {};
#pragma GCC unroll 8
        for (int r = 0; r < IN_REGISTERS; r++)
          if (first && m + r < count) acc[r][0] = load(sums + r * PANEL_COLUMNS), acc[r][1] = load(sums + r * PANEL_COLUMNS + ROWS);
        for (int b = first; b < end_of(first); b++) {
          add_dots<F>(unpacked(b), dots[b % CHUNK], half, &x.scale(b, m), acc);
          before_tiles_are_read();
          if (half && b + step < blocks) multiply(b + step, next_row);
        }
#pragma GCC unroll 8
        for (int r = 0; r < IN_REGISTERS; r++)
          if (m + r < count) store(sums + r * PANEL_COLUMNS, acc[r][0]), store(sums + r * PANEL_COLUMNS + ROWS, acc[r][1]);
      }
    }
}

}  // namespace ISA
