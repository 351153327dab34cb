// What the checks of one instruction set's kernels share. The table under test is dispatch.h's kernels().
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <vector>

#include "dispatch.h"
#include "half.h"

void check_attention();
void check_heads();
void check_gates();
void check_norms();
uint64_t check_products();  // a hash of the results

#define CHECK(condition, ...)                                                       \
  do {                                                                              \
    if (condition) break;                                                           \
    printf("%s: %s:%d: %s: ", kernels().name, __FILE__, __LINE__, #condition);      \
    printf(__VA_ARGS__);                                                            \
    printf("\n");                                                                   \
    exit(1);                                                                        \
  } while (0)

// Numbers that float64 gives, in the order in which they are asked for: computed for the first instruction set that is
// checked, or by another program, as an emulator is slow at that.
struct Expected {
  std::vector<double> numbers;
  size_t used = 0;

  template <class F>
  const double* next(size_t count, F compute) {
    if (used == numbers.size()) numbers.resize(used + count), compute(&numbers[used]);
    used += count;
    CHECK(used <= numbers.size(), "%zu numbers are not expected, but %zu", used, numbers.size());
    return &numbers[used - count];
  }
  void begin_again() {
    CHECK(used == numbers.size(), "of %zu numbers %zu are used", numbers.size(), used);
    used = 0;
  }
};
extern Expected expected;

// The same numbers on every machine.
struct Random {
  uint64_t state;

  explicit Random(uint64_t seed) : state(seed * 0x9e3779b97f4a7c15 + 1) {}
  uint32_t bits() {
    state = state * 6364136223846793005 + 1442695040888963407;
    return uint32_t(state >> 32);
  }
  float uniform() { return float(bits() >> 8) * 0x1p-23f - 1; }  // [-1, 1)
  std::vector<float> floats(size_t count) {
    std::vector<float> x(count);
    for (float& v : x) v = uniform();
    return x;
  }
};

inline std::vector<uint16_t> bf16s_of(const std::vector<float>& x) {
  std::vector<uint16_t> bits;
  for (float v : x) bits.push_back(bf16_of_float(v));
  return bits;
}

inline std::vector<float> floats_of(const std::vector<uint16_t>& bits) {
  std::vector<float> x;
  for (uint16_t b : bits) x.push_back(float_of_bf16(b));
  return x;
}
