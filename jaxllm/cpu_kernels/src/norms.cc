// The FFI handler of norms that stand by themselves.
#include "calls.h"
#include "team.h"

namespace {

// x [..., n], weight [groups, n], [bias [n]] -> its rows normalised, each by the weight of its group: they take turns
ffi::Error normalise(bool centred, bool has_bias, float epsilon, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> weight, ffi::RemainingArgs rest,
                     ffi::Result<ffi::AnyBuffer> out) {
  if (!is_float(x) || out->element_type() != x.element_type()) return wrong("x and the result must be float32 or bfloat16, and the same");
  const float* bias = Operands(rest).floats(has_bias);
  const int rows = int(rows_of(x)), size = int(x.dimensions().back()), groups = int(weight.dimensions()[0]);
  const bool is_bf16 = x.element_type() == ffi::BF16;
  const int step = std::max(1, std::min(16, rows / (2 * threads())));
  run_phases(threads(), {{(rows + step - 1) / step, [&](int unit) {
    static thread_local std::vector<float> scratch;
    scratch.resize(std::max(scratch.size(), size_t(size)));
    for (int r = unit * step; r < std::min(rows, (unit + 1) * step); r++) {
      const int64_t at = int64_t(r) * size * (is_bf16 ? 2 : 4);
      const Row row{static_cast<const uint8_t*>(x.untyped_data()) + at, is_bf16, size, weight.typed_data() + int64_t(r % groups) * size, epsilon, 0};
      kernels().normalise(row, centred, bias, static_cast<uint8_t*>(out->untyped_data()) + at, scratch.data());
    }
  }}});
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_normalise, normalise,
                              ffi::Ffi::Bind()
                                  .Attr<bool>("centred")
                                  .Attr<bool>("bias")
                                  .Attr<float>("epsilon")
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>());
