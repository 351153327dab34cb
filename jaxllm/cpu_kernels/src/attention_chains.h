// Attention of a few query vectors with the bits that AMX's tiles give: how they add up, for decode rows.
#pragma once

namespace ISA {

// Sums as tiles of bf16 add them up: of 32 inputs the even ones in one chain and the odd ones in another; then both, then the sums before.
// Float instructions are no slower at that than those for bf16, which add up in another order.
template <int N> struct Chains {
  static constexpr int pairs = 16;
  Floats sums[N], even[N], odd[N];

  MEMBER void begin() {
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) even[i] = odd[i] = broadcast(0);
  }
  MEMBER void add(int i, Floats a, Floats x, Floats b, Floats y) { even[i] = fma(a, x, even[i]), odd[i] = fma(b, y, odd[i]); }
  MEMBER void end() {
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) sums[i] = sums[i] + (even[i] + odd[i]);
  }
};

template <int R, int C> static void score_chains(const float* keys, const float* query, int stride, int steps, float* scores) {
  Chains<R * C> chains;
#pragma GCC unroll 8
  for (int i = 0; i < R * C; i++) chains.sums[i] = broadcast(0);
  for (int step = 0; step < steps;) {
    chains.begin();
    for (const int end = step + chains.pairs; step < end; step++, keys += KEY_BLOCK) {
      Ints pairs[C];
#pragma GCC unroll 2
      for (int c = 0; c < C; c++) pairs[c] = load_bits((const uint8_t*)(keys + c * LANES));
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const Floats x = broadcast(query[r * stride + 2 * step]), y = broadcast(query[r * stride + 2 * step + 1]);
#pragma GCC unroll 2
        for (int c = 0; c < C; c++) chains.add(r * C + c, low_bf16(pairs[c]), x, high_bf16(pairs[c]), y);
      }
    }
    chains.end();
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int c = 0; c < C; c++) store(scores + r * KEY_BLOCK + c * LANES, chains.sums[r * C + c]);
}

// As weigh_few does, weights rounded to bf16.
template <int G>
static void weigh_chains(const uint16_t* const* rows, int n, const float* weights, int dim, int stride, const float* factor, float* sums, Ahead& ahead, int share) {
  float rounded[G][KEY_BLOCK];
  for (int g = 0; g < G; g++)
    for (int j = 0; j < n; j += LANES) store(rounded[g] + j, (Floats)rounded_to_bf16(load(weights + g * KEY_BLOCK + j)));
  for (int d = 0; d < dim; d += Chained::chunk) {
    Chains<2 * G> chains;
#pragma GCC unroll 8
    for (int i = 0; i < 2 * G; i++) chains.sums[i] = load(sums + i / 2 * stride + d + i % 2 * LANES) * broadcast(factor[i / 2]);
    for (int j = 0; j < n;) {
      chains.begin();
      for (const int end = smaller(n, j + 2 * chains.pairs); j < end; j += 2) {
        if (j % WEIGHED == 0) ahead.some(share);
        const Ints even = load_bits((const uint8_t*)(rows[j] + d)), odd = load_bits((const uint8_t*)(rows[j + 1] + d));
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) {
          const Floats x = broadcast(rounded[g][j]), y = broadcast(rounded[g][j + 1]);
          chains.add(2 * g, low_bf16(even), x, low_bf16(odd), y);
          chains.add(2 * g + 1, high_bf16(even), x, high_bf16(odd), y);
        }
      }
      chains.end();
    }
#pragma GCC unroll 8
    for (int i = 0; i < 2 * G; i++) store(sums + i / 2 * stride + d + i % 2 * LANES, chains.sums[i]);
  }
}

}  // namespace ISA
