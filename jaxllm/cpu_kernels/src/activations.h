// The activations of a product: rows in panels, made ready in a first phase, and the units of work that take them.
#pragma once
#include <string.h>

#include <algorithm>
#include <vector>

#include "calls.h"
#include "scratch.h"
#include "team.h"

// Whether all bytes are zeros; where they are not, nearly always the first ones say so.
inline bool all_zero(const char* bytes, int64_t count) { return !count || (!bytes[0] && !memcmp(bytes, bytes + 1, count - 1)); }

// How many rows of x there are before the zeros that fill it to its end: those are a step's padding.
inline int rows_before_zeros(const ffi::AnyBuffer& x) {
  const int64_t bytes = x.dimensions().back() * (x.element_type() == ffi::BF16 ? 2 : 4);
  const char* const first = static_cast<const char*>(x.untyped_data());
  int rows = int(rows_of(x));
  while (rows && all_zero(first + (rows - 1) * bytes, bytes)) rows--;
  return rows;
}

// Rows [begin, begin + count) of x: what one panel holds.
struct PanelRows {
  int begin, count;
};

// All rows, `most` to a panel.
inline std::vector<PanelRows> panels_of(int rows, int most) {
  std::vector<PanelRows> panels;
  for (int begin = 0; begin < rows; begin += most) panels.push_back({begin, std::min(most, rows - begin)});
  return panels;
}

// Room in the forms that `matrices` want of their inputs, and as floats if somebody else wants those. It is the caller's, who stays in
// the call until all units are done; activations that live beside each other have a USE of their own.
template <class USE> Activations room_for(const std::vector<Matrix>& matrices, int panels, int panel_rows, bool wide) {
  static thread_local Scratch scratch;
  Activations a{};
  bool integer = false, halves = false;
  for (const Matrix& w : matrices) {
    integer |= w.takes_codes();
    halves |= w.in_bf16 || (w.format == Format::bf16 && kernels().has_bf16);
    wide |= w.format == Format::f32 || w.format == Format::e4m3 || (w.format == Format::bf16 && !kernels().has_bf16);
    a.inputs = std::max(a.inputs, w.inputs);
  }
  a.panel_rows = panel_rows;
  const size_t inputs = a.inputs, blocks = inputs / BLOCK, rows = size_t(panels) * panel_rows;
  scratch.clear();
  scratch.reserve(rows * (inputs * (integer + 2 * halves + 4 * wide) + integer * blocks * sizeof(RowBlock)) + 1280);
  if (integer) {
    a.codes = scratch.take<int8_t>(rows * inputs);
    a.blocks = scratch.take<RowBlock>(rows * blocks);
  }
  if (halves) a.halves = scratch.take<uint16_t>(rows * inputs);
  if (wide) a.values = scratch.take<float>(rows * inputs);
  return a;
}

// The activations of a call: made ready in a first phase, row by row, in the forms that the matrices want. Rows of zeros at
// the end are left out, unless the caller says which rows there are.
class Prepared {
 public:
  Prepared(const ffi::AnyBuffer& x, const float* norm, float epsilon, float offset, const std::vector<Matrix>& matrices, bool floats = false)
      : Prepared(x, norm, epsilon, offset, matrices, panels_of(rows_before_zeros(x), PANEL_ROWS), floats) {}

  Prepared(const ffi::AnyBuffer& x, const float* norm, float epsilon, float offset, const std::vector<Matrix>& matrices,
           std::vector<PanelRows> panels, bool floats = false)
      : x_(x), norm_(norm), epsilon_(epsilon), offset_(offset), panels_(std::move(panels)) {
    int most = 1;
    for (const PanelRows& panel : panels_) most = std::max(most, panel.count);
    activations_ = room_for<Prepared>(matrices, int(panels_.size()), most, floats);
  }

  const Activations& get() const { return activations_; }
  int panels() const { return int(panels_.size()); }
  const PanelRows& panel(int p) const { return panels_[p]; }
  const std::vector<PanelRows>& all() const { return panels_; }
  int rows() const { return panels_.empty() ? 0 : panels_.back().begin + panels_.back().count; }  // those behind are zeros
  int panel_rows() const { return activations_.panel_rows; }

  Phase phase() {
    const int most = activations_.panel_rows, step = std::max(1, std::min({16, most, panels() * most / (2 * threads())}));
    const int per_panel = (most + step - 1) / step;
    return {panels() * per_panel, [this, step, per_panel](int unit) { prepare(unit / per_panel, unit % per_panel * step, step); }};
  }

 private:
  void prepare(int p, int first, int count) {
    static thread_local std::vector<float> scratch;
    if (scratch.size() < size_t(activations_.inputs)) scratch.resize(activations_.inputs);
    const bool is_bf16 = x_.element_type() == ffi::BF16;
    const int64_t size = x_.dimensions().back();
    for (int m = first; m < std::min(first + count, panels_[p].count); m++) {
      const void* x = static_cast<const uint8_t*>(x_.untyped_data()) + (panels_[p].begin + m) * size * (is_bf16 ? 2 : 4);
      kernels().prepare({x, is_bf16, int(size), norm_, epsilon_, offset_}, activations_, p * panel_rows() + m, scratch.data());
    }
  }

  ffi::AnyBuffer x_;
  const float* norm_;
  float epsilon_, offset_;
  std::vector<PanelRows> panels_;
  Activations activations_{};
};

// Units of work over the groups of several matrices and the panels of the activations.
class Units {
 public:
  Units(const std::vector<int>& groups, int panels) : groups_(groups), panels_(panels) {
    int total = 0;
    for (int count : groups) total += count;
    const int share = int(int64_t(total) * panels / (threads() * 4));
    step_ = std::max(2, std::min(24, share)) / 2 * 2;  // even: products take groups in pairs
    for (int count : groups) per_panel_ += (count + step_ - 1) / step_;
  }

  int count() const { return per_panel_ * panels_; }

  // What a unit is: groups [begin, end) of a matrix, for a panel.
  struct Unit {
    int panel, matrix, begin, end;

    // Calls work(panel, matrix, first group, one or two groups).
    template <class F> void visit(F&& work) const {
      for (int g = begin; g < end; g += 2) work(panel, matrix, g, std::min(2, end - g));
    }
  };

  Unit operator[](int unit) const {
    int rest = unit % per_panel_, matrix = 0;
    for (int chunks; rest >= (chunks = (groups_[matrix] + step_ - 1) / step_); matrix++) rest -= chunks;
    return {unit / per_panel_, matrix, rest * step_, std::min((rest + 1) * step_, groups_[matrix])};
  }

  template <class F> void visit(int unit, F&& work) const { (*this)[unit].visit(work); }

 private:
  std::vector<int> groups_;
  int panels_, step_, per_panel_ = 0;
};
