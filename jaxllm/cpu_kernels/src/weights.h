// Weights of a softmax, and their sums.
#pragma once
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "simd.h"

namespace ISA {

// exp(x - most), which is zero below `threshold`, and where it is no normal number.
INLINE Floats weight_of(Floats x, Floats most, Floats threshold) {
  const Floats below = x - most, weight = where_greater(broadcast(-87.3f), below, broadcast(0), exponential(below));
  return where_greater(threshold, x, broadcast(0), weight);
}

static float weights(const float* x, int count, float most, float threshold, float* out) {
  Floats total = broadcast(0);
  int i = 0;
  for (; i + LANES <= count; i += LANES) {
    const Floats weight = weight_of(load(x + i), broadcast(most), broadcast(threshold));
    total = total + weight;
    if (out) store(out + i, weight);
  }
  if (i < count) {
    float lanes[LANES];
    for (int l = 0; l < LANES; l++) lanes[l] = i + l < count ? x[i + l] : -INFINITY;
    const Floats weight = weight_of(load(lanes), broadcast(most), broadcast(threshold));
    total = total + weight;
    store(lanes, weight);
    if (out) memcpy(out + i, lanes, (count - i) * sizeof(float));
  }
  return sum(total);
}

}  // namespace ISA
