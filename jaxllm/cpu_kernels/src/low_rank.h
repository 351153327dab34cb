// What one adapter adds to the products of some tokens: first their inputs onto its few ranks, then these onto the outputs.
#pragma once
#include "half.h"
#include "kernels.h"
#include "simd.h"

namespace ISA {

constexpr int TOKENS_AT_ONCE = 4, ROWS_AT_ONCE = 4;
constexpr int LINE = 32;  // bf16 numbers that are fetched together

// Rows are short, so that the processor does not see ahead where the next ones are.
constexpr int ROWS_AHEAD = 16, COLUMNS_AHEAD = 256;

// inner[t][k] = scale * a[k] . x of TOKENS tokens from `first_token` of the run on, and of `rows` rows from `first_row` on.
template <int TOKENS> static void narrow_tokens(const AdapterRun& run, int first_token, int first_row, int rows) {
  const int whole = run.inputs / LANES * LANES;
  const float* x[TOKENS];
  for (int t = 0; t < TOKENS; t++) x[t] = run.x + int64_t(run.tokens[first_token + t]) * run.stride;
  for (int row = first_row; row < first_row + rows; row += ROWS_AT_ONCE) {
    const int count = first_row + rows - row < ROWS_AT_ONCE ? first_row + rows - row : ROWS_AT_ONCE;
    const uint16_t* a[ROWS_AT_ONCE];
    for (int k = 0; k < ROWS_AT_ONCE; k++) a[k] = run.a + int64_t(row + (k < count ? k : 0)) * run.inputs;
    Floats sums[TOKENS][ROWS_AT_ONCE];
    for (int t = 0; t < TOKENS; t++)
      for (int k = 0; k < ROWS_AT_ONCE; k++) sums[t][k] = broadcast(0);
    for (int i = 0; i < whole; i += LANES) {
      Floats weights[ROWS_AT_ONCE];
      for (int k = 0; i % LINE == 0 && k < ROWS_AT_ONCE; k++) __builtin_prefetch(a[k] + int64_t(ROWS_AHEAD) * run.inputs + i, 0, 2);
      for (int k = 0; k < ROWS_AT_ONCE; k++) weights[k] = load_bf16(a[k] + i);
      for (int t = 0; t < TOKENS; t++) {
        const Floats values = load(x[t] + i);
        for (int k = 0; k < ROWS_AT_ONCE; k++) sums[t][k] = fma(weights[k], values, sums[t][k]);
      }
    }
    for (int t = 0; t < TOKENS; t++)
      for (int k = 0; k < count; k++) {
        float total = sum(sums[t][k]);
        for (int i = whole; i < run.inputs; i++) total += float_of_bf16(a[k][i]) * x[t][i];
        run.inner[int64_t(first_token + t) * run.ranks + row + k] = run.scale(first_token + t) * total;
      }
  }
}

static void narrow(const AdapterRun& run, int first_row, int rows) {
  int token = 0;
  for (; token + TOKENS_AT_ONCE <= run.count; token += TOKENS_AT_ONCE) narrow_tokens<TOKENS_AT_ONCE>(run, token, first_row, rows);
  for (; token < run.count; token++) narrow_tokens<1>(run, token, first_row, rows);
}

// The product itself of one of a run's tokens, column `first` of which is the first that is there; null where nothing is made of it.
INLINE const float* base_of(const AdapterRun& run, const Target& target, int token, int first) {
  return run.gain && target.base ? target.base + int64_t(run.tokens[token] - target.row) * target.base_stride - first : nullptr;
}

// out[t] += inner[t] @ b + gain * base[t] of TOKENS tokens, in the outputs of a part from `column` to `end`; VECTORS of these at a time.
template <int TOKENS, int VECTORS>
static int widen_tokens(const AdapterRun& run, const Target& target, int first_token, int first, int column, int end) {
  constexpr int STEP = VECTORS * LANES;
  const int rank = run.own_rank(target.part);
  float* out[TOKENS];
  const float *inner[TOKENS], *base[TOKENS];
  for (int t = 0; t < TOKENS; t++) {
    out[t] = target.out + int64_t(run.tokens[first_token + t] - target.row) * target.stride;
    inner[t] = run.inner + int64_t(first_token + t) * run.ranks + target.part * run.rank;
    base[t] = base_of(run, target, first_token + t, first);
  }
  for (; column + STEP <= end; column += STEP) {
    Floats sums[TOKENS][VECTORS];
    for (int t = 0; t < TOKENS; t++)
      for (int v = 0; v < VECTORS; v++) sums[t][v] = load(out[t] + column + v * LANES);
    for (int t = 0; t < TOKENS; t++)
      for (int v = 0; base[t] && v < VECTORS; v++) {
        const Floats gain = load_bf16(run.gain + target.before + column + v * LANES) * broadcast(run.scale(first_token + t));
        sums[t][v] = fma(gain, load(base[t] + column + v * LANES), sums[t][v]);
      }
    for (int r = 0; r < rank; r++) {
      const uint16_t* b = run.b + int64_t(r) * run.outputs + target.before + column;
      Floats weights[VECTORS];
      for (int v = 0; v < VECTORS * LANES; v += LINE) __builtin_prefetch(b + COLUMNS_AHEAD + v, 0, 2);
      for (int v = 0; v < VECTORS; v++) weights[v] = load_bf16(b + v * LANES);
      for (int t = 0; t < TOKENS; t++)
        for (int v = 0; v < VECTORS; v++) sums[t][v] = fma(weights[v], broadcast(inner[t][r]), sums[t][v]);
    }
    for (int t = 0; t < TOKENS; t++)
      for (int v = 0; v < VECTORS; v++) store(out[t] + column + v * LANES, sums[t][v]);
  }
  return column;
}

// The same, one output after another: fewer than a vector has.
static void widen_rest(const AdapterRun& run, const Target& target, int token, int first, int column, int end) {
  float* const out = target.out + int64_t(run.tokens[token] - target.row) * target.stride;
  const float* const inner = run.inner + int64_t(token) * run.ranks + target.part * run.rank;
  const float* const base = base_of(run, target, token, first);
  const int rank = run.own_rank(target.part);
  for (; column < end; column++) {
    float total = out[column];
    if (base) total += float_of_bf16(run.gain[target.before + column]) * run.scale(token) * base[column];
    for (int r = 0; r < rank; r++) total += float_of_bf16(run.b[int64_t(r) * run.outputs + target.before + column]) * inner[r];
    out[column] = total;
  }
}

static void widen(const AdapterRun& run, const Target& target, int first, int columns) {
  const int end = first + columns;
  int token = 0;
  for (; token + TOKENS_AT_ONCE <= run.count; token += TOKENS_AT_ONCE) {
    int column = widen_tokens<TOKENS_AT_ONCE, 2>(run, target, token, first, first, end);
    column = widen_tokens<TOKENS_AT_ONCE, 1>(run, target, token, first, column, end);
    for (int t = 0; t < TOKENS_AT_ONCE; t++) widen_rest(run, target, token + t, first, column, end);
  }
  for (; token < run.count; token++) {  // a long stretch of each row of the weights, for one token does not keep them
    int column = widen_tokens<1, 8>(run, target, token, first, first, end);
    column = widen_tokens<1, 1>(run, target, token, first, column, end);
    widen_rest(run, target, token, first, column, end);
  }
}

}  // namespace ISA
