// What the FFI handlers share: buffers checked and taken apart.
#pragma once
#include <string.h>

#include <optional>
#include <string>
#include <vector>

#include "dispatch.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

inline int64_t rows_of(const ffi::AnyBuffer& x) {
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < x.dimensions().size(); i++) rows *= x.dimensions()[i];
  return rows;
}

// Copies a buffer that XLA did not give in place.
template <class In, class Out> void settle(const In& in, Out& out) {
  if (in.untyped_data() != out->untyped_data()) memcpy(out->untyped_data(), in.untyped_data(), in.size_bytes());
}

inline ffi::Error wrong(const std::string& what) { return ffi::Error::InvalidArgument(what); }

constexpr int64_t IN_BF16 = 64;  // added to the format of a matrix whose products are to be those of bf16

// The operands of a call that follow those which every call has, one after another.
class Operands {
 public:
  explicit Operands(ffi::RemainingArgs rest) : rest_(rest) {}

  // `tiles` [groups, blocks, bytes], or the first of several, as a matrix of `rows` outputs, and its scales
  // [groups, runs, 16] if it has any.
  ffi::Error matrix(int64_t format, int64_t rows, int64_t inputs, Matrix& out) {
    const bool in_bf16 = format >= IN_BF16;
    format %= IN_BF16;
    if (format < 0 || format >= int64_t(Format::count)) return wrong("no format " + std::to_string(format));
    const Layout form = layout(Format(format));
    const auto tiles = rest_.get<ffi::AnyBuffer>(next_++);
    if (!tiles || tiles->element_type() != ffi::U8 || tiles->dimensions().size() < 3 || tiles->dimensions().back() != form.bytes())
      return wrong("tiles must be uint8 [groups, blocks, " + std::to_string(form.bytes()) + "]");
    const auto shape = tiles->dimensions().last(3);
    if (shape[0] * ROWS < rows) return wrong(std::to_string(shape[0]) + " groups do not hold " + std::to_string(rows) + " rows");
    if (shape[1] != (inputs + form.inputs - 1) / form.inputs)
      return wrong(std::to_string(shape[1]) + " blocks of " + std::to_string(form.inputs) + " do not hold " + std::to_string(inputs) + " inputs");
    out = {Format(format), static_cast<const uint8_t*>(tiles->untyped_data()), int(rows), int(shape[0]), int(shape[1] * form.inputs), nullptr, 0, in_bf16 && layout(Format(format)).integer()};
    if (out.in_bf16 && !kernels().has_bf16) return wrong(std::string(kernels().name) + " has no products of bfloat16");
    return has_scales(out.format) ? scales(out) : ffi::Error::Success();
  }

  // Null where the call has none.
  const float* floats(bool there) {
    if (!there) return nullptr;
    const auto found = rest_.get<ffi::AnyBuffer>(next_++);
    return found ? found->typed_data<float>() : nullptr;
  }

  std::optional<ffi::AnyBuffer> next() {
    const auto found = rest_.get<ffi::AnyBuffer>(next_++);
    return found ? std::optional<ffi::AnyBuffer>(*found) : std::nullopt;
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
