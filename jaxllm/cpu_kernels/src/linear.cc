// FFI handlers of matrix products, fused with what surrounds them.
#include "adapters.h"
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

// Some columns of a panel's rows of a [rows, columns] result, `residual` added to them.
void add_residual(const float* residual, const PanelRows& rows, int columns, int first, int count, float* out) {
  for (int row = rows.begin; row < rows.begin + rows.count; row++) {
    const int64_t at = int64_t(row) * columns + first;
    for (int c = 0; c < count; c++) out[at + c] += residual[at + c];
  }
}

// The products of panels of activations by some matrices, each into its result; what adapters give is added, then `residual`.
template <class ADAPTED>
Phase products(const Units& units, const Prepared& rows, const Activations& x, const std::vector<Matrix>& matrices, const ADAPTED& adapted,
               const float* residual, const std::vector<float*>& outs) {
  return {units.count(), [&, residual](int number) {
    alignas(64) float panel[PANEL_ROWS * PANEL_COLUMNS];
    const Units::Unit unit = units[number];
    const PanelRows& some = rows.panel(unit.panel);
    const bool adds = adapted.any_of(unit.panel);
    const Matrix& w = matrices[unit.matrix];
    float* const out = outs[unit.matrix];
    unit.visit([&](int p, int, int group, int width) {
      kernels().product(w, x, p * x.panel_rows, some.count, group, width, panel);
      write_panel(panel, some.begin, some.count, group * ROWS, width, w.rows, adds ? nullptr : residual, out);
    });
    if (!adds) return;
    int before = 0;
    for (int i = 0; i < unit.matrix; i++) before += matrices[i].rows;
    const int first = unit.begin * ROWS, count = std::min(unit.end * ROWS, w.rows) - first;
    adapted.widen(unit.panel, {out, 0, w.rows, before, unit.matrix, nullptr, 0}, first, count);
    if (residual) add_residual(residual, some, w.rows, first, count, out);
  }};
}

// Columns of a panel [count][PANEL_COLUMNS] as those of wider rows, or the other way around.
void copy_panel(const float* from, int from_stride, int count, float* to, int to_stride) {
  for (int m = 0; m < count; m++) memcpy(to + int64_t(m) * to_stride, from + int64_t(m) * from_stride, PANEL_COLUMNS * sizeof(float));
}

// A phase, and beside it the results' rows that it leaves out, from `begin` to `end`: zeros, and what is added to them.
Phase and_rest(Phase phase, int begin, int end, const std::vector<Matrix>& matrices, const float* residual, const std::vector<float*>& outs) {
  if (begin == end) return phase;
  const int units = phase.units, step = 16;
  return {units + (end - begin + step - 1) / step, [=, &matrices, &outs](int unit) {
    if (unit < units) return phase.work(unit);
    const int first = begin + (unit - units) * step, count = std::min(step, end - first);
    for (size_t i = 0; i < outs.size(); i++) {
      const int64_t at = int64_t(first) * matrices[i].rows, bytes = int64_t(count) * matrices[i].rows * 4;
      if (residual) memcpy(outs[i] + at, residual + at, bytes);
      else memset(outs[i] + at, 0, bytes);
    }
  }};
}

// x, matrices..., [norm weight], [residual], [a, b, gain, ranks, scales, gains of adapters] -> one result a matrix.
ffi::Error linear(ffi::Span<const int64_t> formats, bool norm, bool residual, bool adapters, float epsilon, float offset,
                  ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::RemainingRets results) {
  const size_t count = formats.size();
  if (!is_float(x)) return wrong("x must be float32 or bfloat16");
  std::vector<Matrix> matrices(count);
  std::vector<float*> outs(count);
  std::vector<int> groups(count);
  int outputs = 0;
  Operands operands(rest);
  for (size_t i = 0; i < count; i++) {
    auto out = results.get<ffi::AnyBuffer>(i);
    if (!out) return wrong("a result is missing");
    const ffi::Error error = operands.matrix(formats[i], (*out)->dimensions().back(), x.dimensions().back(), matrices[i]);
    if (error.failure()) return error;
    outs[i] = (*out)->typed_data<float>();
    groups[i] = groups_of(matrices[i]);
    outputs += matrices[i].rows;
  }
  const float* weight = operands.floats(norm);
  const float* added = operands.floats(residual);
  AdapterTables tables;
  AdapterUses uses;
  if (adapters) {
    if (const ffi::Error error = read_tables(operands, int(count), x.dimensions().back(), outputs, tables); error.failure()) return error;
    if (const ffi::Error error = read_uses(operands, rows_of(x), uses); error.failure()) return error;
  }

  Prepared prepared(x, weight, epsilon, offset, matrices, adapters);
  const Adapted<struct OfInputs> adapted(tables, uses, prepared.all(), prepared.get().values, prepared.get().inputs);
  const Units units(groups, prepared.panels());
  const Phase multiplying = products(units, prepared, prepared.get(), matrices, adapted, added, outs);
  run_phases(threads(), {prepared.phase(), adapted.narrow(), and_rest(multiplying, prepared.rows(), int(rows_of(x)), matrices, added, outs)});
  return ffi::Error::Success();
}

// activation(gate) * up of a unit's columns, to which adapters add something, into the activations of the next product.
template <class ADAPTED>
void adapted_gate(const Units::Unit& unit, const PanelRows& rows, const std::vector<Matrix>& gate_up, const Activations& x, const ADAPTED& adapted,
                  Activation activation, const Activations& out) {
  static thread_local std::vector<float> scratch;
  const int columns = (unit.end - unit.begin) * ROWS, first = unit.begin * ROWS;
  if (scratch.size() < size_t(2) * rows.count * columns) scratch.resize(size_t(2) * rows.count * columns);
  float* const sides[2] = {scratch.data(), scratch.data() + int64_t(rows.count) * columns};
  alignas(64) float gates[PANEL_ROWS * PANEL_COLUMNS], ups[PANEL_ROWS * PANEL_COLUMNS];
  const int row = unit.panel * x.panel_rows;
  for (int side = 0; side < 2; side++) {
    unit.visit([&](int, int, int group, int width) {
      kernels().product(gate_up[side], x, row, rows.count, group, width, gates);
      copy_panel(gates, PANEL_COLUMNS, rows.count, sides[side] + group * ROWS - first, columns);
    });
    adapted.widen(unit.panel, {sides[side], rows.begin, columns, side * gate_up[0].rows + first, side, nullptr, 0}, 0, columns);
  }
  for (int column = 0; column < columns; column += PANEL_COLUMNS) {
    copy_panel(sides[0] + column, columns, rows.count, gates, PANEL_COLUMNS);
    copy_panel(sides[1] + column, columns, rows.count, ups, PANEL_COLUMNS);
    kernels().gate(activation, rows.count, gates, ups);
    kernels().prepare_panel(gates, rows.count, out, row, (first + column) / BLOCK);
  }
}

// x, gate, up, down, [norm weight], [residual], [a, b, gain, ranks of adapters for gate and up, the same for down, scales, gains] -> down of
// activation(x gate) * (x up), which lies in memory as what down takes alone
ffi::Error mlp(ffi::Span<const int64_t> formats, int64_t hidden, bool norm, bool residual, bool adapters, float epsilon, float offset,
               int64_t activation, ffi::AnyBuffer x, ffi::RemainingArgs rest, Result out) {
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
  AdapterTables first, second;
  AdapterUses uses;
  if (adapters) {
    if (const ffi::Error wrongs = read_tables(operands, 2, x.dimensions().back(), 2 * hidden, first); wrongs.failure()) return wrongs;
    if (const ffi::Error wrongs = read_tables(operands, 1, hidden, down[0].rows, second); wrongs.failure()) return wrongs;
    if (const ffi::Error wrongs = read_uses(operands, rows_of(x), uses); wrongs.failure()) return wrongs;
  }

  Prepared prepared(x, weight, epsilon, offset, gate_up, adapters);
  const Activations gated = room_for<struct Gated>(down, prepared.panels(), prepared.panel_rows(), adapters);
  const Adapted<struct OfInputs> before(first, uses, prepared.all(), prepared.get().values, prepared.get().inputs);
  const Adapted<struct OfGated> behind(second, uses, prepared.all(), gated.values, gated.inputs);
  const Units units({groups_of(gate_up[0])}, prepared.panels()), down_units({groups_of(down[0])}, prepared.panels());
  const std::vector<float*> outs{out->typed_data<float>()};
  const Kernels& k = kernels();
  const Phase multiplying = products(down_units, prepared, gated, down, behind, added, outs);
  run_phases(threads(), {prepared.phase(), before.narrow(), {units.count(), [&](int number) {
    const Units::Unit unit = units[number];
    const PanelRows& rows = prepared.panel(unit.panel);
    if (before.any_of(unit.panel)) return adapted_gate(unit, rows, gate_up, prepared.get(), before, Activation(activation), gated);
    alignas(64) float gates[PANEL_ROWS * PANEL_COLUMNS] = {}, ups[PANEL_ROWS * PANEL_COLUMNS] = {};
    unit.visit([&](int p, int, int group, int width) {
      const int row = p * prepared.panel_rows();
      k.product(gate_up[0], prepared.get(), row, rows.count, group, width, gates);
      k.product(gate_up[1], prepared.get(), row, rows.count, group, width, ups);
      k.gate(Activation(activation), rows.count, gates, ups);
      k.prepare_panel(gates, rows.count, gated, row, group * ROWS / BLOCK);
    });
  }}, behind.narrow(), and_rest(multiplying, prepared.rows(), int(rows_of(x)), down, added, outs)});
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
  int32_t* const indices = out->typed_data<int32_t>();
  std::fill(indices + prepared.rows(), indices + rows_of(x), 0);  // the first of as many zeros
  for (int m = 0; m < prepared.rows(); m++) {
    Best top{0, -1};
    for (int u = 0; u < per_panel; u++) {
      const Best& candidate = best[(m / step * per_panel + u) * step + m % step];
      if (better(candidate, top)) top = candidate;
    }
    indices[m] = top.index;
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
                                  .Attr<bool>("adapters")
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
                                  .Attr<bool>("adapters")
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
