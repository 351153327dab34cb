// A head's channels before attention: RMS norm, then rotary embedding (Su et al. 2021, arXiv:2104.09864).
#pragma once
#include "kernels.h"
#include "prepare.h"
#include "simd.h"

namespace ISA {

static void rotate(const HeadInput& h, const void* x, int token, const float* norm, float* out) {
  const Row row{x, h.is_bf16, h.dim, norm, h.epsilon, h.weight_offset};
  const float* channels = (const float*)x;
  if (h.is_bf16) {
    widen_bf16((const uint16_t*)x, h.dim, out);
    channels = out;
  }
  if (norm) normalise(channels, row, out);
  else if (channels != out) memcpy(out, channels, size_t(h.dim) * 4);
  if (!h.cos) return;
  const float *cos = h.cos + int64_t(token) * h.half, *sin = h.sin + int64_t(token) * h.half;
  if (h.interleaved) {
    for (int i = 0; i < h.half; i++) {
      const float a = out[2 * i], b = out[2 * i + 1];
      out[2 * i] = a * cos[i] - b * sin[i];
      out[2 * i + 1] = b * cos[i] + a * sin[i];
    }
    return;
  }
  float* other = out + h.half;
  int i = 0;
  for (; i + LANES <= h.half; i += LANES) {
    const Floats a = load(out + i), b = load(other + i), c = load(cos + i), s = load(sin + i);
    store(out + i, a * c - b * s);
    store(other + i, b * c + a * s);
  }
  for (; i < h.half; i++) {
    const float a = out[i], b = other[i];
    out[i] = a * cos[i] - b * sin[i];
    other[i] = b * cos[i] + a * sin[i];
  }
}

}  // namespace ISA
