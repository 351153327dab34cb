// FFI handlers of a sampler's sums over rows of logits. Blocks, and the order in which they are added up, are the same for every
// number of rows and threads.
#include <math.h>

#include "calls.h"
#include "team.h"

namespace {

using Floats32 = ffi::Buffer<ffi::F32>;

constexpr int BLOCK_OF_LOGITS = 256, BLOCKS_A_UNIT = 16;

// Sums of the weights of every `block` logits of each row, [rows, blocks]; then `finish` for each row. A block of one is its weight.
template <class F>
void sum_blocks(const float* x, const float* most, const float* threshold, int rows, int count, int block, float* sums, F&& finish) {
  const int blocks = (count + block - 1) / block, step = BLOCKS_A_UNIT * std::max(1, BLOCK_OF_LOGITS / block), per_row = (blocks + step - 1) / step;
  const Kernels& k = kernels();
  run_phases(threads(), {{rows * per_row, [&](int unit) {
    const int row = unit / per_row, begin = unit % per_row * step, end = std::min(blocks, begin + step);
    const float *logits = x + int64_t(row) * count, least = threshold ? threshold[row] : -INFINITY;
    float* const out = sums + int64_t(row) * blocks;
    if (block == 1) k.weights(logits + begin, end - begin, most[row], least, out + begin);
    else
      for (int b = begin; b < end; b++) out[b] = k.weights(logits + b * block, std::min(block, count - b * block), most[row], least, nullptr);
  }}, {rows, [&](int row) { finish(row, sums + int64_t(row) * blocks, blocks); }}});
}

// logits [R, n], most [R], threshold [R] -> [R, blocks]: running sums of exp(logit - most) of logits from the threshold on
ffi::Error running_weights(int64_t block, Floats32 x, Floats32 most, Floats32 threshold, ffi::Result<Floats32> out) {
  if (block < 1) return wrong("a block has " + std::to_string(block) + " logits");
  sum_blocks(x.typed_data(), most.typed_data(), threshold.typed_data(), int(x.dimensions()[0]), int(x.dimensions()[1]), int(block), out->typed_data(),
             [](int, float* sums, int blocks) {
               for (int b = 1; b < blocks; b++) sums[b] += sums[b - 1];
             });
  return ffi::Error::Success();
}

// logits [R, n], most [R] -> [R]: most + log(sum of exp(logit - most))
ffi::Error log_sum_exp(Floats32 x, Floats32 most, ffi::Result<Floats32> out) {
  const int rows = int(x.dimensions()[0]), count = int(x.dimensions()[1]);
  static thread_local std::vector<float> sums;
  sums.resize(size_t(rows) * ((count + BLOCK_OF_LOGITS - 1) / BLOCK_OF_LOGITS));
  sum_blocks(x.typed_data(), most.typed_data(), nullptr, rows, count, BLOCK_OF_LOGITS, sums.data(), [&](int row, const float* sums, int blocks) {
    float total = 0;
    for (int b = 0; b < blocks; b++) total += sums[b];
    out->typed_data()[row] = most.typed_data()[row] + logf(total);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_running_weights, running_weights,
                              ffi::Ffi::Bind().Attr<int64_t>("block").Arg<Floats32>().Arg<Floats32>().Arg<Floats32>().Ret<Floats32>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_log_sum_exp, log_sum_exp, ffi::Ffi::Bind().Arg<Floats32>().Arg<Floats32>().Ret<Floats32>());
