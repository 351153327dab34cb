// The activation of a gated MLP, on panels.
#pragma once
#include <math.h>

#include "kernels.h"
#include "simd.h"

namespace ISA {

INLINE Floats negated(Floats x) { return broadcast(0) - x; }
INLINE Floats sigmoid_of(Floats x, Floats factor) { return x / (broadcast(1) + exponential(negated(factor))); }  // x sigmoid(factor)

template <Activation A> INLINE Floats activated(Floats x) {
  if constexpr (A == Activation::silu) return sigmoid_of(x, x);
  if constexpr (A == Activation::relu) return maximum(broadcast(0), x);
  if constexpr (A == Activation::relu2) return maximum(broadcast(0), x) * maximum(broadcast(0), x);
  if constexpr (A == Activation::gelu) {
    float lanes[LANES];
    store(lanes, x);
    for (int i = 0; i < LANES; i++) lanes[i] = 0.5f * lanes[i] * (1 + erff(lanes[i] * 0.70710678f));
    return load(lanes);
  }
  // gelu_tanh: x/2 (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
  return sigmoid_of(x, x * fma(broadcast(2 * 0.79788456f * 0.044715f), x * x, broadcast(2 * 0.79788456f)));
}

template <Activation A> static void gate_panel(int count, float* gate, const float* up) {
  for (int i = 0; i < count * PANEL_COLUMNS; i += LANES) store(gate + i, activated<A>(load(gate + i)) * load(up + i));
}

static void gate(Activation activation, int count, float* gate, const float* up) {
  switch (activation) {
    case Activation::silu: return gate_panel<Activation::silu>(count, gate, up);
    case Activation::gelu_tanh: return gate_panel<Activation::gelu_tanh>(count, gate, up);
    case Activation::gelu: return gate_panel<Activation::gelu>(count, gate, up);
    case Activation::relu: return gate_panel<Activation::relu>(count, gate, up);
    default: return gate_panel<Activation::relu2>(count, gate, up);
  }
}

}  // namespace ISA
