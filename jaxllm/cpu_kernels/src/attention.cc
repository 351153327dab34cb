// The FFI handler of paged attention: new keys and values into their pages, then every query over what it sees.
#include <string.h>

#include "calls.h"
#include "half.h"
#include "scratch.h"
#include "team.h"

namespace {

using Ints32 = ffi::Buffer<ffi::S32>;

constexpr int UNITS_A_THREAD = 4;

// Consecutive tokens of one sequence.
struct Run {
  int token, count, sequence, position;
};

std::vector<Run> runs_of(const Ints32& positions, const Ints32& seq_ids, int sequences) {
  std::vector<Run> runs;
  const int32_t *position = positions.typed_data(), *sequence = seq_ids.typed_data();
  for (int t = 0; t < int(positions.element_count()); t++) {
    if (sequence[t] < 0 || sequence[t] >= sequences) continue;  // padding
    Run* last = runs.empty() ? nullptr : &runs.back();
    if (last && last->sequence == sequence[t] && last->token + last->count == t && last->position + last->count == position[t]) last->count++;
    else runs.push_back({t, 1, sequence[t], position[t]});
  }
  return runs;
}

// A unit, and where its result goes.
struct Task {
  AttentionUnit unit;
  int pieces;  // how many tasks in a row, from this one on, are parts of one result; 0 in all but the first
};

// KV heads that one unit of a decode row takes, as their keys lie beside each other: as many as leave work for all threads.
int heads_together(const std::vector<Run>& runs, const Attention& a) {
  int64_t ranges = 0;
  for (const Run& run : runs)
    if (run.count == 1) ranges += run.position / SEGMENT - a.lowest_key(run.position) / SEGMENT + 1;
  const int64_t parts = (UNITS_A_THREAD * threads() + ranges - 1) / std::max<int64_t>(1, ranges), most = MAX_VECTORS * a.kv_heads / a.heads;
  return std::max<int64_t>(1, std::min<int64_t>(most, a.kv_heads / parts));
}

std::vector<Task> tasks_of(const std::vector<Run>& runs, const Attention& a) {
  std::vector<Task> tasks;
  const int group = a.heads / a.kv_heads, together = heads_together(runs, a);
  for (const Run& run : runs) {
    const bool decode = run.count == 1;
    for (int head = 0, heads; head < a.kv_heads; head += heads) {
      heads = decode ? std::min(together, a.kv_heads - head) : 1;
      const int vectors = run.count * heads * group;
      for (int first = 0; first < vectors; first += MAX_VECTORS) {
        const int count = std::min(MAX_VECTORS, vectors - first);
        const int before = decode ? 0 : first / group, last = decode ? 0 : (first + count - 1) / group;  // tokens of the run
        const int lowest = a.lowest_key(run.position + before), end = a.highest_key(run.token + last, run.position + last) + 1;
        const int begin = decode ? lowest / SEGMENT * SEGMENT : lowest, step = decode ? SEGMENT : end - begin;
        const int pieces = (end - begin + step - 1) / step;
        for (int p = 0; p < pieces; p++) {
          const int from = std::max(lowest, begin + p * step), to = std::min(end, begin + (p + 1) * step);
          tasks.push_back({{run.sequence, head, heads, run.token, run.position, first, count, from, to, p == 0, decode}, p == 0 ? pieces : 0});
        }
      }
    }
  }
  return tasks;
}

void write_vector(const float* x, float factor, int count, bool bf16, void* out, int64_t at) {
  for (int d = 0; d < count; d++) {
    if (bf16) static_cast<uint16_t*>(out)[at + d] = bf16_of_float(x[d] * factor);
    else static_cast<float*>(out)[at + d] = x[d] * factor;
  }
}

// Of pages as they come from JAX; false for what is none.
bool format_of(const ffi::AnyBuffer& pages, PageFormat& format) {
  switch (pages.element_type()) {
    case ffi::F32: format = PageFormat::f32; return true;
    case ffi::U16: format = PageFormat::bf16; return true;
    case ffi::S8: format = PageFormat::int8; return true;
    case ffi::U8: format = PageFormat::e4m3; return true;
    default: return false;
  }
}

// q, k, positions, seq_ids, page_table, key pages, [v, value pages], [sinks], [slopes], [cos, sin], [q norm, k norm], [last key of each token]
// -> out, key pages, [value pages]
ffi::Error attention(float scale, float softcap, int64_t window, bool chunked, bool latent, bool has_sinks, bool has_slopes, bool rotary,
                     bool interleaved, bool norms, bool looks_ahead, float epsilon, float weight_offset, ffi::AnyBuffer q, ffi::AnyBuffer k, Ints32 positions, Ints32 seq_ids, Ints32 page_table, ffi::AnyBuffer keys,
                     ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> new_keys,
                     ffi::RemainingRets more) {
  if (!is_float(q) || q.element_type() != k.element_type() || q.element_type() != out->element_type())
    return wrong("q, k and the result must all be float32 or bfloat16");
  settle(keys, new_keys);
  void* value_pages = new_keys->untyped_data();
  ffi::AnyBuffer v = k;
  int value_row = int(keys.dimensions()[3]);
  if (!latent) {
    auto in = rest.get<ffi::AnyBuffer>(1);
    auto new_values = more.get<ffi::AnyBuffer>(0);
    if (!in || !new_values) return wrong("value pages are missing");
    settle(*in, *new_values);
    v = *rest.get<ffi::AnyBuffer>(0);
    value_pages = (*new_values)->untyped_data();
    value_row = int(in->dimensions()[3]);
  }
  Attention a;
  a.q = q.untyped_data();
  a.q_is_bf16 = q.element_type() == ffi::BF16;
  a.heads = int(q.dimensions()[1]), a.kv_heads = int(keys.dimensions()[1]), a.dim = int(q.dimensions()[2]);
  a.value_dim = int(out->dimensions()[2]);
  a.keys = new_keys->untyped_data(), a.values = value_pages;
  if (!format_of(keys, a.format)) return wrong("pages must be float32, uint16 (the bits of bfloat16), int8 or uint8 (the bits of e4m3)");
  a.page_size = int(keys.dimensions()[2]), a.key_row = int(keys.dimensions()[3]), a.value_row = value_row;
  a.page_table = page_table.typed_data(), a.columns = int(page_table.dimensions()[1]);
  a.scale = scale, a.softcap = softcap, a.window = int(window), a.chunked = chunked;
  size_t next = latent ? 0 : 2;
  const auto floats = [&] { return rest.get<ffi::AnyBuffer>(next++)->typed_data<float>(); };
  a.sinks = has_sinks ? floats() : nullptr;
  a.slopes = has_slopes ? floats() : nullptr;
  HeadInput head{a.q_is_bf16, a.dim, epsilon, weight_offset, nullptr, nullptr, 0, interleaved};
  if (rotary) {
    head.half = int(rest.get<ffi::AnyBuffer>(next)->dimensions()[1]);
    head.cos = floats(), head.sin = floats();
  }
  const float *q_norm = norms ? floats() : nullptr, *k_norm = norms ? floats() : nullptr;
  a.until = looks_ahead ? rest.get<Ints32>(next++)->typed_data() : nullptr;
  if (a.until && a.slopes) return wrong("slopes are by the distance to the token itself, and none is known of later ones");
  if (2 * head.half > a.dim) return wrong("more channels are rotated than a head has");
  const int scale_bytes = is_coded(a.format) ? SCALE_BYTES : 0, value_width = int(v.dimensions()[2]);
  if (a.key_row != a.dim + scale_bytes || a.value_row != value_width + scale_bytes || a.value_dim > value_width) return wrong("a page's rows are not as wide as keys and values");

  const Kernels& kernel = kernels();
  const std::vector<Run> runs = runs_of(positions, seq_ids, int(page_table.dimensions()[0]));
  const std::vector<Task> tasks = tasks_of(runs, a);
  const int count = int(tasks.size()), group = a.heads / a.kv_heads, item = a.q_is_bf16 ? 2 : 4;
  bool split = false;
  size_t vectors = 0;
  std::vector<size_t> first_vector(count);
  for (int t = 0; t < count; t++) {
    split |= tasks[t].pieces > 1;
    first_vector[t] = vectors;
    vectors += tasks[t].unit.count;
  }
  const bool rotates = rotary || norms;
  const int new_heads = int(k.dimensions()[1]);  // none, where another layer has written the pages
  const int total = int(positions.element_count());
  static thread_local std::vector<float> room;
  const size_t rotated = rotates ? size_t(total) * a.heads * a.dim : 0;
  room.resize(std::max(room.size(), vectors * (a.value_dim + 2) + rotated));
  float* const results = room.data();
  float* const softmaxes = results + vectors * a.value_dim;
  float* const queries = softmaxes + vectors * 2;
  const bool is_bf16 = a.q_is_bf16;
  if (rotates) a.q = queries, a.q_is_bf16 = false;
  const auto result = [&](int t) { return results + first_vector[t] * a.value_dim; };
  const auto softmax = [&](int t) { return softmaxes + first_vector[t] * 2; };

  // Heads of one token in x, and a row of a page.
  const auto source = [&](const ffi::AnyBuffer& x, int token, int h) {
    const int64_t at = (int64_t(token) * x.dimensions()[1] + h) * x.dimensions()[2];
    return static_cast<const uint8_t*>(x.untyped_data()) + at * item;
  };
  const auto place = [&](void* pages, int row_size, int page, int row, int h) {
    const int64_t at = ((int64_t(page) * a.kv_heads + h) * a.page_size + row) * row_size;
    return static_cast<uint8_t*>(pages) + at * element_bytes(a.format);
  };
  const auto take_in = [&](int token, int page, int row) {
    static thread_local std::vector<float> key;
    key.resize(a.dim);
    for (int h = 0; rotates && h < a.heads; h++)
      kernel.rotate(head, source(q, token, h), token, q_norm, queries + (int64_t(token) * a.heads + h) * a.dim);
    for (int h = 0; h < new_heads; h++) {
      const void* from = source(k, token, h);
      if (rotates) kernel.rotate(head, from, token, k_norm, key.data()), from = key.data();
      kernel.keep(from, is_bf16 && !rotates, a.dim, place(new_keys->untyped_data(), a.key_row, page, row, h), a.format);
      if (!latent) kernel.keep(source(v, token, h), is_bf16, value_width, place(value_pages, value_row, page, row, h), a.format);
    }
  };
  const int step = std::max(1, std::min(16, total / (2 * threads())));
  const Phase writing = {(total + step - 1) / step, [&](int unit) {
    for (int t = unit * step; t < std::min(total, (unit + 1) * step); t++) {
      const int sequence = seq_ids.typed_data()[t], position = positions.typed_data()[t];
      if (sequence >= 0 && sequence < int(page_table.dimensions()[0])) {
        take_in(t, a.page_table[int64_t(sequence) * a.columns + position / a.page_size], position % a.page_size);
      } else {
        const size_t bytes = size_t(a.heads) * a.value_dim * item;
        memset(static_cast<uint8_t*>(out->untyped_data()) + t * bytes, 0, bytes);
      }
    }
  }};
  const auto deliver = [&](int t) {
    const AttentionUnit& u = tasks[t].unit;
    for (int r = 0; r < u.count; r++) {
      const int64_t vector = int64_t(u.token_of(r, group)) * a.heads + u.head(r, group);
      const float total = softmax(t)[2 * r + 1];
      write_vector(result(t) + r * a.value_dim, total == 0 ? 0 : 1 / total, a.value_dim, is_bf16, out->untyped_data(), vector * a.value_dim);
    }
  };
  const Phase attending = {count, [&](int unit) {
    static thread_local Scratch scratch;
    scratch.clear();
    scratch.reserve(a.scratch_bytes());
    const int t = count - 1 - unit;  // the last tiles of a prompt have most to do
    kernel.attend(a, tasks[t].unit, t ? &tasks[t - 1].unit : nullptr, result(t), softmax(t), scratch.take<uint8_t>(0));
    if (tasks[t].pieces == 1) deliver(t);
  }};
  const Phase merging = {split ? count : 0, [&](int t) {
    const int pieces = tasks[t].pieces;
    if (pieces < 2) return;
    for (int p = 1; p < pieces; p++) kernel.join(result(t + p), softmax(t + p), tasks[t].unit.count, a.value_dim, result(t), softmax(t));
    deliver(t);
  }};
  run_phases(threads(), {writing, attending, merging});
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_attention, attention,
                              ffi::Ffi::Bind()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<int64_t>("window")
                                  .Attr<bool>("chunked")
                                  .Attr<bool>("latent")
                                  .Attr<bool>("sinks")
                                  .Attr<bool>("slopes")
                                  .Attr<bool>("rotary")
                                  .Attr<bool>("interleaved")
                                  .Attr<bool>("norms")
                                  .Attr<bool>("looks_ahead")
                                  .Attr<float>("epsilon")
                                  .Attr<float>("weight_offset")
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Ints32>()
                                  .Arg<Ints32>()
                                  .Arg<Ints32>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .RemainingRets());
