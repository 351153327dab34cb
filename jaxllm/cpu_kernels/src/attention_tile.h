// Attention of a tile of query vectors, as prompts have.
//
// Query vectors lie in the lanes: `queries` is [channels][vectors], and a key's channel is a scalar that all lanes take.
// So keys and values are read as they lie in their pages, maxima and sums need no shuffles, and each lane has its own
// visible range. With BF16 instructions an element is a pair: of channels in scores, of keys in weighted values.
#pragma once

namespace ISA {

// Scores of R keys: out[r][columns] = sum over i of rows[r][i] * queries[i], for C columns of lanes.
template <int R, int C, class E>
static void score_keys(const E* const* rows, const E* queries, int width, int steps, float* out) {
  Floats acc[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) acc[r][c] = broadcast(0);
  for (int i = 0; i < steps; i++, queries += width) {
    decltype(column(queries)) lanes[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) lanes[c] = column(queries + c * LANES);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const auto scalar = spread(rows[r] + i);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) acc[r][c] = accumulate(acc[r][c], lanes[c], scalar);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(out + r * width + c * LANES, acc[r][c]);
}

// Scores [n][width] of n keys (a multiple of 4) whose rows of `steps` elements are given.
template <int C, class E>
static void scores(const E* const* rows, int n, const E* queries, int width, int steps, float* out) {
  for (int j = 0; j < n; j += 4) score_keys<4, C>(rows + j, queries, width, steps, out + j * width);
}

// The transpose of that: sums [channels][width] over n weights [n][width] of elements [n][channels].
template <int R, int C, class E>
static void weigh_channels(const E* const* rows, int channel, const E* weights, int width, int n, const float* factor, float* sums) {
  Floats acc[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) acc[r][c] = load(sums + r * width + c * LANES) * load(factor + c * LANES);
  for (int j = 0; j < n; j++, weights += width) {
    decltype(column(weights)) lanes[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) lanes[c] = column(weights + c * LANES);
    const E* value = rows[j] + channel;
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const auto scalar = spread(value + r);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) acc[r][c] = accumulate(acc[r][c], lanes[c], scalar);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(sums + r * width + c * LANES, acc[r][c]);
}

template <int C, class E>
static void weigh(const E* const* rows, int n, int channels, const E* weights, int width, const float* factor, float* sums) {
  int d = 0;
  for (; d + 4 <= channels; d += 4) weigh_channels<4, C>(rows, d, weights, width, n, factor, sums + d * width);
  for (; d < channels; d++) weigh_channels<1, C>(rows, d, weights, width, n, factor, sums + d * width);
}

// Everything that one unit works with.
struct State {
  int width;                     // vectors, rounded up to whole columns
  float *lowest, *highest;       // [width] positions that a vector sees
  float *slope;                  // [width] of its head
  float *greatest, *total;       // [width] the segment's softmax so far, with logits of base two
  float *factor;                 // [width] what this block shrinks sums by
  const float *key_scales, *value_scales;  // [KEY_BLOCK] of this block's codes; null for floats
  float *scores;                 // [KEY_BLOCK][width]
  float *sums;                   // [value_dim][width] of the segment; in tiles [width][value_dim]
};

// What `sum` makes of lanes.
INLINE Floats sum_of(Floats (&lanes)[LANES]) {
  for (int n = LANES / 2; n; n /= 2)
    for (int l = 0; l < n; l++) lanes[l] = lanes[l] + lanes[n + l];
  return lanes[0];
}

// Scores become weights; `greatest`, `total` and `factor` follow. A vector gets the same bits from a block that is
// masked for others only, so that both ways compute alike.
static void soften(const Attention& a, State& s, int key, int count, int padded, bool masked) {
  const bool altering = alters(a);
  float scale[KEY_BLOCK], to_logits[KEY_BLOCK];  // of scores, so that they are logits, and of base two
  for (int j = 0; j < count; j++) {
    scale[j] = s.key_scales ? a.scale * s.key_scales[j] : a.scale;
    to_logits[j] = LOG2_E * (altering ? 1 : scale[j]);
  }
  for (int at = 0; at < s.width; at += LANES) {
    float* scores = s.scores + at;
    Floats most = load(s.greatest + at);
    if (!masked && !altering) {
      for (int j = 0; j < count; j++) most = maximum(most, load(scores + j * s.width) * broadcast(to_logits[j]));
    } else {
      for (int j = 0; j < count; j++) {
        Floats x = load(scores + j * s.width);
        const Floats position = broadcast(float(key + j));
        if (altering) x = altered(a, x * broadcast(scale[j]), load(s.slope + at), position - load(s.highest + at));
        x = where_greater(position, load(s.highest + at), broadcast(NEGATIVE), x);
        x = where_greater(load(s.lowest + at), position, broadcast(NEGATIVE), x);
        most = maximum(most, x * broadcast(to_logits[j]));
        store(scores + j * s.width, x);
      }
    }
    const Floats factor = power_of_two(load(s.greatest + at) - most);
    Floats lanes[LANES] = {};
    for (int j = 0; j < count; j++) {
      const Floats x = load(scores + j * s.width);
      Floats weight = power_of_two(fma(x, broadcast(to_logits[j]), negated(most)));
      if (masked) weight = where_greater(broadcast(MASKED), x, broadcast(0), weight);
      lanes[j % LANES] = lanes[j % LANES] + weight;
      store(scores + j * s.width, s.value_scales ? weight * broadcast(s.value_scales[j]) : weight);
    }
    for (int j = count; j < padded; j++) store(scores + j * s.width, broadcast(0));
    store(s.greatest + at, most);
    store(s.total + at, load(s.total + at) * factor + sum_of(lanes));
    store(s.factor + at, factor);
  }
}

// Floats of 16-bit rows, into `out` [count][size].
static void widen_rows(const float** rows, int count, int size, float* out) {
  for (int j = 0; j < (count + 3) / 4 * 4; j++, out += size) {
    widen_bf16((const uint16_t*)rows[j], size, out);
    rows[j] = out;
  }
}

// One block of keys in float32.
static void visit_floats(const Attention& a, const AttentionUnit& u, State& s, const float* queries, int key, int count, bool masked, float* room) {
  Rows<float> keys, values;
  if (is_coded(a.format)) {
    expand_block(a, u, 0, key, count, room, keys, values);
    s.key_scales = keys.scales, s.value_scales = values.scales;
  } else if (a.format == PageFormat::bf16) {
    find_rows(a, u, 0, a.keys, a.key_row, key, count, (const uint16_t**)keys.at);
    find_rows(a, u, 0, a.values, a.value_row, key, count, (const uint16_t**)values.at);
    widen_rows(keys.at, count, a.dim, room);
    widen_rows(values.at, count, a.value_dim, room + KEY_BLOCK * a.dim);
  } else {
    find_rows(a, u, 0, a.keys, a.key_row, key, count, keys.at);
    find_rows(a, u, 0, a.values, a.value_row, key, count, values.at);
  }
  const int padded = (count + 3) / 4 * 4;
  over_columns(s.width, [&](int at, auto columns) {
    scores<columns.value>(keys.at, padded, queries + at, s.width, a.dim, s.scores + at);
  });
  soften(a, s, key, count, padded, masked);
  over_columns(s.width, [&](int at, auto columns) {
    weigh<columns.value>(values.at, count, a.value_dim, (const float*)s.scores + at, s.width, s.factor + at, s.sums + at);
  });
}

#if defined(__AVX512BF16__)

// Channels of two rows as pairs.
static void pair_rows(const uint16_t* even, const uint16_t* odd, int count, uint32_t* out) {
  int d = 0;
  for (; d + 2 * LANES <= count; d += 2 * LANES) {
    const Bytes a = load_bytes((const uint8_t*)(even + d)), b = load_bytes((const uint8_t*)(odd + d));
    store_bytes((uint8_t*)(out + d), in_turns<false>(a, b));
    store_bytes((uint8_t*)(out + d + LANES), in_turns<true>(a, b));
  }
  for (; d < count; d++) out[d] = even[d] | uint32_t(odd[d]) << 16;
}

// Keys and values of a block as bf16; gives the room that is left.
static uint32_t* find_block(const Attention& a, const AttentionUnit& u, State& s, int key, int count, Rows<uint16_t>& keys, Rows<uint16_t>& values, uint32_t* room) {
  if (is_coded(a.format)) {
    expand_block(a, u, 0, key, count, (uint16_t*)room, keys, values);
    s.key_scales = keys.scales, s.value_scales = values.scales;
    room += KEY_BLOCK / 2 * (a.dim + a.value_dim);
  } else {
    find_rows(a, u, 0, a.keys, a.key_row, key, count, keys.at);
    find_rows(a, u, 0, a.values, a.value_row, key, count, values.at);
  }
  return room;
}

// Pairs of weights [pairs][width], and of values [pairs][value_dim].
static void pair_up(const Attention& a, const State& s, const Rows<uint16_t>& values, int pairs, uint32_t* weights, uint32_t* of_values) {
  for (int j = 0; j < pairs; j++, of_values += a.value_dim) {
    for (int at = 0; at < s.width; at += LANES) {
      const float* p = s.scores + 2 * j * s.width + at;
      store_bytes((uint8_t*)(weights + j * s.width + at), paired(load(p), load(p + s.width)));
    }
    pair_rows(values.at[2 * j], values.at[2 * j + 1], a.value_dim, of_values);
  }
}

// One block of keys with pairs of bf16; `room` takes pairs of weights and of values.
static void visit_pairs(const Attention& a, const AttentionUnit& u, State& s, const uint32_t* queries, int key, int count, bool masked, uint32_t* room) {
  Rows<uint16_t> keys, values;
  uint32_t* const weights = find_block(a, u, s, key, count, keys, values, room);
  uint32_t* const of_values = weights + KEY_BLOCK / 2 * MAX_VECTORS;
  const int padded = (count + 3) / 4 * 4, pairs = padded / 2;
  over_columns(s.width, [&](int at, auto columns) {
    scores<columns.value>((const uint32_t**)keys.at, padded, queries + at, s.width, a.dim / 2, s.scores + at);
  });
  soften(a, s, key, count, padded, masked);
  pair_up(a, s, values, pairs, weights, of_values);
  const uint32_t* rows[KEY_BLOCK / 2];
  for (int j = 0; j < pairs; j++) rows[j] = of_values + j * a.value_dim;
  over_columns(s.width, [&](int at, auto columns) {
    weigh<columns.value>(rows, pairs, a.value_dim, (const uint32_t*)weights + at, s.width, s.factor + at, s.sums + at);
  });
}

#endif

#if defined(__AMX_BF16__)

// Scores [n][width] of `n` keys, a multiple of 16, whose rows tiles load as they lie in a page, or from a copy in `room`.
static void score_tiles(const Attention& a, const uint16_t* const* rows, int n, const uint32_t* queries, int width, uint16_t* room, float* out) {
  TileAt keys[KEY_BLOCK / TILE_ROWS];
  for (int j = 0; j < n; j += TILE_ROWS, rows += TILE_ROWS, room += TILE_ROWS * a.dim) {
    bool apart = false;
    const int64_t stride = rows[1] - rows[0];
    for (int r = 2; r < TILE_ROWS; r++) apart |= rows[r] - rows[r - 1] != stride;
    for (int r = 0; r < TILE_ROWS && apart; r++) memcpy(room + r * a.dim, rows[r], size_t(a.dim) * 2);
    keys[j / TILE_ROWS] = apart ? TileAt{room, 2 * a.dim} : TileAt{rows[0], 2 * stride};
  }
  before_tiles_are_read();
  over_tiles(n, width, [&](int j, int more, int v, auto tall, auto wide) __attribute__((always_inline)) {
    const TileAt &first = keys[j / TILE_ROWS], &second = keys[more / TILE_ROWS];
    const uint32_t* q = queries + v;
    zero_sums<tall.value, wide.value>();
    for (int d = 0; d < a.dim; d += 32, q += 16 * width)
      add_tiles<tall.value, wide.value>({(const uint16_t*)first.first + d, first.stride}, {(const uint16_t*)second.first + d, second.stride}, {q, 4 * width}, {q + 16, 4 * width});
    store_sums<tall.value, wide.value>(out + j * width + v, out + more * width + v, width);
  });
}

// One block of keys in tiles; sums are [width][value_dim]: rows of weights by pairs of values.
static void visit_tiles(const Attention& a, const AttentionUnit& u, State& s, const uint32_t* queries, int key, int count, bool masked, uint32_t* room) {
  constexpr int row = KEY_BLOCK / 2;  // pairs of a vector's weights
  Rows<uint16_t> keys, values;
  room = find_block(a, u, s, key, count, keys, values, room);
  const int padded = (count + KEYS_TOGETHER - 1) / KEYS_TOGETHER * KEYS_TOGETHER;
  shape_tiles(TILE_ROWS, 64);
  score_tiles(a, keys.at, (count + 15) / 16 * 16, queries, s.width, (uint16_t*)room, s.scores);
  soften(a, s, key, count, padded, masked);
  uint32_t *in_lanes = room, *weights = in_lanes + row * MAX_VECTORS, *of_values = weights + row * MAX_VECTORS;
  pair_up(a, s, values, padded / 2, in_lanes, of_values);
  for (int v = 0; v < s.width; v += 16)
    for (int j = 0; j < padded / 2; j += 16)
      transpose_16([&](int i) { return (const float*)in_lanes + (j + i) * s.width + v; }, (float*)weights + v * row + j, row);
  for (int v = 0; v < s.width; v++)
    for (int d = v * a.value_dim; d < (v + 1) * a.value_dim && s.factor[v] != 1; d += LANES) store(s.sums + d, load(s.sums + d) * broadcast(s.factor[v]));
  before_tiles_are_read();
  over_tiles(s.width, a.value_dim, [&](int v, int more, int d, auto tall, auto wide) __attribute__((always_inline)) {
    float *sums = s.sums + v * a.value_dim + d, *more_sums = s.sums + more * a.value_dim + d;
    load_sums<tall.value, wide.value>(sums, more_sums, a.value_dim);
    for (int j = 0; j < padded / 2; j += 16) {
      const uint32_t* pairs = of_values + j * a.value_dim + d;
      add_tiles<tall.value, wide.value>({weights + v * row + j, 4 * row}, {weights + more * row + j, 4 * row}, {pairs, 4 * a.value_dim}, {pairs + 16, 4 * a.value_dim});
    }
    store_sums<tall.value, wide.value>(sums, more_sums, a.value_dim);
  });
}

#endif

// out[c * out_stride + r] = from[r * stride + c]
static void transpose(const float* from, int64_t stride, int rows, int columns, float* out, int64_t out_stride) {
  int r = 0;
  for (; r + 16 <= rows; r += 16) {
    int c = 0;
    for (; c + 16 <= columns; c += 16) transpose_16([&](int i) { return from + (r + i) * stride + c; }, out + c * out_stride + r, out_stride);
    for (; c < columns; c++)
      for (int i = r; i < r + 16; i++) out[c * out_stride + i] = from[i * stride + c];
  }
  for (; r < rows; r++)
    for (int c = 0; c < columns; c++) out[c * out_stride + r] = from[r * stride + c];
}

// Queries into lanes: [dim][width] floats, or [dim / 2][width] pairs. `room` takes them as rows before.
static void transpose_queries(const Attention& a, const Vectors& v, int count, int width, bool pairs, float* room, float* queries) {
  const int elements = pairs ? a.dim / 2 : a.dim;
  memset(queries, 0, size_t(elements) * width * 4);
  for (int r = 0; r < count; r++) copy_query(a, v.index[r], pairs, room + r * elements);
  transpose(room, elements, count, elements, queries, width);
}

// A segment's softmax and sums become part of those of the segments before, `greatest`, `total` and `sums`.
static void join_segment(const State& s, int value_dim, bool tiles, float* greatest, float* total, float* sums) {
  float before[MAX_VECTORS], more[MAX_VECTORS];
  for (int at = 0; at < s.width; at += LANES) {
    Floats most = load(greatest + at), all = load(total + at);
    const Shares by = join_softmax(most, all, load(s.greatest + at), load(s.total + at));
    store(greatest + at, most), store(total + at, all);
    if (tiles) store(before + at, by.before), store(more + at, by.more);
    else for (int64_t i = at; i < int64_t(value_dim) * s.width; i += s.width) store(sums + i, join_sums(load(sums + i), load(s.sums + i), by));
  }
  for (int v = 0; tiles && v < s.width; v++) {
    const Shares by{broadcast(before[v]), broadcast(more[v])};
    for (int d = v * value_dim; d < (v + 1) * value_dim; d += LANES) store(sums + d, join_sums(load(sums + d), load(s.sums + d), by));
  }
}

static void attend_tile(const Attention& a, const AttentionUnit& u, Room room, float* out, float* softmax) {
  const bool pairs = HAS_BF16 && a.format != PageFormat::f32 && a.dim % 2 == 0, tiles = fits_tiles(a);
  const int width = (u.count + LANES - 1) / LANES * LANES;
  Vectors v;
  describe(a, u, width, room, v);
  State s{width, v.lowest, v.highest, v.slope, v.greatest, v.total, nullptr, nullptr, nullptr, nullptr, nullptr};
  s.factor = room.take<float>(width);
  s.scores = room.take<float>(KEY_BLOCK * width);
  s.sums = room.take<float>(int64_t(a.value_dim) * width);
  float *queries = room.take<float>(int64_t(a.dim) * width), *sums = room.take<float>(int64_t(a.value_dim) * width);
  float *greatest = room.take<float>(width), *total = room.take<float>(width);
  const size_t bytes = size_t(a.value_dim) * width * sizeof(float);
  const int begin = larger(u.key_begin, v.low), end = smaller(u.key_end, v.high + 1);
  const bool joins = (u.sinks && a.sinks) || begin / SEGMENT != (end - 1) / SEGMENT;  // else the one segment is all
  memset(s.sums, 0, bytes);
  if (joins) {
    memset(sums, 0, bytes);
    start_with_sinks(a, u, width, greatest, total);
  } else {
    sums = s.sums, greatest = s.greatest, total = s.total;
  }
  transpose_queries(a, v, u.count, width, pairs, (float*)room.at, queries);
  for (int key = begin / KEY_BLOCK * KEY_BLOCK; key < end; key += KEY_BLOCK) {
    const int from = larger(key, aligned_key(u.key_begin)), count = smaller(key + KEY_BLOCK, end) - from;
    const bool masked = u.count < width || from < v.low_by_all || from + count - 1 > v.high_by_all;
#if defined(__AMX_BF16__)
    if (tiles) visit_tiles(a, u, s, (const uint32_t*)queries, from, count, masked, (uint32_t*)room.at);
    else
#endif
#if defined(__AVX512BF16__)
    if (pairs) visit_pairs(a, u, s, (const uint32_t*)queries, from, count, masked, (uint32_t*)room.at);
    else
#endif
    visit_floats(a, u, s, queries, from, count, masked, (float*)room.at);
    if (!joins || ((key + KEY_BLOCK) % SEGMENT && key + KEY_BLOCK < end)) continue;
    join_segment(s, a.value_dim, tiles, greatest, total, sums);
    for (int r = 0; r < width; r++) s.greatest[r] = NEGATIVE, s.total[r] = 0;
    memset(s.sums, 0, bytes);
  }
  if (tiles) memcpy(out, sums, size_t(u.count) * a.value_dim * sizeof(float));
  else transpose(sums, width, a.value_dim, u.count, out, a.value_dim);
  for (int r = 0; r < u.count; r++) softmax[2 * r] = greatest[r], softmax[2 * r + 1] = total[r];
}

}  // namespace ISA
