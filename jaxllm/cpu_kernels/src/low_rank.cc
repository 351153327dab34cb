// The FFI handler of what adapters add to a product that is computed elsewhere.
#include "adapters.h"

namespace {

using Floats32 = ffi::Buffer<ffi::F32>;

constexpr int UNIT_COLUMNS = 256;  // of the outputs that are a unit of work

struct Columns {
  int panel;
  Target target;
  int first, count;
};

// x [T, i], a [N, parts * r, i], b [N, r, o] and gain [N, o] bf16, ranks [N, parts], scales [T, N], gains [N], and the parts of a product
// [T, ...] -> these, and what the adapters add to them
ffi::Error low_rank(Floats32 x, ffi::RemainingArgs given, ffi::RemainingRets outs) {
  const int tokens = int(x.dimensions()[0]), inputs = int(x.dimensions()[1]);
  std::vector<Target> targets;
  std::vector<int> counts;
  int outputs = 0;
  for (int part = 0; part < int(outs.size()); part++) {
    auto out = outs.get<Floats32>(part);
    if (!out) return wrong("the parts of a product must be float32");
    const int count = int((*out)->dimensions()[1]);
    targets.push_back({(*out)->typed_data(), 0, count, outputs, part, nullptr, 0});
    counts.push_back(count);
    outputs += count;
  }
  AdapterTables tables;
  AdapterUses uses;
  Operands operands(given);
  if (const ffi::Error error = read_tables(operands, int(outs.size()), inputs, outputs, tables); error.failure()) return error;
  if (const ffi::Error error = read_uses(operands, tokens, uses); error.failure()) return error;
  for (int part = 0; part < int(outs.size()); part++) {
    const auto in = operands.next();
    auto out = outs.get<Floats32>(part);
    if (!in || in->element_type() != ffi::F32) return wrong("the parts of a product must be float32");
    settle(*in, *out);
  }

  const std::vector<PanelRows> panels = panels_of(tokens, PANEL_ROWS);
  const Adapted<struct LowRank> adapted(tables, uses, panels, x.typed_data(), inputs);
  if (!adapted.any()) return ffi::Error::Success();
  std::vector<Columns> columns;
  for (int panel = 0; panel < int(panels.size()); panel++)
    for (size_t part = 0; part < targets.size(); part++)
      for (int column = 0; column < counts[part]; column += UNIT_COLUMNS)
        columns.push_back({panel, targets[part], column, std::min(UNIT_COLUMNS, counts[part] - column)});
  run_phases(threads(), {adapted.narrow(), {int(columns.size()), [&](int unit) {
    const Columns& chosen = columns[unit];
    adapted.widen(chosen.panel, chosen.target, chosen.first, chosen.count);
  }}});
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_low_rank, low_rank,
                              ffi::Ffi::Bind()
                                  .Arg<Floats32>()
                                  .RemainingArgs()
                                  .RemainingRets());
