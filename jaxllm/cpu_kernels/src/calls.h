// What the FFI handlers share: buffers checked and taken apart, activations prepared.
#pragma once
#include <string>
#include <vector>

#include "dispatch.h"
#include "team.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

// Bytes that live as long as the thread, and grow.
class Scratch {
 public:
  void clear() { used_ = 0; }
  void reserve(size_t bytes) {
    if (bytes + 64 > room_.size()) room_.resize(bytes + 64);
  }
  // Room must have been reserved.
  template <class T>
  T* take(size_t count) {
    const size_t base = reinterpret_cast<size_t>(room_.data()), at = (base + used_ + 63) / 64 * 64 - base;
    used_ = at + count * sizeof(T);
    return reinterpret_cast<T*>(room_.data() + at);
  }

 private:
  std::vector<uint8_t> room_;
  size_t used_ = 0;
};

inline int64_t rows_of(const ffi::AnyBuffer& x) {
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < x.dimensions().size(); i++) rows *= x.dimensions()[i];
  return rows;
}

inline ffi::Error wrong(const std::string& what) { return ffi::Error::InvalidArgument(what); }

// The operands of a call that follow those which every call has, one after another.
class Operands {
 public:
  explicit Operands(ffi::RemainingArgs rest) : rest_(rest) {}

  // `tiles` [groups, blocks, bytes], or the first of several, as a matrix of `rows` outputs, and its scales
  // [groups, runs, 16] if it has any.
  ffi::Error matrix(int64_t format, int64_t rows, int64_t inputs, Matrix& out) {
    if (format < 0 || format >= int64_t(Format::count)) return wrong("no format " + std::to_string(format));
    const Layout form = layout(Format(format));
    const auto tiles = rest_.get<ffi::AnyBuffer>(next_++);
    if (!tiles || tiles->element_type() != ffi::U8 || tiles->dimensions().size() < 3 || tiles->dimensions().back() != form.bytes())
      return wrong("tiles must be uint8 [groups, blocks, " + std::to_string(form.bytes()) + "]");
    const auto shape = tiles->dimensions().last(3);
    if (shape[0] * ROWS < rows) return wrong(std::to_string(shape[0]) + " groups do not hold " + std::to_string(rows) + " rows");
    if (shape[1] != (inputs + form.inputs - 1) / form.inputs)
      return wrong(std::to_string(shape[1]) + " blocks of " + std::to_string(form.inputs) + " do not hold " + std::to_string(inputs) + " inputs");
    out = {Format(format), static_cast<const uint8_t*>(tiles->untyped_data()), int(rows), int(shape[0]), int(shape[1] * form.inputs), nullptr, 0};
    return has_scales(out.format) ? scales(out) : ffi::Error::Success();
  }

  // Null where the call has none.
  const float* floats(bool there) {
    if (!there) return nullptr;
    const auto found = rest_.get<ffi::AnyBuffer>(next_++);
    return found ? found->typed_data<float>() : nullptr;
  }

 private:
  ffi::Error scales(Matrix& w) {
    const auto found = rest_.get<ffi::AnyBuffer>(next_++);
    if (!found || found->element_type() != ffi::F32 || found->dimensions().size() < 3) return wrong("scales must be float32 [groups, runs, 16]");
    const auto shape = found->dimensions().last(3);
    const bool whole = shape[1] > 0 && w.inputs % (shape[1] * BLOCK) == 0 && (shape[1] == 1 || !layout(w.format).integer());
    if (shape[0] != w.groups || shape[2] != ROWS || !whole)
      return wrong("scales [" + std::to_string(shape[0]) + ", " + std::to_string(shape[1]) + ", " + std::to_string(shape[2]) + "] do not fit the tiles");
    w.scales = found->typed_data<float>(), w.runs = int(shape[1]);
    return ffi::Error::Success();
  }

  ffi::RemainingArgs rest_;
  size_t next_ = 0;
};

inline bool is_float(const ffi::AnyBuffer& x) { return x.element_type() == ffi::F32 || x.element_type() == ffi::BF16; }

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

// The activations of a call: made ready in a first phase, row by row, in the forms that the matrices want.
class Prepared {
 public:
  Prepared(const ffi::AnyBuffer& x, const float* norm, float epsilon, float offset, const std::vector<Matrix>& matrices)
      : Prepared(x, norm, epsilon, offset, matrices, panels_of(int(rows_of(x)), PANEL_ROWS)) {}

  Prepared(const ffi::AnyBuffer& x, const float* norm, float epsilon, float offset, const std::vector<Matrix>& matrices,
           std::vector<PanelRows> panels)
      : x_(x), norm_(norm), epsilon_(epsilon), offset_(offset), panels_(std::move(panels)) {
    static thread_local Scratch scratch;  // the caller's: it stays in the call until all units are done
    bool integer = false, wide = false, halves = false;
    for (const Matrix& w : matrices) {
      integer |= layout(w.format).integer();
      halves |= w.format == Format::bf16 && kernels().has_bf16;
      wide |= w.format == Format::f32 || w.format == Format::e4m3 || (w.format == Format::bf16 && !kernels().has_bf16);
      activations_.inputs = std::max(activations_.inputs, w.inputs);
    }
    activations_.panel_rows = 1;
    for (const PanelRows& panel : panels_) activations_.panel_rows = std::max(activations_.panel_rows, panel.count);
    const size_t inputs = activations_.inputs, blocks = inputs / BLOCK, rows = panels_.size() * activations_.panel_rows;
    scratch.clear();
    scratch.reserve(rows * (inputs * (integer + 2 * halves + 4 * wide) + integer * blocks * sizeof(RowBlock)) + 256);
    if (integer) {
      activations_.codes = scratch.take<int8_t>(rows * inputs);
      activations_.blocks = scratch.take<RowBlock>(rows * blocks);
    }
    if (halves) activations_.halves = scratch.take<uint16_t>(rows * inputs);
    if (wide) activations_.values = scratch.take<float>(rows * inputs);
  }

  const Activations& get() const { return activations_; }
  int panels() const { return int(panels_.size()); }
  const PanelRows& panel(int p) const { return panels_[p]; }
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

  // Calls work(panel, matrix, first group, one or two groups).
  template <class F>
  void visit(int unit, F&& work) const {
    const int panel = unit / per_panel_;
    int rest = unit % per_panel_, matrix = 0;
    for (int chunks; rest >= (chunks = (groups_[matrix] + step_ - 1) / step_); matrix++) rest -= chunks;
    const int begin = rest * step_, end = std::min(begin + step_, groups_[matrix]);
    for (int g = begin; g < end; g += 2) work(panel, matrix, g, std::min(2, end - g));
  }

 private:
  std::vector<int> groups_;
  int panels_, step_, per_panel_ = 0;
};
