// FFI handlers of matrix products, fused with what surrounds them.
#include "activations.h"
#include "unpack.h"

namespace {

using Result = ffi::Result<ffi::AnyBuffer>;

// Sums of a row's columns; nearly always there are PANEL_COLUMNS of them, which the compiler then takes together.
inline void add_columns(const float* a, const float* b, int width, float* out) {
  if (width == PANEL_COLUMNS)
    for (int c = 0; c < PANEL_COLUMNS; c++) out[c] = a[c] + b[c];
  else
    for (int c = 0; c < width; c++) out[c] = a[c] + b[c];
}

// A panel's columns into their place in a [rows, columns] result; `residual`, of the same shape, is added.
void write_panel(const float* panel, int row, int count, int column, int groups, int columns, const float* residual, float* out) {
  const int width = std::min(groups * ROWS, columns - column);
  for (int m = 0; m < count; m++, panel += PANEL_COLUMNS) {
    const int64_t at = int64_t(row + m) * columns + column;
    float sums[PANEL_COLUMNS];
    if (residual) add_columns(residual + at, panel, width, sums);
    const float* from = residual ? sums : panel;
    if (width == PANEL_COLUMNS) memcpy(out + at, from, sizeof sums);
    else memcpy(out + at, from, size_t(width) * 4);
  }
}

int groups_of(const Matrix& w) { return (w.rows + ROWS - 1) / ROWS; }

// The products of panels of activations by some matrices, each into its result; `residual` is added.
Phase products(const Units& units, const Prepared& rows, const Activations& x, const std::vector<Matrix>& matrices, const float* residual,
               const std::vector<float*>& outs) {
  return {units.count(), [&, residual](int unit) {
    alignas(64) float panel[PANEL_ROWS * PANEL_COLUMNS];
    units.visit(unit, [&](int p, int matrix, int group, int width) {
      const Matrix& w = matrices[matrix];
      const auto [row, count] = rows.panel(p);
      kernels().product(w, x, p * x.panel_rows, count, group, width, panel);
      write_panel(panel, row, count, group * ROWS, width, w.rows, residual, outs[matrix]);
    });
  }};
}

// x, matrices..., [norm weight], [residual] -> one result a matrix.
ffi::Error linear(ffi::Span<const int64_t> formats, bool norm, bool residual, float epsilon, float offset,
                  ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::RemainingRets results) {
  const size_t count = formats.size();
  if (!is_float(x)) return wrong("x must be float32 or bfloat16");
  std::vector<Matrix> matrices(count);
  std::vector<float*> outs(count);
  std::vector<int> groups(count);
  Operands operands(rest);
  for (size_t i = 0; i < count; i++) {
    auto out = results.get<ffi::AnyBuffer>(i);
    if (!out) return wrong("a result is missing");
    const ffi::Error error = operands.matrix(formats[i], (*out)->dimensions().back(), x.dimensions().back(), matrices[i]);
    if (error.failure()) return error;
    outs[i] = (*out)->typed_data<float>();
    groups[i] = groups_of(matrices[i]);
  }
  const float* weight = operands.floats(norm);
  const float* added = operands.floats(residual);

  Prepared prepared(x, weight, epsilon, offset, matrices);
  const Units units(groups, prepared.panels());
  run_phases(threads(), {prepared.phase(), products(units, prepared, prepared.get(), matrices, added, outs)});
  return ffi::Error::Success();
}

// x, gate, up, down, [norm weight], [residual] -> down of activation(x gate) * (x up), which lies in memory as what down takes alone
ffi::Error mlp(ffi::Span<const int64_t> formats, int64_t hidden, bool norm, bool residual, float epsilon, float offset, int64_t activation,
               ffi::AnyBuffer x, ffi::RemainingArgs rest, Result out) {
  if (!is_float(x)) return wrong("x must be float32 or bfloat16");
  if (activation < 0 || activation >= int64_t(Activation::count)) return wrong("no activation " + std::to_string(activation));
  if (formats.size() != 3) return wrong("gate, up and down must have a format each");
  std::vector<Matrix> gate_up(2), down(1);
  Operands operands(rest);
  for (int i = 0; i < 2; i++) {
    const ffi::Error error = operands.matrix(formats[i], hidden, x.dimensions().back(), gate_up[i]);
    if (error.failure()) return error;
  }
  const ffi::Error error = operands.matrix(formats[2], out->dimensions().back(), hidden, down[0]);
  if (error.failure()) return error;
  if (down[0].inputs != hidden) return wrong(std::to_string(hidden) + " hidden channels are no whole blocks of down");
  const float* weight = operands.floats(norm);
  const float* added = operands.floats(residual);

  Prepared prepared(x, weight, epsilon, offset, gate_up);
  const Activations gated = room_for<struct Gated>(down, prepared.panels(), prepared.panel_rows());
  const Units units({groups_of(gate_up[0])}, prepared.panels()), down_units({groups_of(down[0])}, prepared.panels());
  const std::vector<float*> outs{out->typed_data<float>()};
  const Kernels& k = kernels();
  run_phases(threads(), {prepared.phase(), {units.count(), [&](int unit) {
    alignas(64) float gates[PANEL_ROWS * PANEL_COLUMNS] = {}, ups[PANEL_ROWS * PANEL_COLUMNS] = {};
    units.visit(unit, [&](int p, int, int group, int width) {
      const int count = prepared.panel(p).count, row = p * prepared.panel_rows();
      k.product(gate_up[0], prepared.get(), row, count, group, width, gates);
      k.product(gate_up[1], prepared.get(), row, count, group, width, ups);
      k.gate(Activation(activation), count, gates, ups);
      k.prepare_panel(gates, count, gated, row, group * ROWS / BLOCK);
    });
  }}, products(down_units, prepared, gated, down, added, outs)});
  return ffi::Error::Success();
}

struct Best {
  float value;
  int32_t index;  // -1 for none yet
};

// The first of the greatest wins, and a NaN is greater than all, as in numpy.argmax.
bool better(const Best& a, const Best& b) {
  if (b.index < 0 || a.index < 0) return a.index >= 0;
  const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
  if (a_nan || b_nan) return a_nan && (!b_nan || a.index < b.index);
  return a.value > b.value || (a.value == b.value && a.index < b.index);
}

// Whether any of PANEL_COLUMNS numbers is above a limit, as a NaN is above all.
inline bool any_above(const float* values, float limit) {
  int found = 0;
  for (int c = 0; c < PANEL_COLUMNS; c++) found |= !(values[c] <= limit);
  return found;
}

// x, matrix, [norm weight] -> index of each row's greatest product
ffi::Error argmax(int64_t format, int64_t rows, bool norm, float epsilon, float offset,
                  ffi::AnyBuffer x, ffi::RemainingArgs rest, Result out) {
  if (!is_float(x)) return wrong("x must be float32 or bfloat16");
  std::vector<Matrix> matrices(1);
  Operands operands(rest);
  const ffi::Error error = operands.matrix(format, rows, x.dimensions().back(), matrices[0]);
  if (error.failure()) return error;
  const float* weight = operands.floats(norm);

  Prepared prepared(x, weight, epsilon, offset, matrices);
  const Units units({int(rows + ROWS - 1) / ROWS}, prepared.panels());
  const int step = prepared.panel_rows();
  static thread_local std::vector<Best> found;  // [units][panel rows]
  found.assign(size_t(units.count()) * step, {0, -1});
  Best* const best = found.data();
  const Kernels& k = kernels();
  run_phases(threads(), {prepared.phase(), {units.count(), [&](int unit) {
    alignas(64) float panel[PANEL_ROWS * PANEL_COLUMNS];
    units.visit(unit, [&](int p, int, int group, int width) {
      const int count = prepared.panel(p).count, columns = std::min(width * ROWS, int(rows) - group * ROWS);
      k.product(matrices[0], prepared.get(), p * step, count, group, width, panel);
      for (int m = 0; m < count; m++) {
        const float* values = panel + m * PANEL_COLUMNS;
        Best& top = best[unit * step + m];
        // seldom, after the first: that is seen without looking at each
        const bool better_ones = top.index < 0 || columns < PANEL_COLUMNS || any_above(values, top.value);
        for (int c = 0; better_ones && c < columns; c++)
          if (const Best candidate{values[c], group * ROWS + c}; better(candidate, top)) top = candidate;
      }
    });
  }}});
  const int per_panel = prepared.panels() ? units.count() / prepared.panels() : 0;
  for (int m = 0; m < int(rows_of(x)); m++) {
    Best top{0, -1};
    for (int u = 0; u < per_panel; u++) {
      const Best& candidate = best[(m / step * per_panel + u) * step + m % step];
      if (better(candidate, top)) top = candidate;
    }
    out->typed_data<int32_t>()[m] = top.index;
  }
  return ffi::Error::Success();
}

// x [N, i] sorted by expert, sizes [X], matrices (tiles [X, groups, blocks, bytes]) -> each row by its own expert's matrix; zero for
// rows past the last expert's
ffi::Error grouped(int64_t format, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> sizes, ffi::RemainingArgs rest, Result out) {
  if (!is_float(x)) return wrong("x must be float32 or bfloat16");
  const auto tiles = rest.get<ffi::AnyBuffer>(0);
  if (!tiles || tiles->dimensions().size() != 4 || tiles->dimensions()[0] != int64_t(sizes.element_count()))
    return wrong("tiles must be [experts, groups, blocks, bytes], with a size for each expert");
  std::vector<Matrix> matrices(1);
  const ffi::Error error = Operands(rest).matrix(format, out->dimensions().back(), x.dimensions().back(), matrices[0]);
  if (error.failure()) return error;
  const int total = int(rows_of(x)), columns = matrices[0].rows;

  std::vector<PanelRows> panels;
  std::vector<int> experts;  // of each panel
  int row = 0;
  for (int expert = 0; expert < int(sizes.element_count()); expert++) {
    const int end = std::min(total, row + std::max(0, sizes.typed_data()[expert]));
    for (; row < end; row = panels.back().begin + panels.back().count) {
      panels.push_back({row, std::min(PANEL_ROWS, end - row)});
      experts.push_back(expert);
    }
  }
  float* const result = out->typed_data<float>();
  memset(result + int64_t(row) * columns, 0, size_t(total - row) * columns * 4);
  if (panels.empty()) return ffi::Error::Success();

  Prepared prepared(x, nullptr, 0, 0, matrices, panels);
  const Units units({(columns + ROWS - 1) / ROWS}, prepared.panels());
  const Kernels& k = kernels();
  run_phases(threads(), {prepared.phase(), {units.count(), [&](int unit) {
    alignas(64) float panel[PANEL_ROWS * PANEL_COLUMNS];
    units.visit(unit, [&](int p, int, int group, int width) {
      k.product(matrices[0].of_stack(experts[p]), prepared.get(), p * prepared.panel_rows(), panels[p].count, group, width, panel);
      write_panel(panel, panels[p].begin, panels[p].count, group * ROWS, width, columns, nullptr, result);
    });
  }}});
  return ffi::Error::Success();
}

// ids [T], matrix -> rows [T, i]; an id outside takes the nearest row that is there
ffi::Error rows_by_id(int64_t format, int64_t rows, ffi::Buffer<ffi::S32> ids, ffi::RemainingArgs rest, Result out) {
  Matrix w;
  const int64_t inputs = out->dimensions().back();
  const ffi::Error error = Operands(rest).matrix(format, rows, inputs, w);
  if (error.failure()) return error;
  for (size_t i = 0; i < ids.element_count(); i++) {
    const int row = std::max(0, std::min(ids.typed_data()[i], w.rows - 1));
    unpack_row(w, row, int(inputs), out->typed_data<float>() + i * inputs);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_linear, linear,
                              ffi::Ffi::Bind()
                                  .Attr<ffi::Span<const int64_t>>("formats")
                                  .Attr<bool>("norm")
                                  .Attr<bool>("residual")
                                  .Attr<float>("epsilon")
                                  .Attr<float>("weight_offset")
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_mlp, mlp,
                              ffi::Ffi::Bind()
                                  .Attr<ffi::Span<const int64_t>>("formats")
                                  .Attr<int64_t>("hidden")
                                  .Attr<bool>("norm")
                                  .Attr<bool>("residual")
                                  .Attr<float>("epsilon")
                                  .Attr<float>("weight_offset")
                                  .Attr<int64_t>("activation")
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_argmax, argmax,
                              ffi::Ffi::Bind()
                                  .Attr<int64_t>("format")
                                  .Attr<int64_t>("rows")
                                  .Attr<bool>("norm")
                                  .Attr<float>("epsilon")
                                  .Attr<float>("weight_offset")
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_grouped, grouped,
                              ffi::Ffi::Bind()
                                  .Attr<int64_t>("format")
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_rows, rows_by_id,
                              ffi::Ffi::Bind()
                                  .Attr<int64_t>("format")
                                  .Attr<int64_t>("rows")
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>());
