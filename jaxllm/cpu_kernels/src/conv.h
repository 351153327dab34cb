// A causal depthwise convolution over runs of tokens, whose last inputs are a state of each sequence.
#pragma once
#include <string.h>

#include "gate.h"
#include "kernels.h"
#include "simd.h"

namespace ISA {

// The next LANES of `count` numbers, floats or bits of bf16; zeros after the last.
INLINE Floats input_at(const void* x, bool is_bf16, int64_t at, int count) {
  if (count >= LANES) return is_bf16 ? load_bf16((const uint16_t*)x + at) : load((const float*)x + at);
  float lanes[LANES] = {};
  for (int i = 0; i < count; i++) lanes[i] = is_bf16 ? float_of_bf16(((const uint16_t*)x)[at + i]) : ((const float*)x)[at + i];
  return load(lanes);
}

INLINE void store_some(float* out, Floats v, int count) {
  if (count >= LANES) return store(out, v);
  float lanes[LANES];
  store(lanes, v);
  memcpy(out, lanes, size_t(count) * sizeof(float));
}

// The inputs of channels [first, first + count) at places [length - reach, length) of the run, from before it where negative.
static void last_inputs(const Convolution& c, int begin, int length, const float* before, int first, int count, float* out) {
  const int reach = c.taps - 1;
  for (int j = 0; j < reach; j++) {
    const int place = length - reach + j;  // `out` may be `before`: rows move towards the first
    float* row = out + int64_t(j) * c.channels + first;
    if (place < 0) {
      memmove(row, before + int64_t(reach + place) * c.channels + first, size_t(count) * sizeof(float));
      continue;
    }
    for (int i = 0; i < count; i += LANES)
      store_some(row + i, input_at(c.x, c.is_bf16, int64_t(begin + place) * c.channels + first + i, count - i), count - i);
  }
}

static void convolve(const Convolution& c, const Sequences& s, int first, int count, float* taps) {
  const int reach = c.taps - 1, width = (count + LANES - 1) / LANES * LANES;
  memset(taps, 0, size_t(c.taps) * width * sizeof(float));
  for (int i = 0; i < count; i++)
    for (int j = 0; j < c.taps; j++) taps[j * width + i] = c.weights[int64_t(first + i) * c.taps + j];
  for (int q = 0; q < s.count; q++) {
    const int begin = s.start[q], length = s.start[q + 1] - begin;
    float* state = c.states + int64_t(s.row[q]) * reach * c.channels;
    for (int t = 0; t < length; t++) {
      for (int i = 0; i < count; i += LANES) {
        const int rest = count - i;
        const int64_t at = int64_t(begin + t) * c.channels + first + i;
        Floats sum = input_at(c.x, c.is_bf16, at, rest) * load(taps + reach * width + i);
        for (int back = 1; back <= reach; back++) {
          const Floats seen = t >= back ? input_at(c.x, c.is_bf16, at - int64_t(back) * c.channels, rest)
                                        : input_at(state, false, int64_t(reach + t - back) * c.channels + first + i, rest);
          sum = fma(seen, load(taps + (reach - back) * width + i), sum);
        }
        if (c.bias) sum = sum + input_at(c.bias, false, first + i, rest);
        store_some(c.out + at, c.silu ? activated<Activation::silu>(sum) : sum, rest);
      }
    }
    if (s.kept_length[q]) last_inputs(c, begin, s.kept_length[q], state, first, count, c.states + int64_t(s.kept_row[q]) * reach * c.channels);
    last_inputs(c, begin, length, state, first, count, state);
  }
}

}  // namespace ISA
