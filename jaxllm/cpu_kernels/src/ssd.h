// The state of one head of a state-space layer over a run of tokens, one after the other: the same bits in any run.
#pragma once
#include <string.h>

#include "kernels.h"
#include "simd.h"

namespace ISA {

// row = row * fade + put * b; what c reads of it.
INLINE float move_row(float* row, int size, float fade, float put, const float* b, const float* c) {
  const Floats fading = broadcast(fade), putting = broadcast(put);
  Floats total = broadcast(0);
  int i = 0;
  for (; i + LANES <= size; i += LANES) {
    const Floats moved = fma(putting, load(b + i), load(row + i) * fading);
    store(row + i, moved);
    total = fma(moved, load(c + i), total);
  }
  float rest = 0;
  for (; i < size; i++) {
    row[i] = row[i] * fade + put * b[i];
    rest += row[i] * c[i];
  }
  return sum(total) + rest;
}

static void run_state(const StateRun& r) {
  const int64_t channels = int64_t(r.heads) * r.dim, shared = int64_t(r.groups) * r.size;
  float lanes[LANES];
  for (int t = 0; t < r.tokens; t++) {
    const float *x = r.x + t * channels, *b = r.b + t * shared, *c = r.c + t * shared, dt = r.dt[int64_t(t) * r.heads];
    float* y = r.y + t * channels;
    store(lanes, exponential(broadcast(dt * r.a)));
    for (int d = 0; d < r.dim; d++) y[d] = move_row(r.state + int64_t(d) * r.size, r.size, lanes[0], dt * x[d], b, c) + r.skip * x[d];
    if (t + 1 == r.kept_length) memcpy(r.kept, r.state, size_t(r.dim) * r.size * sizeof(float));
  }
}

}  // namespace ISA
