// Attention over pages with a running softmax (Milakov & Gimelshein 2018, arXiv:1805.02867), in blocks of keys.
//
// Decode rows and tiles of prompts go different ways: see attention_few.h and attention_tile.h. Blocks begin at multiples
// of KEY_BLOCK, so that a vector's result does not depend on those beside it.
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

// Room in the scratch, piece by piece.
struct Room {
  uint8_t* at;

  template <class T> T* take(int64_t count) {
    T* p = (T*)at;
    at += (count * sizeof(T) + 63) / 64 * 64;
    return p;
  }
};

// The query vectors of a unit: which keys each sees, and what its softmax starts with.
struct Vectors {
  float *lowest, *highest, *greatest, *total;  // [width]
  int low, high;               // keys that any of them sees
  int low_by_all, high_by_all;  // keys that all of them see
  int64_t index[MAX_VECTORS];  // in q
};

static void describe(const Attention& a, const AttentionUnit& u, int width, Room& room, Vectors& v) {
  const int group = a.heads / a.kv_heads;
  v.lowest = room.take<float>(width), v.highest = room.take<float>(width);
  v.greatest = room.take<float>(width), v.total = room.take<float>(width);
  v.low = v.high_by_all = 0x7fffffff, v.high = -1, v.low_by_all = 0;
  for (int r = 0; r < width; r++) {
    v.greatest[r] = NEGATIVE;
    v.total[r] = v.lowest[r] = 0;
    v.highest[r] = -1;
    if (r >= u.count) continue;
    const int head = u.head(r, group), token = u.token_of(r, group), position = u.position + token - u.token;
    const int lowest = a.lowest_key(position);
    v.lowest[r] = float(lowest), v.highest[r] = float(position);
    v.low = smaller(v.low, lowest), v.low_by_all = larger(v.low_by_all, lowest);
    v.high = larger(v.high, position), v.high_by_all = smaller(v.high_by_all, position);
    if (u.sinks && a.sinks) v.greatest[r] = a.sinks[head], v.total[r] = 1;
    v.index[r] = int64_t(token) * a.heads + head;
  }
}

}  // namespace ISA

#include "attention_rows.h"

#include "attention_few.h"
#include "attention_tile.h"

namespace ISA {

static void attend(const Attention& a, const AttentionUnit& u, const AttentionUnit* next, float* out, float* softmax, uint8_t* scratch) {
  const auto whole = [&](int chunk) { return a.dim % chunk == 0 && a.value_dim % chunk == 0; };
  const Room room{scratch};
  if (u.decode && u.count <= FEW_VECTORS * u.kv_heads) {
#if defined(__AVX512BF16__)
    if (a.format == PageFormat::bf16 && whole(Paired::chunk)) return attend_decode<Paired>(a, u, next, room, out, softmax);
    if (is_coded(a.format) && whole(Paired::chunk)) return attend_decode<Coded<Paired>>(a, u, next, room, out, softmax);
#endif
    if (a.format == PageFormat::bf16 && whole(Split::chunk)) return attend_decode<Split>(a, u, next, room, out, softmax);
    if (a.format == PageFormat::bf16 && whole(Widened::chunk)) return attend_decode<Widened>(a, u, next, room, out, softmax);
    if (a.format == PageFormat::f32 && whole(Plain::chunk)) return attend_decode<Plain>(a, u, next, room, out, softmax);
    if (is_coded(a.format) && whole(Plain::chunk)) return attend_decode<Coded<Plain>>(a, u, next, room, out, softmax);
  }
  AttentionUnit one = u;
  one.kv_heads = 1, one.count = u.count / u.kv_heads;
  for (; one.kv_head < u.kv_head + u.kv_heads; one.kv_head++, out += one.count * a.value_dim, softmax += 2 * one.count)
    attend_tile(a, one, room, out, softmax);
}

}  // namespace ISA
