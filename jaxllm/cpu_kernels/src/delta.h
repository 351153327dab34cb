// The gated delta rule, token by token, so that a token's result is the same however a step is cut (see pallas_kernels/delta_rule.py).
#pragma once
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "simd.h"

namespace ISA {

constexpr int DELTA_VECTORS = DELTA_COLUMNS / LANES;
constexpr int DELTA_CHAINS = DELTA_VECTORS > 2 ? 2 : 4;  // sums that run beside each other, for an addition takes a while

typedef Floats DeltaSums[DELTA_CHAINS][DELTA_VECTORS];

// The chains of each vector, added in one order.
INLINE Floats joined(const DeltaSums& sums, int vector) {
  const Floats first = sums[0][vector] + sums[1][vector];
  return DELTA_CHAINS == 2 ? first : first + (sums[DELTA_CHAINS - 2][vector] + sums[DELTA_CHAINS - 1][vector]);
}

// Calls add(row, chain) for each row, whose chains take turns.
template <class ADD> INLINE void by_chains(int rows, ADD&& add) {
  int i = 0;
  for (; i + DELTA_CHAINS <= rows; i += DELTA_CHAINS)
#pragma GCC unroll 4
    for (int chain = 0; chain < DELTA_CHAINS; chain++) add(i + chain, chain);
#pragma GCC unroll 4
  for (int chain = 0; chain < DELTA_CHAINS; chain++)
    if (i + chain < rows) add(i + chain, chain);
}

// One token: `state` [size] rows of DELTA_COLUMNS, `stride` apart.
static void delta_token(float* state, int64_t stride, int size, const float* q, const float* k, const float* v, float fading, float beta, float* out) {
  DeltaSums sums;
  for (auto& chain : sums)
    for (Floats& sum : chain) sum = broadcast(0);
  by_chains(size, [&](int i, int chain) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int n = 0; n < DELTA_VECTORS; n++) sums[chain][n] = fma(broadcast(k[i]), load(state + i * stride + n * LANES), sums[chain][n]);
  });
  Floats change[DELTA_VECTORS];
#pragma GCC unroll 8
  for (int n = 0; n < DELTA_VECTORS; n++) change[n] = (load(v + n * LANES) - broadcast(fading) * joined(sums, n)) * broadcast(beta);
  for (auto& chain : sums)
    for (Floats& sum : chain) sum = broadcast(0);
  by_chains(size, [&](int i, int chain) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int n = 0; n < DELTA_VECTORS; n++) {
      float* at = state + i * stride + n * LANES;
      const Floats changed = fma(broadcast(k[i]), change[n], broadcast(fading) * load(at));
      store(at, changed);
      sums[chain][n] = fma(broadcast(q[i]), changed, sums[chain][n]);
    }
  });
#pragma GCC unroll 8
  for (int n = 0; n < DELTA_VECTORS; n++) store(out + n * LANES, joined(sums, n));
}

// `count` columns of `rows` rows.
static void copy_columns(const float* from, int64_t from_stride, int rows, int count, float* to, int64_t to_stride) {
  for (int i = 0; i < rows; i++) memcpy(to + i * to_stride, from + i * from_stride, size_t(count) * sizeof(float));
}

// What is fewer than DELTA_COLUMNS, or is needed again, lies in `tile` [key_dim, DELTA_COLUMNS] meanwhile.
static void delta_rule(const DeltaRun& r, float* tile) {
  const bool whole = r.columns == DELTA_COLUMNS, in_place = whole && r.tokens == 1;
  float* state = in_place ? r.state : tile;
  const int64_t stride = in_place ? r.value_dim : DELTA_COLUMNS;
  if (!in_place) {
    if (!whole) memset(tile, 0, size_t(r.key_dim) * DELTA_COLUMNS * sizeof(float));
    copy_columns(r.state, r.value_dim, r.key_dim, r.columns, tile, DELTA_COLUMNS);
  }
  for (int t = 0; t < r.tokens; t++) {
    float values[DELTA_COLUMNS] = {}, out[DELTA_COLUMNS];
    memcpy(values, r.v + t * r.channels, size_t(r.columns) * sizeof(float));
    const float fading = expf(r.decay[int64_t(t) * r.value_heads]), beta = r.beta[int64_t(t) * r.value_heads];
    delta_token(state, stride, r.key_dim, r.q + t * r.keys, r.k + t * r.keys, values, fading, beta, out);
    memcpy(r.out + int64_t(t) * r.value_heads * r.value_dim, out, size_t(r.columns) * sizeof(float));
    if (t + 1 == r.kept_length) copy_columns(state, stride, r.key_dim, r.columns, r.kept, r.value_dim);
  }
  if (!in_place) copy_columns(tile, DELTA_COLUMNS, r.key_dim, r.columns, r.state, r.value_dim);
}

}  // namespace ISA
