// What adapters add to the products of one call: which tokens have which of them, and the work that this is.
#pragma once
#include <algorithm>
#include <vector>

#include "activations.h"
#include "calls.h"

// The tables of the adapters of one product, of `parts` parts: bf16 [places, parts * rank, inputs], [places, rank, outputs] and
// [places, outputs], and the adapters' own ranks [places, parts].
struct AdapterTables {
  const uint16_t *a = nullptr, *b = nullptr, *gain = nullptr;
  const int32_t* ranks = nullptr;
  int parts = 0, rank = 0, inputs = 0, outputs = 0;
};

// How much of each adapter each token has [tokens, places], and whether they have gains [places].
struct AdapterUses {
  const float* scales = nullptr;
  const int32_t* gains = nullptr;
  int places = 0;
};

// Operands of a call: a, b, gain and ranks of the adapters.
inline ffi::Error read_tables(Operands& operands, int parts, int64_t inputs, int64_t outputs, AdapterTables& out) {
  const auto a = operands.next(), b = operands.next(), gain = operands.next(), ranks = operands.next();
  if (!a || !b || !gain || !ranks) return wrong("tables of adapters are missing");
  for (const auto& table : {*a, *b, *gain})
    if (table.element_type() != ffi::BF16) return wrong("adapters must be bfloat16");
  if (a->dimensions().size() != 3 || b->dimensions().size() != 3 || gain->dimensions().size() != 2)
    return wrong("adapters must be [places, ranks, inputs], [places, rank, outputs] and [places, outputs]");
  const int64_t places = a->dimensions()[0], rank = b->dimensions()[1];
  if (b->dimensions()[0] != places || gain->dimensions()[0] != places || a->dimensions()[1] != rank * parts || a->dimensions()[2] != inputs ||
      b->dimensions()[2] != outputs || gain->dimensions()[1] != outputs)
    return wrong("the adapters do not fit the product");
  if (ranks->element_type() != ffi::S32 || ranks->dimensions().size() != 2 || ranks->dimensions()[0] != places || ranks->dimensions()[1] != parts)
    return wrong("ranks of adapters must be int32 [places, parts]");
  const auto bits = [](const ffi::AnyBuffer& table) { return static_cast<const uint16_t*>(table.untyped_data()); };
  out = {bits(*a), bits(*b), bits(*gain), ranks->typed_data<int32_t>(), parts, int(rank), int(inputs), int(outputs)};
  return ffi::Error::Success();
}

// The same of scales and gains.
inline ffi::Error read_uses(Operands& operands, int64_t tokens, AdapterUses& out) {
  const auto scales = operands.next(), gains = operands.next();
  if (!scales || !gains) return wrong("scales of adapters are missing");
  if (scales->element_type() != ffi::F32 || scales->dimensions().size() != 2 || scales->dimensions()[0] != tokens)
    return wrong("scales of adapters must be float32 [tokens, places]");
  const int64_t places = scales->dimensions()[1];
  if (gains->element_type() != ffi::S32 || gains->dimensions().size() != 1 || gains->dimensions()[0] != places)
    return wrong("gains of adapters must be int32 [places]");
  out = {scales->typed_data<float>(), gains->typed_data<int32_t>(), int(places)};
  return ffi::Error::Success();
}

// What adapters add to the products of tokens in panels. An adapter is read once for all of a panel's tokens that have it, of each
// part only up to its own rank, and not at all where it leaves the whole product alone. Objects that live beside each other have a USE of their own.
template <class USE> class Adapted {
 public:
  // `x` is [all tokens, stride] floats, whose first `tables.inputs` are the inputs.
  Adapted(const AdapterTables& tables, const AdapterUses& uses, const std::vector<PanelRows>& panels, const float* x, int stride)
      : parts_(tables.parts), rank_(tables.rank), panels_(panels) {
    numbers().clear();
    first_.push_back(0);
    for (const PanelRows& panel : panels) {
      for (int n = 0; n < uses.places; n++) add_run(tables, uses, n, panel, x, stride);
      first_.push_back(int(runs_.size()));
    }
    const int ranks = parts_ * rank_;
    if (inner().size() < numbers().size() * ranks) inner().resize(numbers().size() * ranks);
    size_t before = 0;
    for (AdapterRun& run : runs_) {
      run.tokens = numbers().data() + before, run.inner = inner().data() + before * ranks;
      before += run.count;
    }
  }

  bool any() const { return !runs_.empty(); }
  bool any_of(int panel) const { return first_[panel] < first_[panel + 1]; }

  // The inputs of each token onto the ranks of its adapters.
  Phase narrow() const {
    const int blocks = (rank_ + UNIT_RANKS - 1) / UNIT_RANKS, of_run = blocks * parts_;
    return {int(runs_.size()) * of_run, [this, blocks, of_run](int unit) {
      const AdapterRun& run = runs_[unit / of_run];
      const int row = unit % blocks * UNIT_RANKS, part = unit % of_run / blocks;
      const int own = run.own_rank(part);
      if (row < own) kernels().narrow(run, part * rank_ + row, std::min(UNIT_RANKS, own - row));
    }};
  }

  // Of that onto `count` outputs of a part from `first` on, added to a panel's products. A token's adapters follow one another in
  // the order of their places.
  void widen(int panel, Target target, int first, int count) const {
    static thread_local std::vector<float> base;
    const PanelRows& rows = panels_[panel];
    bool gains = false;
    for (int i = first_[panel]; i < first_[panel + 1]; i++) gains |= runs_[i].gain != nullptr;
    if (gains) {  // of the product alone, whatever has been added to it by then
      base.resize(std::max(base.size(), size_t(rows.count) * count));
      for (int m = 0; m < rows.count; m++)
        memcpy(base.data() + int64_t(m) * count, target.out + int64_t(rows.begin + m - target.row) * target.stride + first, size_t(count) * 4);
      target.base = base.data() - int64_t(rows.begin - target.row) * count, target.base_stride = count;
    }
    for (int i = first_[panel]; i < first_[panel + 1]; i++) kernels().widen(runs_[i], target, first, count);
  }

 private:
  static constexpr int UNIT_RANKS = 16;  // of a run's ranks that are a unit of work

  void add_run(const AdapterTables& t, const AdapterUses& uses, int n, const PanelRows& panel, const float* x, int stride) {
    const size_t before = numbers().size();
    const int32_t* const own = t.ranks + int64_t(n) * parts_;
    if (std::all_of(own, own + parts_, [](int32_t rank) { return rank <= 0; })) return;
    for (int row = panel.begin; row < panel.begin + panel.count; row++)
      if (uses.scales[int64_t(row) * uses.places + n] != 0) numbers().push_back(row);
    const int count = int(numbers().size() - before), ranks = parts_ * rank_;
    if (count)
      runs_.push_back({nullptr, count, x, t.inputs, stride, t.a + int64_t(n) * ranks * t.inputs, t.b + int64_t(n) * rank_ * t.outputs,
                       uses.gains[n] ? t.gain + int64_t(n) * t.outputs : nullptr, ranks, rank_, own, t.outputs, nullptr,
                       uses.scales + n, uses.places});
  }

  // The caller's, who stays in the call until all units are done.
  static std::vector<int32_t>& numbers() {
    static thread_local std::vector<int32_t> found;
    return found;
  }
  static std::vector<float>& inner() {
    static thread_local std::vector<float> found;
    return found;
  }

  int parts_, rank_;
  const std::vector<PanelRows>& panels_;
  std::vector<AdapterRun> runs_;
  std::vector<int> first_;  // run of each panel
};
