// Attention over pages with a running softmax (Milakov & Gimelshein 2018, arXiv:1805.02867), in blocks of keys.
//
// Decode rows and tiles of prompts go different ways, attention_few.h and attention_tile.h, and come to the same bits, so
// that a token's result depends neither on those beside it nor on how it came to be computed. Both keep to one order:
//   a score is one sum over the channels, from the first to the last (with BF16 instructions over pairs of them);
//   with AMX it is a sum over 32 channels at a time, as is that of weighted values over 32 keys: see attention_chains.h;
//   a block is the keys from a multiple of KEY_BLOCK on. The sum of its weights is `sum` of as many lanes as a vector has,
//   lane l being the sum of keys l, l + LANES, l + 2 LANES ... of the block; weighted values are added key by key;
//   a segment is the blocks from a multiple of SEGMENT on, with a running softmax of its own;
//   segments are joined from the first to the last, the sinks before them.
// What a vector does not see has a weight of zero, which changes no sum.
#pragma once
#include <math.h>

#include "gate.h"
#include "kernels.h"
#include "product.h"
#include "simd.h"

namespace ISA {

static constexpr float NEGATIVE = -1e30f, MASKED = -1e29f;

// A column of elements, one a lane, and one element for all lanes.
INLINE Floats column(const float* p) { return load(p); }
INLINE Floats spread(const float* p) { return broadcast(*p); }
INLINE Floats accumulate(Floats acc, Floats a, Floats b) { return fma(a, b, acc); }
#if defined(__AVX512BF16__)
INLINE Bytes column(const uint32_t* p) { return load_bytes((const uint8_t*)p); }
INLINE Bytes spread(const uint32_t* p) { return broadcast_quad((const int8_t*)p); }
INLINE Floats accumulate(Floats acc, Bytes a, Bytes b) { return dot_bf16(acc, a, b); }
#endif

INLINE Floats capped(Floats x, float cap) {  // cap tanh(x / cap)
  const Floats e = exponential(x * broadcast(2 / cap));
  return broadcast(cap) - broadcast(2 * cap) / (e + broadcast(1));
}

// Whether scores become logits before the softmax, by more than a factor; and what they become of `scaled` ones then.
INLINE bool alters(const Attention& a) { return a.softcap > 0 || a.slopes; }
INLINE Floats altered(const Attention& a, Floats scaled, Floats slope, Floats distance) {
  const Floats x = a.softcap > 0 ? capped(scaled, a.softcap) : scaled;
  return a.slopes ? fma(slope, distance, x) : x;
}

// Whether AMX's tiles are taken, which both ways then add up alike.
#if defined(__AMX_BF16__)
INLINE bool fits_tiles(const Attention& a) { return a.format != PageFormat::f32 && a.dim % 32 == 0 && a.value_dim % 32 == 0; }
#else
INLINE bool fits_tiles(const Attention&) { return false; }
struct TinyIsZero {};
#endif

// Room in the scratch, piece by piece.
struct Room {
  uint8_t* at;

  template <class T> T* take(int64_t count) {
    T* p = (T*)at;
    at += (count * sizeof(T) + 63) / 64 * 64;
    return p;
  }
};

constexpr float LOG2_E = 1.44269504f;

// The query vectors of a unit: which keys each sees, and the softmax of a segment.
struct Vectors {
  float *lowest, *highest, *greatest, *total;  // [width]; logits are of base two
  float* slope;                // [width], of each vector's head
  int low, high;               // keys that any of them sees
  int low_by_all, high_by_all;  // keys that all of them see
  int64_t index[MAX_VECTORS];  // in q
};

static void describe(const Attention& a, const AttentionUnit& u, int width, Room& room, Vectors& v) {
  const int group = a.heads / a.kv_heads;
  v.lowest = room.take<float>(width), v.highest = room.take<float>(width);
  v.greatest = room.take<float>(width), v.total = room.take<float>(width);
  v.slope = room.take<float>(width);
  v.low = v.high_by_all = 0x7fffffff, v.high = -1, v.low_by_all = 0;
  for (int r = 0; r < width; r++) {
    v.greatest[r] = NEGATIVE;
    v.total[r] = v.lowest[r] = v.slope[r] = 0;
    v.highest[r] = -1;
    if (r >= u.count) continue;
    const int head = u.head(r, group), token = u.token_of(r, group), position = u.position + token - u.token;
    const int lowest = a.lowest_key(position), highest = a.highest_key(token, position);
    v.lowest[r] = float(lowest), v.highest[r] = float(highest);
    v.low = smaller(v.low, lowest), v.low_by_all = larger(v.low_by_all, lowest);
    v.high = larger(v.high, highest), v.high_by_all = smaller(v.high_by_all, highest);
    if (a.slopes) v.slope[r] = a.slopes[head];
    v.index[r] = int64_t(token) * a.heads + head;
  }
}

// The greatest logits and the sums of weights of two segments become those of both; gives what the sums of each are to be
// multiplied by.
struct Shares { Floats before, more; };
INLINE Shares join_softmax(Floats& greatest, Floats& total, Floats more_greatest, Floats more_total) {
  const Floats most = maximum(greatest, more_greatest);
  const Shares shares{power_of_two(greatest - most), power_of_two(more_greatest - most)};
  greatest = most;
  total = fma(more_total, shares.more, total * shares.before);
  return shares;
}
INLINE Floats join_sums(Floats sums, Floats more, Shares by) { return fma(more, by.more, sums * by.before); }

static void join(const float* more, const float* more_softmax, int vectors, int dim, float* out, float* softmax) {
  [[maybe_unused]] const TinyIsZero as_in_tiles;
  float lanes[3][LANES];
  for (int r = 0; r < vectors; r++, softmax += 2, more_softmax += 2) {
    Floats greatest = broadcast(softmax[0]), total = broadcast(softmax[1]);
    const Shares by = join_softmax(greatest, total, broadcast(more_softmax[0]), broadcast(more_softmax[1]));
    store(lanes[0], greatest), store(lanes[1], total);
    softmax[0] = lanes[0][0], softmax[1] = lanes[1][0];
    int d = 0;
    for (; d + LANES <= dim; d += LANES, out += LANES, more += LANES) store(out, join_sums(load(out), load(more), by));
    const int rest = dim - d;
    memcpy(lanes[0], out, rest * sizeof(float)), memcpy(lanes[1], more, rest * sizeof(float));
    store(lanes[2], join_sums(load(lanes[0]), load(lanes[1]), by));
    memcpy(out, lanes[2], rest * sizeof(float));
    out += rest, more += rest;
  }
}

#if defined(KERNELS_AVX512)
constexpr int TOGETHER = 4;  // columns of lanes that go together
#elif defined(KERNELS_AVX2) || defined(KERNELS_NEON)
constexpr int TOGETHER = 2;
#else
constexpr int TOGETHER = 1;
#endif

// Calls f with the number of columns that go together, as a constant, from each such column on.
template <class F> INLINE void over_columns(int width, F&& f) {
  int at = 0;
  for (; at + TOGETHER * LANES <= width; at += TOGETHER * LANES) f(at, Const<TOGETHER>{});
  if constexpr (TOGETHER > 2)
    for (; at + 2 * LANES <= width; at += 2 * LANES) f(at, Const<2>{});
  if constexpr (TOGETHER > 1)
    for (; at < width; at += LANES) f(at, Const<1>{});
}

// One query vector, as floats or as pairs of bf16.
static void copy_query(const Attention& a, int64_t index, bool pairs, float* out) {
  const int64_t at = index * a.dim;
  if (pairs == a.q_is_bf16) memcpy(out, (const uint8_t*)a.q + at * (pairs ? 2 : 4), size_t(a.dim) * (pairs ? 2 : 4));
  else if (pairs) narrow_bf16((const float*)a.q + at, a.dim, (uint16_t*)out);
  else widen_bf16((const uint16_t*)a.q + at, a.dim, out);
}

// Sums as yet of nothing but the sink of each vector of a unit, if it begins with them.
static void start_with_sinks(const Attention& a, const AttentionUnit& u, int width, float* greatest, float* total) {
  const int group = a.heads / a.kv_heads;
  for (int r = 0; r < width; r++) greatest[r] = NEGATIVE, total[r] = 0;
  for (int r = 0; r < u.count && u.sinks && a.sinks; r++) greatest[r] = LOG2_E * a.sinks[u.head(r, group)], total[r] = 1;
}

}  // namespace ISA

#include "attention_rows.h"

#include "attention_few.h"
#include "attention_tile.h"

namespace ISA {

static void attend(const Attention& a, const AttentionUnit& u, const AttentionUnit* next, float* out, float* softmax, uint8_t* scratch) {
  [[maybe_unused]] const TinyIsZero as_in_tiles;
  const auto whole = [&](int steps, int chunk) { return a.dim % steps == 0 && a.value_dim % chunk == 0; };
  const Room room{scratch};
  if (u.decode && u.count <= FEW_VECTORS * u.kv_heads) {
#if defined(__AMX_BF16__)
    if (fits_tiles(a) && is_coded(a.format)) return attend_decode<Coded<Chained>>(a, u, next, room, out, softmax);
    if (fits_tiles(a)) return attend_decode<Chained>(a, u, next, room, out, softmax);
#endif
    if (a.format == PageFormat::f32 && whole(1, Plain::chunk)) return attend_decode<Plain>(a, u, next, room, out, softmax);
#if defined(__AVX512BF16__)
    if (a.format == PageFormat::bf16 && whole(2, 1)) return attend_decode<Paired>(a, u, next, room, out, softmax);
    if (is_coded(a.format) && whole(2, 1)) return attend_decode<Coded<Paired>>(a, u, next, room, out, softmax);
#else
    if (a.format == PageFormat::bf16 && whole(2, Split::chunk)) return attend_decode<Split>(a, u, next, room, out, softmax);
    if (a.format == PageFormat::bf16 && whole(2, Widened::chunk)) return attend_decode<Widened>(a, u, next, room, out, softmax);
    if (is_coded(a.format) && whole(1, Plain::chunk)) return attend_decode<Coded<Plain>>(a, u, next, room, out, softmax);
#endif
  }
  AttentionUnit one = u;
  one.kv_heads = 1, one.count = u.count / u.kv_heads;
  for (; one.kv_head < u.kv_head + u.kv_heads; one.kv_head++, out += one.count * a.value_dim, softmax += 2 * one.count)
    attend_tile(a, one, room, out, softmax);
}

}  // namespace ISA
