// Activations: RMS norm, then int8 codes with a scale per 32, or floats.
#pragma once
#include <math.h>

#include "kernels.h"
#include "simd.h"

namespace ISA {

// A block that holds a NaN or an infinity takes a scale of NaN, so that its row's products come out NaN.
static void quantize_block(const float* x, int8_t* codes, RowBlock* out) {
  constexpr int VECTORS = BLOCK / LANES;
  Floats v[VECTORS];
#pragma GCC unroll 4
  for (int i = 0; i < VECTORS; i++) v[i] = load(x + i * LANES);
  const float most = magnitude(v);
  const bool finite = most - most == 0, tiny = most < 1e-30f;
  const float scale = finite ? (tiny ? 0 : most / 127) : float_of_bits(0x7fc00000), inverse = tiny ? 0 : 127 / most;
  const Floats round = broadcast(12582912.0f);  // adding it leaves no bits below one: rounds to nearest, ties to even
#pragma GCC unroll 4
  for (int i = 0; i < VECTORS; i++) v[i] = finite ? (v[i] * broadcast(inverse) + round) - round : broadcast(0);
  store_codes(codes, v);
  int sums[2];
  sums_of_codes(codes, sums);
  *out = {scale, scale * float(sums[0] + sums[1]), -(sums[0] + sums[1]), -sums[0]};
}

static void normalise(const float* x, const Row& row, float* out) {
  Floats squares = broadcast(0);
  int i = 0;
  for (; i + LANES <= row.size; i += LANES) squares = fma(load(x + i), load(x + i), squares);
  float total = sum(squares);
  for (; i < row.size; i++) total += x[i] * x[i];
  const float factor = 1 / sqrtf(total / float(row.size) + row.epsilon), offset = row.weight_offset;
  const float* norm = row.norm;
  for (i = 0; i + LANES <= row.size; i += LANES) store(out + i, load(x + i) * broadcast(factor) * (load(norm + i) + broadcast(offset)));
  for (; i < row.size; i++) out[i] = x[i] * factor * (norm[i] + offset);
}

static void normalise_row(const Row& row, bool centred, const float* bias, void* out, float* scratch) {
  float* const y = row.is_bf16 ? scratch : (float*)out;
  const float* x = (const float*)row.x;
  if (row.is_bf16) widen_bf16((const uint16_t*)row.x, row.size, y), x = y;
  int i = 0;
  if (centred) {
    Floats lanes = broadcast(0);
    for (; i + LANES <= row.size; i += LANES) lanes = lanes + load(x + i);
    float total = sum(lanes);
    for (; i < row.size; i++) total += x[i];
    const float mean = total / float(row.size);
    for (i = 0; i < row.size; i++) y[i] = x[i] - mean;
    x = y;
  }
  normalise(x, row, y);
  for (i = 0; bias && i < row.size; i++) y[i] += bias[i];
  if (row.is_bf16) narrow_bf16(y, row.size, (uint16_t*)out);
}

// 32 inputs of row `m`, in the forms that are wanted.
static void prepare_block(const float* x, const Activations& a, int m, int block) {
  const int64_t at = int64_t(m) * a.inputs + block * BLOCK;
  if (a.codes) {
    const int64_t index = a.place(m, block);
    quantize_block(x, a.codes + index * BLOCK, a.blocks + index);
  }
  if (a.values) memcpy(a.values + at, x, BLOCK * sizeof(float));
#if defined(__AMX_BF16__)
  if (a.halves) narrow_bf16(x, BLOCK, a.halves + a.place(m, block) * BLOCK);
#else
  if (a.halves) narrow_bf16(x, BLOCK, a.halves + at);
#endif
}

static void prepare_panel(const float* panel, int count, const Activations& a, int row, int block) {
  for (int m = 0; m < count; m++) prepare_block(panel + m * PANEL_COLUMNS, a, row + m, block);
}

static void prepare(const Row& row, const Activations& a, int m, float* scratch) {
  const float* x = (const float*)row.x;
  if (row.is_bf16) {
    widen_bf16((const uint16_t*)row.x, row.size, scratch);
    x = scratch;
  }
  if (row.norm) normalise(x, row, scratch), x = scratch;
  if (row.size < a.inputs) {
    if (x != scratch) memcpy(scratch, x, size_t(row.size) * 4);
    for (int i = row.size; i < a.inputs; i++) scratch[i] = 0;
    x = scratch;
  }
  for (int b = 0; b < a.inputs / BLOCK; b++) prepare_block(x + b * BLOCK, a, m, b);
}

}  // namespace ISA
