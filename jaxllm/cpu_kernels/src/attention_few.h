// Attention of a few query vectors, as decode rows have: keys lie in the lanes of scores, channels in those of sums.
#pragma once

namespace ISA {

constexpr int FEW_VECTORS = 16;

// Elements of a row of keys or values: floats, bits that are widened, or pairs of bf16 where they are multiplied.
struct Widened { typedef uint16_t Stored; typedef float Query; static constexpr int chunk = LANES; };
struct Plain { typedef float Stored; typedef float Query; static constexpr int chunk = LANES; };
INLINE Floats row_chunk(const float* p, Plain) { return load(p); }
INLINE Floats row_chunk(const uint16_t* p, Widened) { return load_bf16(p); }
INLINE Floats query_chunk(const float* p) { return load(p); }
#if defined(__AVX512BF16__)
struct Paired { typedef uint16_t Stored; typedef uint16_t Query; static constexpr int chunk = 2 * LANES; };
INLINE Bytes row_chunk(const uint16_t* p, Paired) { return load_bytes((const uint8_t*)p); }
INLINE Bytes query_chunk(const uint16_t* p) { return load_bytes((const uint8_t*)p); }
#endif

// Where keys and values of one block lie, and how many there are.
template <class T> struct Rows {
  const T *keys[KEY_BLOCK], *values[KEY_BLOCK];
  int count = 0;
};

// Fetches the rows of the block after this one, some at a time: all at once there are more misses than can be under way.
template <class T> struct Fetcher {
  const Rows<T>& rows;
  int key_row, value_row;  // in elements
  int at = 0;              // of all keys, then all values

  inline void some(int share) {
    for (const int end = smaller(at + share, 2 * rows.count); at < end; at++) {
      const bool key = at < rows.count;
      const T* row = key ? rows.keys[at] : rows.values[at - rows.count];
      const int size = key ? key_row : value_row;
      for (int i = 0; i < size; i += 64 / int(sizeof(T))) __builtin_prefetch(row + i, 0, 2);  // to L2: L1 has fewer places for what is under way
    }
  }
};

constexpr int WEIGHED = 16;  // values between which some of the next are fetched

// Scores of LANES keys.
template <class E>
INLINE Floats score_lanes(const typename E::Stored* const* rows, const typename E::Query* query, int dim) {
  Floats acc[LANES];
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) acc[i] = broadcast(0);
  for (int d = 0; d < dim; d += E::chunk) {
    const auto q = query_chunk(query + d);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) acc[i] = accumulate(acc[i], row_chunk(rows[i] + d, E{}), q);
  }
  return sums_of(acc);
}

// sums [G][dim] = sums * factor + weights [G][KEY_BLOCK] by values, C vectors of channels at a time.
template <class E, int G, int C>
INLINE void weigh_few(const typename E::Stored* const* rows, int n, const float* weights, int dim, int d, const float* factor, float* sums,
                      Fetcher<typename E::Stored>& ahead, int share) {
  Floats acc[G][C];
  for (int g = 0; g < G; g++)
    for (int c = 0; c < C; c++) acc[g][c] = load(sums + g * dim + d + c * LANES) * broadcast(factor[g]);
  for (int j = 0; j < n; j++) {
    if (j % WEIGHED == 0) ahead.some(share);
    Floats v[C];
    for (int c = 0; c < C; c++) v[c] = row_chunk(rows[j] + d + c * LANES, E{});
#pragma GCC unroll 4
    for (int g = 0; g < G; g++)
      for (int c = 0; c < C; c++) acc[g][c] = fma(v[c], broadcast(weights[g * KEY_BLOCK + j]), acc[g][c]);
  }
  for (int g = 0; g < G; g++)
    for (int c = 0; c < C; c++) store(sums + g * dim + d + c * LANES, acc[g][c]);
}

template <class E, int G>
static void weigh_vectors(const typename E::Stored* const* rows, int n, const float* weights, int dim, const float* factor, float* sums,
                          Fetcher<typename E::Stored>& ahead, int share) {
#if defined(__AVX512BF16__)
  if constexpr (E::chunk == 2 * LANES) {  // pairs of keys, their channels interleaved
    alignas(64) uint16_t pairs[G][KEY_BLOCK];
    for (int g = 0; g < G; g++)
      for (int j = 0; j < n; j += LANES) store_bf16(pairs[g] + j, load(weights + g * KEY_BLOCK + j));
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int d = 0; d < dim; d += 2 * LANES) {
      Floats acc[G][2];
      for (int g = 0; g < G; g++)
        for (int c = 0; c < 2; c++) acc[g][c] = load(sums + g * dim + d + c * LANES) * broadcast(factor[g]);
      for (int j = 0; j < n; j += 2) {
        if (j % WEIGHED == 0) ahead.some(share);
        const Bytes even = row_chunk(rows[j] + d, E{}), odd = row_chunk(rows[j + 1] + d, E{});
        const Bytes first = _mm512_permutex2var_epi16(even, low, odd), second = _mm512_permutex2var_epi16(even, high, odd);
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
  if constexpr (E::chunk == LANES) {
    int d = 0;
    for (; d + 2 * LANES <= dim; d += 2 * LANES) weigh_few<E, G, 2>(rows, n, weights, dim, d, factor, sums, ahead, share);
    for (; d < dim; d += LANES) weigh_few<E, G, 1>(rows, n, weights, dim, d, factor, sums, ahead, share);
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
  return larger(u.key_begin, a.window ? larger(0, u.position - a.window + 1) / KEY_BLOCK * KEY_BLOCK : 0);
}

// `queries` [count][dim] and `sums` [count][value_dim], zero at first; one softmax a vector.
template <class E>
static void attend_few(const Attention& a, const AttentionUnit& u, const AttentionUnit* after, const typename E::Query* queries, const float* lowest, const float* highest,
                       int begin, int end, float* greatest, float* total, float* scores, float* sums) {
  typedef typename E::Stored T;
  Rows<T> rooms[2];
  Rows<T> *now = &rooms[0], *next = &rooms[1];
  const auto find = [&](const AttentionUnit& unit, int from, int count, Rows<T>& rows) {
    find_rows(a, unit, a.keys, a.key_row, from, count, rows.keys);
    find_rows(a, unit, a.values, a.value_row, from, count, rows.values);
    rows.count = count;
  };
  const int chunks = KEY_BLOCK / LANES, vectors_at_once = 4;
  const int times = u.count * chunks + (u.count + vectors_at_once - 1) / vectors_at_once * (KEY_BLOCK / WEIGHED) * larger(1, a.value_dim / E::chunk);
  const int share = (2 * KEY_BLOCK + times - 1) / times;  // so that the last is fetched as this block ends
  float factor[FEW_VECTORS];
  const int first = begin / KEY_BLOCK * KEY_BLOCK;
  for (int key = first; key < end; key += KEY_BLOCK) {
    const int from = larger(key, u.key_begin), count = smaller(key + KEY_BLOCK, end) - from;
    const int padded = (count + 15) / 16 * 16, left = end - (key + KEY_BLOCK);
    if (key == first) find(u, from, count, *now);
    next->count = 0;
    if (left > 0) find(u, key + KEY_BLOCK, smaller(KEY_BLOCK, left), *next);
    else if (after) find(*after, first_key(a, *after), smaller(KEY_BLOCK, after->key_end - first_key(a, *after)), *next);
    Fetcher<T> ahead{*next, a.dim, a.value_dim};
    for (int r = 0; r < u.count; r++) {
      float* row = scores + r * KEY_BLOCK;
      for (int j = 0; j < padded; j += LANES) {
        ahead.some(share);
        store(row + j, score_lanes<E>(now->keys + j, queries + r * a.dim, a.dim));
      }
      factor[r] = soften_few(a, row, from, count, padded, lowest[r], highest[r], greatest[r], total[r]);
    }
    const int n = (count + 1) / 2 * 2;
    const auto weigh = [&](auto vectors, int r) {
      weigh_vectors<E, vectors.value>(now->values, n, scores + r * KEY_BLOCK, a.value_dim, factor + r, sums + r * a.value_dim, ahead, share);
    };
    int r = 0;
    for (; r + 4 <= u.count; r += 4) weigh(Const<4>{}, r);
    if (u.count - r == 3) weigh(Const<3>{}, r);
    if (u.count - r == 2) weigh(Const<2>{}, r);
    if (u.count - r == 1) weigh(Const<1>{}, r);
    ahead.some(2 * KEY_BLOCK);
    Rows<T>* const done = now;
    now = next, next = done;
  }
}

template <class E>
static void attend_decode(const Attention& a, const AttentionUnit& u, const AttentionUnit* next, Room room, float* out, float* softmax) {
  Vectors v;
  describe(a, u, u.count, room, v);
  typedef typename E::Query Query;
  Query* queries = room.take<Query>(int64_t(u.count) * a.dim);
  for (int r = 0; r < u.count; r++)
    for (int d = 0; d < a.dim; d++) {
      const float x = query_channel(a, v.index[r], d);
      if constexpr (sizeof(Query) == 2) queries[r * a.dim + d] = bf16_of_float(x);
      else queries[r * a.dim + d] = x;
    }
  memset(out, 0, size_t(u.count) * a.value_dim * 4);
  float* scores = room.take<float>(u.count * KEY_BLOCK);
  attend_few<E>(a, u, next, queries, v.lowest, v.highest, larger(u.key_begin, v.low), smaller(u.key_end, v.high + 1), v.greatest, v.total, scores, out);
  for (int r = 0; r < u.count; r++) {
    const float inverse = v.total[r] == 0 ? 0 : 1 / v.total[r];
    for (int d = 0; d < a.value_dim; d++) out[r * a.value_dim + d] *= inverse;
    softmax[2 * r] = v.greatest[r], softmax[2 * r + 1] = v.total[r];
  }
}

}  // namespace ISA
