// Attention of a few query vectors, as decode rows have: keys lie in the lanes of scores, channels in those of sums.
#pragma once

namespace ISA {

constexpr int FEW_VECTORS = 16;

// Elements of a row of keys or values: floats, bits of bf16 that are widened, or pairs of bf16 where they are multiplied.
// A `chunk` of them is `parts` vectors; queries and sums lie in chunks as `arrange` puts them.
struct Plain {
  typedef float Stored;
  typedef float Query;
  static constexpr int parts = 1, chunk = LANES;
  static constexpr bool coded = false;
};
struct Widened : Plain { typedef uint16_t Stored; };
struct Split : Widened { static constexpr int parts = 2, chunk = 2 * LANES; };  // even channels before odd ones: an operation each widens them
template <int PART> INLINE Floats row_part(const float* p, Plain) { return load(p); }
template <int PART> INLINE Floats row_part(const uint16_t* p, Widened) { return load_bf16(p); }
template <int PART> INLINE Floats row_part(const uint16_t* p, Split) {
  const Ints bits = load_bits((const uint8_t*)p);
  return PART ? high_bf16(bits) : low_bf16(bits);
}
INLINE Floats query_part(const float* p) { return load(p); }
INLINE void arrange(const float* x, int dim, float* out, Plain) { memcpy(out, x, size_t(dim) * 4); }
INLINE void arrange(const float* x, int dim, float* out, Split) {
  for (; dim > 0; dim -= 2 * LANES, x += 2 * LANES, out += 2 * LANES)
    for (int i = 0; i < LANES; i++) out[i] = x[2 * i], out[LANES + i] = x[2 * i + 1];
}
INLINE void deliver(const float* sums, int dim, float factor, float* out, Plain) {
  for (int d = 0; d < dim; d++) out[d] = sums[d] * factor;
}
INLINE void deliver(const float* sums, int dim, float factor, float* out, Split) {
  for (; dim > 0; dim -= 2 * LANES, sums += 2 * LANES, out += 2 * LANES)
    for (int i = 0; i < LANES; i++) out[2 * i] = sums[i] * factor, out[2 * i + 1] = sums[LANES + i] * factor;
}
#if defined(__AVX512BF16__)
struct Paired : Plain {
  typedef uint16_t Stored;
  typedef uint16_t Query;
  static constexpr int chunk = 2 * LANES;
};
template <int PART> INLINE Bytes row_part(const uint16_t* p, Paired) { return load_bytes((const uint8_t*)p); }
INLINE Bytes query_part(const uint16_t* p) { return load_bytes((const uint8_t*)p); }
INLINE void arrange(const float* x, int dim, uint16_t* out, Paired) {
  for (int d = 0; d < dim; d += LANES) store_bf16(out + d, load(x + d));
}
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

constexpr int SCORED_TOGETHER = 3, WEIGHED_TOGETHER = 4;  // query vectors that take a row while it is in registers
constexpr int WEIGHED_CHANNELS = (LANES == 16 ? 4 : 2) * LANES;  // as registers allow
constexpr int WEIGHED = 8;  // values between which some of the next are fetched

// Scores of LANES keys for G vectors of `queries` [G][dim], into `scores` [G][KEY_BLOCK].
template <class E, int G>
INLINE void score_lanes(const typename E::Stored* const* rows, const typename E::Query* queries, int dim, float* scores, Ahead& ahead, int share) {
  constexpr int KEYS = LANES / 2;
  Floats halves[2][G];
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++, rows += KEYS) {
    ahead.some(share);
    Floats acc[G][KEYS];
#pragma GCC unroll 4
    for (int g = 0; g < G; g++)
#pragma GCC unroll 8
      for (int i = 0; i < KEYS; i++) acc[g][i] = broadcast(0);
    for (int d = 0; d < dim; d += E::chunk)
      unroll<0, E::parts>([&](auto part) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int i = 0; i < KEYS; i++) {
          const auto row = row_part<part.value>(rows[i] + d, E{});
#pragma GCC unroll 4
          for (int g = 0; g < G; g++) acc[g][i] = accumulate(acc[g][i], row, query_part(queries + g * dim + d + part.value * LANES));
        }
      });
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) halves[half][g] = folded(acc[g]);
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; g++) store(scores + g * KEY_BLOCK, joined(halves[0][g], halves[1][g]));
}

// sums [G][dim] = sums * factor + weights [G][KEY_BLOCK] by values, C chunks of channels at a time.
template <class E, int G, int C>
INLINE void weigh_few(const typename E::Stored* const* rows, int n, const float* weights, int dim, int d, const float* factor, float* sums,
                      Ahead& ahead, int share) {
  constexpr int VECTORS = C * E::parts;
  Floats acc[G][VECTORS];
  for (int g = 0; g < G; g++)
    for (int c = 0; c < VECTORS; c++) acc[g][c] = load(sums + g * dim + d + c * LANES) * broadcast(factor[g]);
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
    for (int c = 0; c < VECTORS; c++) store(sums + g * dim + d + c * LANES, acc[g][c]);
}

template <class E, int G>
static void weigh_vectors(const typename E::Stored* const* rows, int n, const float* weights, int dim, const float* factor, float* sums,
                          Ahead& ahead, int share) {
#if defined(__AVX512BF16__)
  if constexpr (sizeof(typename E::Query) == 2) {  // pairs of keys, their channels interleaved
    alignas(64) uint16_t pairs[G][KEY_BLOCK];
    for (int g = 0; g < G; g++)
      for (int j = 0; j < n; j += LANES) store_bf16(pairs[g] + j, load(weights + g * KEY_BLOCK + j));
    for (int d = 0; d < dim; d += 2 * LANES) {
      Floats acc[G][2];
      for (int g = 0; g < G; g++)
        for (int c = 0; c < 2; c++) acc[g][c] = load(sums + g * dim + d + c * LANES) * broadcast(factor[g]);
      for (int j = 0; j < n; j += 2) {
        if (j % WEIGHED == 0) ahead.some(share);
        const Bytes even = load_bytes((const uint8_t*)(rows[j] + d)), odd = load_bytes((const uint8_t*)(rows[j + 1] + d));
        const Bytes first = in_turns<false>(even, odd), second = in_turns<true>(even, odd);
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) {
          const Bytes weight = broadcast_quad((const int8_t*)(pairs[g] + j));
          acc[g][0] = dot_bf16(acc[g][0], first, weight);
          acc[g][1] = dot_bf16(acc[g][1], second, weight);
        }
      }
      for (int g = 0; g < G; g++)
        for (int c = 0; c < 2; c++) store(sums + g * dim + d + c * LANES, acc[g][c]);
    }
    return;
  }
#endif
  if constexpr (sizeof(typename E::Query) == 4) {
    constexpr int wide = WEIGHED_CHANNELS / E::chunk;
    int d = 0;
    for (; d + WEIGHED_CHANNELS <= dim; d += WEIGHED_CHANNELS) weigh_few<E, G, wide>(rows, n, weights, dim, d, factor, sums, ahead, share);
    for (; d < dim; d += E::chunk) weigh_few<E, G, 1>(rows, n, weights, dim, d, factor, sums, ahead, share);
  }
}

// Scores of one vector become weights; returns what its sums shrink by.
static float soften_few(const Attention& a, float* scores, int key, int count, int padded, float lowest, float highest, float& greatest, float& total) {
  const Floats lanes = counting();
  Floats most = broadcast(greatest);
  for (int j = 0; j < padded; j += LANES) {
    Floats x = load(scores + j) * broadcast(a.scale);
    if (a.softcap > 0) x = capped(x, a.softcap);
    const Floats position = broadcast(float(key + j)) + lanes;
    x = where_greater(position, broadcast(smaller(highest, float(key + count - 1))), broadcast(NEGATIVE), x);
    x = where_greater(broadcast(lowest), position, broadcast(NEGATIVE), x);
    most = maximum(most, x);
    store(scores + j, x);
  }
  const float before = greatest;
  greatest = top(most);
  Floats sums = broadcast(0);
  for (int j = 0; j < padded; j += LANES) {
    const Floats x = load(scores + j);
    const Floats weight = where_greater(broadcast(MASKED), x, broadcast(0), exponential(x - broadcast(greatest)));
    sums = sums + weight;
    store(scores + j, weight);
  }
  float factor[LANES];
  store(factor, exponential(broadcast(before - greatest)));
  total = total * factor[0] + sum(sums);
  return factor[0];
}

// Where a unit of one token begins to read.
static int first_key(const Attention& a, const AttentionUnit& u) {
  return larger(u.key_begin, a.lowest_key(u.position) / KEY_BLOCK * KEY_BLOCK);
}

INLINE void multiply_lanes(float* x, const float* by, int count) {
  for (int j = 0; j < count; j += LANES) store(x + j, load(x + j) * load(by + j));
}

// `queries` [count][dim] and `sums` [count][value_dim], zero at first; one softmax a vector. `room` is for codes.
template <class E>
static void attend_few(const Attention& a, const AttentionUnit& u, const AttentionUnit* after, const typename E::Query* queries, const float* lowest, const float* highest,
                       int begin, int end, float* greatest, float* total, float* scores, typename E::Stored* room, float* sums) {
  typedef typename E::Stored T;
  Rows<T> keys, values;
  const int group = u.count / u.kv_heads;
  const auto times_of = [&](int together) { return (group + together - 1) / together; };
  const int times = times_of(SCORED_TOGETHER) * (2 * KEY_BLOCK / LANES) + times_of(WEIGHED_TOGETHER) * (KEY_BLOCK / WEIGHED) * larger(1, a.value_dim / WEIGHED_CHANNELS);
  const int lines = KEY_BLOCK * (a.key_row + a.value_row) * element_bytes(a.format) / 64;
  const int share = (lines + times - 1) / times;  // so that the last is fetched as this block ends
  float factor[FEW_VECTORS];
  for (int key = begin / KEY_BLOCK * KEY_BLOCK; key < end; key += KEY_BLOCK) {
    const int from = larger(key, u.key_begin), count = smaller(key + KEY_BLOCK, end) - from;
    const int padded = (count + 15) / 16 * 16, left = end - (key + KEY_BLOCK);
    const AttentionUnit& unit = left > 0 || !after ? u : *after;  // whose block comes next
    const int next = left > 0 ? key + KEY_BLOCK : first_key(a, unit);
    Ahead ahead(a, unit, next, left > 0 ? smaller(KEY_BLOCK, left) : after ? smaller(KEY_BLOCK, unit.key_end - next) : 0);
    for (int head = 0; head < u.kv_heads; head++) {
      if constexpr (E::coded) {
        expand_block(a, u, head, from, count, room, keys, values);
      } else {
        find_rows(a, u, head, a.keys, a.key_row, from, count, keys.at);
        find_rows(a, u, head, a.values, a.value_row, from, count, values.at);
      }
      const int vector = head * group;
      const auto score = [&](auto vectors, int r) {
        for (int j = 0; j < padded; j += LANES)
          score_lanes<E, vectors.value>(keys.at + j, queries + (vector + r) * a.dim, a.dim, scores + r * KEY_BLOCK + j, ahead, share);
      };
      int r = 0;  // in threes, and in twos rather than leave one alone
      for (; r + 5 <= group || r + 3 == group; r += 3) score(Const<3>{}, r);
      for (; r + 2 <= group; r += 2) score(Const<2>{}, r);
      if (r < group) score(Const<1>{}, r);
      for (r = 0; r < group; r++) {
        float* row = scores + r * KEY_BLOCK;
        if constexpr (E::coded) multiply_lanes(row, keys.scales, padded);
        factor[r] = soften_few(a, row, from, count, padded, lowest[vector + r], highest[vector + r], greatest[vector + r], total[vector + r]);
        if constexpr (E::coded) multiply_lanes(row, values.scales, padded);
      }
      const int n = (count + 1) / 2 * 2;
      const auto weigh = [&](auto vectors, int r) {
        weigh_vectors<E, vectors.value>(values.at, n, scores + r * KEY_BLOCK, a.value_dim, factor + r, sums + (vector + r) * a.value_dim, ahead, share);
      };
      for (r = 0; r + 4 <= group; r += 4) weigh(Const<4>{}, r);
      if (group - r == 3) weigh(Const<3>{}, r);
      if (group - r == 2) weigh(Const<2>{}, r);
      if (group - r == 1) weigh(Const<1>{}, r);
    }
    ahead.rest();
  }
}

template <class E>
static void attend_decode(const Attention& a, const AttentionUnit& u, const AttentionUnit* next, Room room, float* out, float* softmax) {
  Vectors v;
  describe(a, u, u.count, room, v);
  typedef typename E::Query Query;
  Query* queries = room.take<Query>(int64_t(u.count) * a.dim);
  float* query = room.take<float>(a.dim);
  for (int r = 0; r < u.count; r++) {
    const int64_t at = v.index[r] * a.dim;
    if (a.q_is_bf16) widen_bf16((const uint16_t*)a.q + at, a.dim, query);
    arrange(a.q_is_bf16 ? query : (const float*)a.q + at, a.dim, queries + r * a.dim, E{});
  }
  float* sums = room.take<float>(int64_t(u.count) * a.value_dim);
  memset(sums, 0, size_t(u.count) * a.value_dim * 4);
  float* scores = room.take<float>(u.count / u.kv_heads * KEY_BLOCK);
  auto* expanded = room.take<typename E::Stored>(E::coded ? KEY_BLOCK * (a.dim + a.value_dim) : 0);
  attend_few<E>(a, u, next, queries, v.lowest, v.highest, larger(u.key_begin, v.low), smaller(u.key_end, v.high + 1), v.greatest, v.total, scores, expanded, sums);
  for (int r = 0; r < u.count; r++) {
    const float inverse = v.total[r] == 0 ? 0 : 1 / v.total[r];
    deliver(sums + r * a.value_dim, a.value_dim, inverse, out + r * a.value_dim, E{});
    softmax[2 * r] = v.greatest[r], softmax[2 * r + 1] = v.total[r];
  }
}

}  // namespace ISA
