// Activations: RMS norm, then int8 codes with a scale per 32, or floats. Plain loops, for the compiler to vectorize.
#pragma once
#include <math.h>

#include "kernels.h"
#include "simd.h"

namespace ISA {

// A block that holds a NaN or an infinity takes a scale of NaN, so that its row's products come out NaN.
static void quantize_block(const float* x, int8_t* codes, RowBlock* out) {
  uint32_t top = 0;
  for (int i = 0; i < BLOCK; i++) {
    const uint32_t magnitude = bits_of_float(x[i]) & 0x7fffffff;
    top = larger(top, magnitude);
  }
  const float largest = float_of_bits(top);
  float scale = largest / 127, inverse = 127 / largest;
  if (top >= 0x7f800000) scale = float_of_bits(0x7fc00000), inverse = 0;
  if (largest < 1e-30f) scale = inverse = 0;
  const float round = 12582912.0f;  // adding it leaves no bits below one: rounds to nearest, ties to even
  int32_t rounded[BLOCK], first = 0, second = 0;
  for (int i = 0; i < BLOCK; i++) rounded[i] = top >= 0x7f800000 ? 0 : int32_t((x[i] * inverse + round) - round);
  for (int i = 0; i < BLOCK; i++) codes[i] = int8_t(rounded[i]);
  for (int i = 0; i < BLOCK / 2; i++) first += rounded[i];
  for (int i = BLOCK / 2; i < BLOCK; i++) second += rounded[i];
  *out = {scale, scale * float(first + second), -(first + second), -first};
}

static void normalise(const float* x, const Row& row, float* out) {
  Floats squares = broadcast(0);
  int i = 0;
  for (; i + LANES <= row.size; i += LANES) squares = fma(load(x + i), load(x + i), squares);
  float total = sum(squares);
  for (; i < row.size; i++) total += x[i] * x[i];
  const float factor = 1 / sqrtf(total / float(row.size) + row.epsilon);
  for (i = 0; i < row.size; i++) out[i] = x[i] * factor * (row.norm[i] + row.weight_offset);
}

static void prepare(const Row& row, const Activations& a, int m, float* scratch) {
  const float* x = (const float*)row.x;
  if (row.is_bf16) {
    const uint16_t* bits = (const uint16_t*)row.x;
    for (int i = 0; i < row.size; i++) scratch[i] = float_of_bf16(bits[i]);
    x = scratch;
  }
  if (row.norm) normalise(x, row, scratch), x = scratch;
  if (row.size < a.inputs) {
    if (x != scratch) memcpy(scratch, x, size_t(row.size) * 4);
    for (int i = row.size; i < a.inputs; i++) scratch[i] = 0;
    x = scratch;
  }
  if (a.codes) {
    const int blocks = a.inputs / BLOCK, panel = m / a.panel_rows, at = m % a.panel_rows;
    for (int b = 0; b < blocks; b++) {
      const int64_t index = (int64_t(panel) * blocks + b) * a.panel_rows + at;
      quantize_block(x + b * BLOCK, a.codes + index * BLOCK, a.blocks + index);
    }
  }
  if (a.values) memcpy(a.values + int64_t(m) * a.inputs, x, size_t(a.inputs) * 4);
  if (a.halves) {
    uint16_t* halves = a.halves + int64_t(m) * a.inputs;
    for (int i = 0; i < a.inputs; i++) halves[i] = bf16_of_float(x[i]);
  }
}

}  // namespace ISA
