// The FFI handlers of layers that keep a state of each sequence: causal convolutions, the gated delta rule, state-space duals.
#include <math.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "calls.h"
#include "team.h"

namespace {

using Rows = ffi::Buffer<ffi::S32>;

constexpr int CHANNELS = 256;  // of a convolution that are a unit of work
constexpr int SSD_UNITS = 4;   // for each thread, of heads of state-space duals

// A step's sequences, whose states are to be brought into their own rows first.
struct Step {
  Sequences sequences;
  const int32_t *read, *begins;

  // All of it is done before anything is kept.
  Phase fetch(float* buffer, int64_t size) const {
    return {sequences.count, [this, buffer, size](int i) {
      float* own = buffer + sequences.row[i] * size;
      if (begins[i]) memset(own, 0, size_t(size) * sizeof(float));
      else if (read[i] != sequences.row[i]) memcpy(own, buffer + read[i] * size, size_t(size) * sizeof(float));
    }};
  }
};

Step step_of(const Rows& count, const Rows& start, const Rows& read, const Rows& begins, const Rows& written, const Rows& kept, const Rows& kept_length) {
  return {{count.typed_data()[0], start.typed_data(), written.typed_data(), kept.typed_data(), kept_length.typed_data()}, read.typed_data(), begins.typed_data()};
}

int tokens_of(const Step& step) { return step.sequences.start[step.sequences.count]; }

// Zeros in the rows behind the step's tokens.
void clear_padding(ffi::Buffer<ffi::F32>& out, int live) {
  const int64_t rows = out.dimensions()[0], row = rows ? int64_t(out.element_count()) / rows : 0;
  memset(out.typed_data() + live * row, 0, size_t((rows - live) * row) * sizeof(float));
}

float* scratch_of(size_t floats) {
  static thread_local std::vector<float> scratch;
  if (scratch.size() < floats) scratch.resize(floats);
  return scratch.data();
}

// x [T, C], taps [C, k], [bias [C]], buffer [N, k - 1, C] -> [T, C] and the buffer
ffi::Error convolve(bool has_bias, bool silu, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> taps, ffi::Buffer<ffi::F32> buffer, Rows count, Rows start, Rows read,
                    Rows begins, Rows written, Rows kept, Rows kept_length, ffi::RemainingArgs rest, ffi::Result<ffi::Buffer<ffi::F32>> out,
                    ffi::Result<ffi::Buffer<ffi::F32>> states) {
  if (!is_float(x)) return wrong("x must be float32 or bfloat16");
  settle(buffer, states);
  const Step step = step_of(count, start, read, begins, written, kept, kept_length);
  const int channels = int(x.dimensions().back()), width = int(taps.dimensions()[1]);
  const Convolution c{x.untyped_data(), x.element_type() == ffi::BF16, channels, width, taps.typed_data(), Operands(rest).floats(has_bias), silu,
                      states->typed_data(), out->typed_data()};
  clear_padding(*out, tokens_of(step));
  run_phases(threads(), {step.fetch(states->typed_data(), int64_t(width - 1) * channels), {(channels + CHANNELS - 1) / CHANNELS, [&](int unit) {
    const int first = unit * CHANNELS;
    kernels().convolve(c, step.sequences, first, std::min(CHANNELS, channels - first), scratch_of(size_t(width) * (CHANNELS + 64)));
  }}});
  return ffi::Error::Success();
}

// qkv [T, C], decay and beta [T, H], buffer [N, H, Dk, Dv] -> [T, H, Dv] and the buffer
ffi::Error delta_rule(int64_t key_heads, float epsilon, ffi::Buffer<ffi::F32> qkv, ffi::Buffer<ffi::F32> decay, ffi::Buffer<ffi::F32> beta,
                      ffi::Buffer<ffi::F32> buffer, Rows count, Rows start, Rows read, Rows begins, Rows written, Rows kept, Rows kept_length,
                      ffi::Result<ffi::Buffer<ffi::F32>> out, ffi::Result<ffi::Buffer<ffi::F32>> states) {
  settle(buffer, states);
  const Step step = step_of(count, start, read, begins, written, kept, kept_length);
  const int tokens = int(qkv.dimensions()[0]), heads = int(buffer.dimensions()[1]), key_dim = int(buffer.dimensions()[2]), value_dim = int(buffer.dimensions()[3]);
  const int64_t channels = qkv.dimensions()[1], keys = key_heads * key_dim, size = int64_t(key_dim) * value_dim;
  if (channels != 2 * keys + int64_t(heads) * value_dim || heads % key_heads) return wrong("qkv does not hold the heads of the states");

  static thread_local std::vector<float> unit_vectors, scales;  // the caller's, who stays in the call until all units are done
  unit_vectors.resize(std::max(unit_vectors.size(), size_t(2 * keys * tokens)));
  scales.assign(size_t(2) * key_dim, 1 / sqrtf(float(key_dim)));  // the norm is of the mean of squares, not of their sum
  std::fill(scales.begin(), scales.begin() + key_dim, 1 / float(key_dim));
  float* const units = unit_vectors.data();
  const float* const factors = scales.data();
  const int live = tokens_of(step), blocks = (value_dim + DELTA_COLUMNS - 1) / DELTA_COLUMNS;
  clear_padding(*out, live);

  const Phase norms{live, [&](int t) {
    for (int64_t head = 0; head < 2 * key_heads; head++) {
      const Row row{qkv.typed_data() + t * channels + head * key_dim, false, key_dim, factors + (head < key_heads ? 0 : key_dim), epsilon / float(key_dim), 0};
      kernels().normalise(row, false, nullptr, units + t * 2 * keys + head * key_dim, nullptr);
    }
  }};
  const Phase runs{step.sequences.count * heads * blocks, [&](int unit) {
    const int block = unit % blocks, head = unit / blocks % heads, i = unit / blocks / heads, column = block * DELTA_COLUMNS;
    const Sequences& s = step.sequences;
    const int64_t begin = s.start[i], key = head / (heads / key_heads) * int64_t(key_dim);
    float* const state = states->typed_data() + head * size + column;
    const DeltaRun run{s.start[i + 1] - s.start[i],
                       std::min(DELTA_COLUMNS, value_dim - column),
                       key_dim,
                       value_dim,
                       heads,
                       units + begin * 2 * keys + key,
                       units + begin * 2 * keys + keys + key,
                       2 * keys,
                       qkv.typed_data() + begin * channels + 2 * keys + int64_t(head) * value_dim + column,
                       channels,
                       decay.typed_data() + begin * heads + head,
                       beta.typed_data() + begin * heads + head,
                       out->typed_data() + (begin * heads + head) * value_dim + column,
                       state + s.row[i] * heads * size,
                       state + s.kept_row[i] * heads * size,
                       s.kept_length[i]};
    kernels().delta_rule(run, scratch_of(size_t(key_dim) * DELTA_COLUMNS));
  }};
  run_phases(threads(), {step.fetch(states->typed_data(), heads * size), norms, runs});
  return ffi::Error::Success();
}

// x [T, H, P], dt [T, H], a [H], b and c [T, G, N], skip [H], buffer [R, H, P, N] -> [T, H, P] and the buffer
ffi::Error ssd(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> dt, ffi::Buffer<ffi::F32> a, ffi::Buffer<ffi::F32> b, ffi::Buffer<ffi::F32> c,
               ffi::Buffer<ffi::F32> skip, ffi::Buffer<ffi::F32> buffer, Rows count, Rows start, Rows read, Rows begins, Rows written, Rows kept,
               Rows kept_length, ffi::Result<ffi::Buffer<ffi::F32>> y, ffi::Result<ffi::Buffer<ffi::F32>> states) {
  settle(buffer, states);
  const Step step = step_of(count, start, read, begins, written, kept, kept_length);
  const int heads = int(buffer.dimensions()[1]), dim = int(buffer.dimensions()[2]), size = int(buffer.dimensions()[3]);
  const int groups = int(b.dimensions()[1]);
  if (x.dimensions()[1] != heads || x.dimensions()[2] != dim || b.dimensions()[2] != size || heads % groups) return wrong("x, b and c do not fit the states");

  const int64_t per_head = int64_t(dim) * size;
  const int at_once = std::max(1, heads * step.sequences.count / (SSD_UNITS * threads())), units = (heads + at_once - 1) / at_once;
  clear_padding(*y, tokens_of(step));
  const Phase runs{step.sequences.count * units, [&](int unit) {
    const Sequences& s = step.sequences;
    const int i = unit / units, first = unit % units * at_once;
    for (int h = first; h < std::min(heads, first + at_once); h++) {
      const int64_t at = int64_t(s.start[i]) * heads + h, group = int64_t(s.start[i]) * groups + h / (heads / groups);
      float* const state = states->typed_data() + h * per_head;
      kernels().run_state({s.start[i + 1] - s.start[i], dim, size, heads, groups, x.typed_data() + at * dim, dt.typed_data() + at, b.typed_data() + group * size,
                           c.typed_data() + group * size, a.typed_data()[h], skip.typed_data()[h], state + s.row[i] * heads * per_head,
                           y->typed_data() + at * dim, state + s.kept_row[i] * heads * per_head, s.kept_length[i]});
    }
  }};
  run_phases(threads(), {step.fetch(states->typed_data(), heads * per_head), runs});
  return ffi::Error::Success();
}

// Adds the arguments of `step_of` to a handler's.
template <class Binding> auto with_step(Binding&& binding) {
  return std::move(binding)
      .template Arg<Rows>()   // count
      .template Arg<Rows>()   // start
      .template Arg<Rows>()   // read
      .template Arg<Rows>()   // begins
      .template Arg<Rows>()   // written
      .template Arg<Rows>()   // kept
      .template Arg<Rows>();  // kept_length
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_causal_conv, convolve,
                              with_step(ffi::Ffi::Bind()
                                  .Attr<bool>("bias")
                                  .Attr<bool>("silu")
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>())
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_delta_rule, delta_rule,
                              with_step(ffi::Ffi::Bind()
                                  .Attr<int64_t>("key_heads")
                                  .Attr<float>("epsilon")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>())
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_ssd, ssd,
                              with_step(ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>())
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
