// Attention of a few query vectors, as decode rows have: keys lie in the lanes of scores, channels in those of sums. So keys are
// turned first, since the channels of each are to be added up in their order.
#pragma once

namespace ISA {

constexpr int FEW_VECTORS = 16;

// Elements of a row of keys or values: floats, bits of bf16 that are widened, or pairs of bf16 where they are multiplied.
// A `chunk` of a value's channels is `parts` vectors; sums lie in chunks, from which `arranged` takes them. Of keys it is what
// lies in 32 bits that goes together: `Step`, by which queries lie too.
struct Plain {
  typedef float Stored;
  typedef float Step;
  static constexpr int parts = 1, chunk = LANES, channels = 1;  // of a step
  static constexpr bool coded = false, paired = false, chained = false;
};
struct Widened : Plain {
  typedef uint16_t Stored;
  typedef uint32_t Step;
  static constexpr int channels = 2;
};
struct Split : Widened { static constexpr int parts = 2, chunk = 2 * LANES; };  // even channels before odd ones: an operation each widens them
template <int PART> INLINE Floats row_part(const float* p, Plain) { return load(p); }
template <int PART> INLINE Floats row_part(const uint16_t* p, Widened) { return load_bf16(p); }
template <int PART> INLINE Floats row_part(const uint16_t* p, Split) {
  const Ints bits = load_bits((const uint8_t*)p);
  return PART ? high_bf16(bits) : low_bf16(bits);
}
INLINE void arranged(const float* sums, int dim, float* out, Plain) { memcpy(out, sums, size_t(dim) * 4); }
INLINE void arranged(const float* sums, int dim, float* out, Split) {
  for (; dim > 0; dim -= 2 * LANES, sums += 2 * LANES, out += 2 * LANES)
    for (int i = 0; i < LANES; i++) out[2 * i] = sums[i], out[2 * i + 1] = sums[LANES + i];
}
#if defined(__AVX512BF16__)
struct Paired : Plain {
  typedef uint16_t Stored;
  typedef uint32_t Step;
  static constexpr int chunk = 2 * LANES, channels = 2;
  static constexpr bool paired = true;
};
#endif

#if defined(__AMX_BF16__)
struct Chained : Split { static constexpr bool chained = true; };
#endif

// Codes in the pages, expanded to what E takes.
template <class E> struct Coded : E { static constexpr bool coded = true; };

// Fetches the keys and values of a block, of all heads of a unit, as they lie in memory; some at a time, as there are few
// places for misses that are under way.
class Ahead {
 public:
  Ahead(const Attention& a, const AttentionUnit& u, int key, int count)
      : a_(a), u_(u), key_(key), end_(key + count), left_(count > 0 ? 2 : 0), at_key_(key) {}

  inline void some(int lines) {
    for (; lines > 0; lines--, at_ += 64) {
      if (at_ >= stop_ && !go_on()) return;
      __builtin_prefetch(at_, 0, 2);  // to L2: L1 has fewer places
    }
  }

  inline void rest() { some(0x7fffffff); }

 private:
  // On to the next head's rows of the page, the next page, or from keys to values. Seldom, and out of line: inlined, it takes
  // registers from the loops that call `some`.
  __attribute__((noinline)) bool go_on() {
    if (!left_) return false;
    const int page = at_key_ / a_.page_size, row = at_key_ % a_.page_size, rows = smaller(a_.page_size - row, end_ - at_key_);
    const int64_t size = (left_ == 2 ? a_.key_row : a_.value_row) * element_bytes(a_.format);
    const int64_t first = (int64_t(a_.page_table[int64_t(u_.sequence) * a_.columns + page]) * a_.kv_heads + u_.kv_head + head_) * a_.page_size + row;
    at_ = (const char*)(left_ == 2 ? a_.keys : a_.values) + first * size;
    stop_ = at_ + rows * size;
    if (++head_ < u_.kv_heads) return true;
    head_ = 0, at_key_ += rows;
    if (at_key_ == end_) at_key_ = key_, left_--;
    return true;
  }

  const Attention& a_;
  const AttentionUnit& u_;
  const int key_, end_;
  int left_;  // 2: keys and values; 1: values
  int at_key_, head_ = 0;
  const char *at_ = nullptr, *stop_ = nullptr;
};

constexpr int WEIGHED_TOGETHER = 4;                          // query vectors that take a row while it is in registers
constexpr int WEIGHED_CHANNELS = (LANES == 16 ? 4 : 2) * LANES;  // as registers allow
constexpr int WEIGHED = 8;                                   // values between which some of the next are fetched

// Steps of `padded` keys into the lanes: columns [steps][KEY_BLOCK].
template <class T>
static void turn_keys(const T* const* rows, int padded, int steps, float* columns, Ahead& ahead, int share) {
  for (int j = 0; j < padded; j += 16, columns += 16, rows += 16) {
    const auto row = [&](int r, int step) { return (const float*)rows[r] + step; };
    int at = 0;
    for (; at + 16 <= steps; at += 16) {
      ahead.some(share);
      transpose_16([&](int r) { return row(r, at); }, columns + at * KEY_BLOCK, KEY_BLOCK);
    }
    if (at == steps) continue;
    if (steps >= 16) transpose_16([&](int r) { return row(r, steps - 16); }, columns + (steps - 16) * KEY_BLOCK, KEY_BLOCK);
    for (; steps < 16 && at < steps; at++)
      for (int r = 0; r < 16; r++) memcpy(columns + at * KEY_BLOCK + r, row(r, at), sizeof(float));
  }
}

// What a step of keys adds to the scores of C columns of lanes and R queries, whose steps are given.
template <int R, int C> INLINE void add_step(const float* keys, const float* const (&queries)[R], int step, Floats (&acc)[R][C], Plain) {
  Floats lanes[C];
#pragma GCC unroll 4
  for (int c = 0; c < C; c++) lanes[c] = load(keys + c * LANES);
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    const Floats channel = broadcast(queries[r][step]);
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) acc[r][c] = fma(lanes[c], channel, acc[r][c]);
  }
}
template <int R, int C> INLINE void add_step(const float* keys, const float* const (&queries)[R], int step, Floats (&acc)[R][C], Widened) {
#pragma GCC unroll 2
  for (int odd = 0; odd < 2; odd++) {
    Floats lanes[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      const Ints pairs = load_bits((const uint8_t*)(keys + c * LANES));
      lanes[c] = odd ? high_bf16(pairs) : low_bf16(pairs);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const Floats channel = broadcast(queries[r][2 * step + odd]);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) acc[r][c] = fma(lanes[c], channel, acc[r][c]);
    }
  }
}
#if defined(__AVX512BF16__)
template <int R, int C> INLINE void add_step(const float* keys, const float* const (&queries)[R], int step, Floats (&acc)[R][C], Paired) {
  Bytes lanes[C];
#pragma GCC unroll 4
  for (int c = 0; c < C; c++) lanes[c] = load_bytes((const uint8_t*)(keys + c * LANES));
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    const Bytes pair = broadcast_quad((const int8_t*)(queries[r] + step));
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) acc[r][c] = dot_bf16(acc[r][c], lanes[c], pair);
  }
}
#endif

}  // namespace ISA

#if defined(__AMX_BF16__)
#include "attention_chains.h"
#endif

namespace ISA {

// Scores [R][KEY_BLOCK] of C columns of lanes of keys; queries are `stride` floats apart.
template <class E, int R, int C>
static void score_columns(const float* keys, const float* query, int stride, int steps, float* scores) {
  const float* queries[R];
  Floats acc[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    queries[r] = query + int64_t(r) * stride;
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) acc[r][c] = broadcast(0);
  }
  for (int step = 0; step < steps; step++, keys += KEY_BLOCK) add_step<R, C>(keys, queries, step, acc, E{});
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(scores + r * KEY_BLOCK + c * LANES, acc[r][c]);
}

template <class E, int R> static void score_few(const float* keys, int padded, const float* query, int stride, int steps, float* scores) {
#if defined(__AMX_BF16__)
  if constexpr (E::chained) {
    int at = 0;
    for (; at + 2 * LANES <= padded; at += 2 * LANES) score_chains<R, 2>(keys + at, query, stride, steps, scores + at);
    if (at < padded) score_chains<R, 1>(keys + at, query, stride, steps, scores + at);
    return;
  }
#endif
  over_columns(padded, [&](int at, auto columns) { score_columns<E, R, columns.value>(keys + at, query, stride, steps, scores + at); });
}

// sums [G][stride] = sums * factor + weights [G][KEY_BLOCK] by values, C chunks of channels at a time.
template <class E, int G, int C>
INLINE void weigh_few(const typename E::Stored* const* rows, int n, const float* weights, int stride, int d, const float* factor, float* sums,
                      Ahead& ahead, int share) {
  constexpr int VECTORS = C * E::parts;
  Floats acc[G][VECTORS];
  for (int g = 0; g < G; g++)
    for (int c = 0; c < VECTORS; c++) acc[g][c] = load(sums + g * stride + d + c * LANES) * broadcast(factor[g]);
  for (int begin = 0; begin < n; begin += WEIGHED) {
    ahead.some(share);
    for (int j = begin; j < smaller(n, begin + WEIGHED); j++)
      unroll<0, VECTORS>([&](auto c) __attribute__((always_inline)) {
        const Floats v = row_part<c.value % E::parts>(rows[j] + d + c.value / E::parts * E::chunk, E{});
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) acc[g][c.value] = fma(v, broadcast(weights[g * KEY_BLOCK + j]), acc[g][c.value]);
      });
  }
  for (int g = 0; g < G; g++)
    for (int c = 0; c < VECTORS; c++) store(sums + g * stride + d + c * LANES, acc[g][c]);
}

template <class E, int G>
static void weigh_vectors(const typename E::Stored* const* rows, int n, const float* weights, int dim, int stride, const float* factor, float* sums,
                          Ahead& ahead, int share) {
#if defined(__AMX_BF16__)
  if constexpr (E::chained) return weigh_chains<G>(rows, n, weights, dim, stride, factor, sums, ahead, share);
#endif
#if defined(__AVX512BF16__)
  if constexpr (E::paired) {  // pairs of keys, their channels interleaved
    alignas(64) uint16_t pairs[G][KEY_BLOCK];
    for (int g = 0; g < G; g++)
      for (int j = 0; j < n; j += LANES) store_bf16(pairs[g] + j, load(weights + g * KEY_BLOCK + j));
    const auto weigh_chunk = [&](int d, auto&& load_row) __attribute__((always_inline)) {
      Floats acc[G][2];
      for (int g = 0; g < G; g++)
        for (int c = 0; c < 2; c++) acc[g][c] = load(sums + g * stride + d + c * LANES) * broadcast(factor[g]);
      for (int j = 0; j < n; j += 2) {
        if (j % WEIGHED == 0) ahead.some(share);
        const Bytes even = load_row(rows[j] + d), odd = load_row(rows[j + 1] + d);
        const Bytes first = in_turns<false>(even, odd), second = in_turns<true>(even, odd);
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) {
          const Bytes weight = broadcast_quad((const int8_t*)(pairs[g] + j));
          acc[g][0] = dot_bf16(acc[g][0], first, weight);
          acc[g][1] = dot_bf16(acc[g][1], second, weight);
        }
      }
      for (int g = 0; g < G; g++)
        for (int c = 0; c < 2; c++) store(sums + g * stride + d + c * LANES, acc[g][c]);
    };
    int d = 0;
    for (; d + E::chunk <= dim; d += E::chunk) weigh_chunk(d, [](const uint16_t* p) { return load_bytes((const uint8_t*)p); });
    if (d < dim) weigh_chunk(d, [&](const uint16_t* p) { return load_words(p, dim - d); });
    return;
  }
#endif
  if constexpr (!E::paired && !E::chained) {
    constexpr int wide = WEIGHED_CHANNELS / E::chunk;
    int d = 0;
    for (; d + WEIGHED_CHANNELS <= dim; d += WEIGHED_CHANNELS) weigh_few<E, G, wide>(rows, n, weights, stride, d, factor, sums, ahead, share);
    for (; d < dim; d += E::chunk) weigh_few<E, G, 1>(rows, n, weights, stride, d, factor, sums, ahead, share);
  }
}

// Scores of one vector become weights; returns what its sums shrink by. `scales` and `value_scales` are those of codes, or null.
static float soften_few(const Attention& a, float* scores, const float* scales, const float* value_scales, int key, int count, int padded, float lowest, float highest,
                        float slope, float& greatest, float& total) {
  const bool altering = alters(a);
  const Floats highest_here = broadcast(smaller(highest, float(key + count - 1)));
  const auto seen = [&](int j, Floats x, Floats otherwise) {
    const Floats position = broadcast(float(key + j)) + counting();
    return where_greater(broadcast(lowest), position, otherwise, where_greater(position, highest_here, otherwise, x));
  };
  const auto logits_of = [&](int j) {
    const Floats scale = scales ? broadcast(a.scale) * load(scales + j) : broadcast(a.scale);
    return broadcast(LOG2_E) * (altering ? broadcast(1) : scale);
  };
  Floats most = broadcast(greatest);
  for (int j = 0; j < padded; j += LANES) {
    if (altering) {
      const Floats scaled = load(scores + j) * (scales ? broadcast(a.scale) * load(scales + j) : broadcast(a.scale));
      store(scores + j, altered(a, scaled, broadcast(slope), broadcast(float(key + j)) + counting() - broadcast(highest)));
    }
    most = maximum(most, seen(j, load(scores + j) * logits_of(j), broadcast(NEGATIVE)));
  }
  most = broadcast(top(most));
  Floats sums = broadcast(0);
  for (int j = 0; j < padded; j += LANES) {
    const Floats weight = seen(j, power_of_two(fma(load(scores + j), logits_of(j), negated(most))), broadcast(0));
    sums = sums + weight;
    store(scores + j, value_scales ? weight * load(value_scales + j) : weight);
  }
  float lanes[2][LANES];
  store(lanes[0], most), store(lanes[1], power_of_two(broadcast(greatest) - most));
  greatest = lanes[0][0];
  total = total * lanes[1][0] + sum(sums);
  return lanes[1][0];
}

// Where a unit of one token begins to read.
static int first_key(const Attention& a, const AttentionUnit& u) {
  return larger(aligned_key(u.key_begin), a.lowest_key(u.position) / KEY_BLOCK * KEY_BLOCK);
}

// What the vectors of a unit work with, and come to: `queries` [count][query_stride] steps, `sums` [count][sum_stride], zero at first.
struct Few {
  const float* queries;
  float *columns, *scores, *sums;
  void* expanded;  // [KEY_BLOCK][dim + value_dim], of codes
  int query_stride, steps, sum_stride;
};

template <class E>
static void attend_few(const Attention& a, const AttentionUnit& u, const AttentionUnit* after, Vectors& v, const Few& few) {
  typedef typename E::Stored T;
  Rows<T> keys, values;
  const int group = u.count / u.kv_heads;
  const int weighed = (group + WEIGHED_TOGETHER - 1) / WEIGHED_TOGETHER * (KEY_BLOCK / WEIGHED) * larger(1, a.value_dim / (E::paired || E::chained ? E::chunk : WEIGHED_CHANNELS));
  const int lines = KEY_BLOCK * (a.key_row + a.value_row) * element_bytes(a.format) / 64, times = KEY_BLOCK / 16 * (few.steps / 16) + weighed;
  const int share = (lines + times - 1) / times;  // so that the last is fetched as this block ends
  float factor[FEW_VECTORS];
  const int begin = larger(u.key_begin, v.low), end = smaller(u.key_end, v.high + 1);
  for (int key = begin / KEY_BLOCK * KEY_BLOCK; key < end; key += KEY_BLOCK) {
    const int from = larger(key, aligned_key(u.key_begin)), count = smaller(key + KEY_BLOCK, end) - from;
    const int padded = (count + 15) / 16 * 16, left = end - (key + KEY_BLOCK);
    const AttentionUnit& unit = left > 0 || !after ? u : *after;  // whose block comes next
    const int next = left > 0 ? key + KEY_BLOCK : first_key(a, unit);
    Ahead ahead(a, unit, next, left > 0 ? smaller(KEY_BLOCK, left) : after ? smaller(KEY_BLOCK, unit.key_end - next) : 0);
    for (int head = 0; head < u.kv_heads; head++) {
      if constexpr (E::coded) {
        expand_block(a, u, head, from, count, (T*)few.expanded, keys, values);
      } else {
        find_rows(a, u, head, a.keys, a.key_row, from, count, keys.at);
        find_rows(a, u, head, a.values, a.value_row, from, count, values.at);
      }
      turn_keys(keys.at, padded, few.steps, few.columns, ahead, share);
      const int vector = head * group;
      int r = 0;
      const auto score = [&](auto vectors) {
        score_few<E, vectors.value>(few.columns, padded, few.queries + (vector + r) * few.query_stride, few.query_stride, few.steps, few.scores + r * KEY_BLOCK);
        r += vectors.value;
      };
      while (r + 4 <= group && r + 5 != group) score(Const<4>{});
      while (r + 3 <= group && r + 4 != group) score(Const<3>{});
      while (r + 2 <= group) score(Const<2>{});
      if (r < group) score(Const<1>{});
      for (r = 0; r < group; r++)
        factor[r] = soften_few(a, few.scores + r * KEY_BLOCK, E::coded ? keys.scales : nullptr, E::coded ? values.scales : nullptr, from, count, padded,
                               v.lowest[vector + r], v.highest[vector + r], v.slope[vector + r], v.greatest[vector + r], v.total[vector + r]);
      const int n = (count + 3) / 4 * 4;
      r = 0;
      const auto weigh = [&](auto vectors) {
        weigh_vectors<E, vectors.value>(values.at, n, few.scores + r * KEY_BLOCK, a.value_dim, few.sum_stride, factor + r, few.sums + (vector + r) * few.sum_stride, ahead, share);
        r += vectors.value;
      };
      while (r + 4 <= group) weigh(Const<4>{});
      if (group - r == 3) weigh(Const<3>{});
      if (group - r == 2) weigh(Const<2>{});
      if (group - r == 1) weigh(Const<1>{});
    }
    ahead.rest();
  }
}

template <class E>
static void attend_decode(const Attention& a, const AttentionUnit& u, const AttentionUnit* next, Room room, float* out, float* softmax) {
  Vectors v;
  describe(a, u, u.count, room, v);
  Few few;
  few.steps = a.dim / E::channels;
  few.query_stride = E::paired ? few.steps : a.dim;
  few.sum_stride = (a.value_dim + E::chunk - 1) / E::chunk * E::chunk;
  float* queries = room.take<float>(int64_t(u.count) * few.query_stride);
  few.queries = queries;
  for (int r = 0; r < u.count; r++) {
    copy_query(a, v.index[r], E::paired || E::chained, E::chained ? (float*)room.at : queries + r * few.query_stride);
    if (E::chained) widen_bf16((const uint16_t*)room.at, a.dim, queries + r * few.query_stride);
  }
  few.columns = room.take<float>(int64_t(few.steps) * KEY_BLOCK);
  few.scores = room.take<float>(u.count / u.kv_heads * KEY_BLOCK);
  few.sums = room.take<float>(int64_t(u.count) * few.sum_stride);
  memset(few.sums, 0, size_t(u.count) * few.sum_stride * 4);
  few.expanded = room.take<typename E::Stored>(E::coded ? KEY_BLOCK * (a.dim + a.value_dim) : 0);
  attend_few<E>(a, u, next, v, few);
  const bool sinks = u.sinks && a.sinks;
  float *sums = sinks ? room.take<float>(int64_t(u.count) * a.value_dim) : out, *shares = sinks ? room.take<float>(2 * u.count) : softmax;
  for (int r = 0; r < u.count; r++) {
    arranged(few.sums + r * few.sum_stride, a.value_dim, sums + r * a.value_dim, E{});
    shares[2 * r] = v.greatest[r], shares[2 * r + 1] = v.total[r];
  }
  if (!sinks) return;
  start_with_sinks(a, u, u.count, v.greatest, v.total);
  memset(out, 0, size_t(u.count) * a.value_dim * 4);
  for (int r = 0; r < u.count; r++) softmax[2 * r] = v.greatest[r], softmax[2 * r + 1] = v.total[r];
  join(sums, shares, u.count, a.value_dim, out, softmax);
}

}  // namespace ISA
