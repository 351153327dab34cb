// prepare, product and gate against float64.
#include <string.h>

#include <algorithm>

#include "amx_emulator.h"
#include "check.h"
#include "unpack.h"

namespace {

constexpr int OUTPUTS = 3 * ROWS;  // a pair of groups, and one alone
constexpr int MOST_ROWS = 2 * PANEL_ROWS + 2;

// Any bytes are codes; only the halves must be sensible numbers.
std::vector<uint8_t> random_tiles(Format format, int inputs, Random& random) {
  const Layout form = layout(format);
  std::vector<uint8_t> tiles(size_t(OUTPUTS / ROWS) * (inputs / form.inputs) * form.bytes());
  if (has_scales(format)) {
    for (uint8_t& byte : tiles)
      do byte = uint8_t(random.bits());
      while (format == Format::e4m3 && (byte & 0x7f) == 0x7f);  // NaN
    return tiles;
  }
  if (!form.integer()) {
    for (size_t i = 0; i < tiles.size(); i += form.bits / 8) {
      const uint32_t bits = bits_of_float(random.uniform());
      memcpy(&tiles[i], (const uint8_t*)&bits + (form.bits == 16 ? 2 : 0), form.bits / 8);
    }
    return tiles;
  }
  for (uint8_t& byte : tiles) byte = uint8_t(random.bits());
  if (format == Format::mxfp4) {
    for (size_t at = 0; at < tiles.size(); at += form.bytes())
      for (int i = 0; i < ROWS; i++) tiles[at + i] = uint8_t(117 + random.bits() % 4);  // 2^-11 to 2^-8
    return tiles;
  }
  const int halves = format == Format::q6_k || format == Format::u4 || !form.minimum ? ROWS : 2 * ROWS;
  for (size_t at = 0; at < tiles.size(); at += form.bytes())
    for (int i = 0; i < halves; i++) {
      const uint16_t half = uint16_t((random.bits() & 1) << 15 | (0x1c00 + random.bits() % 0x900));  // 0.004 to 0.018
      memcpy(&tiles[at + 2 * i], &half, 2);
    }
  return tiles;
}

struct Weights {
  std::vector<uint8_t> tiles;
  std::vector<float> scales;
  Matrix matrix;
  std::vector<float> values;  // [OUTPUTS][inputs]
};

Weights random_weights(Format format, int inputs, uint64_t seed, bool in_bf16 = false) {
  Random random(seed);
  Weights w{random_tiles(format, inputs, random), {}, {}, std::vector<float>(size_t(OUTPUTS) * inputs)};
  const int runs = format == Format::e4m3 && inputs % (2 * BLOCK) == 0 ? 2 : 1;
  if (has_scales(format)) w.scales = random.floats(size_t(OUTPUTS) * runs);
  w.matrix = {format, w.tiles.data(), OUTPUTS, OUTPUTS / ROWS, inputs, w.scales.data(), runs, in_bf16};
  for (int o = 0; o < OUTPUTS; o++) unpack_row(w.matrix, o, inputs, &w.values[size_t(o) * inputs]);
  if (in_bf16 && !has_scales(format)) w.values = floats_of(bf16s_of(w.values));
  return w;
}

// Rows of very different size, and a block of zeros.
std::vector<float> random_rows(int rows, int size, uint64_t seed) {
  Random random(seed);
  std::vector<float> x = random.floats(size_t(rows) * size);
  for (int m = 0; m < rows; m++)
    for (int i = 0; i < size; i++) x[m * size + i] = m == 0 && i < BLOCK ? 0 : ldexpf(x[m * size + i], m % 9 - 4);
  return x;
}

// x [rows][w.inputs or fewer] by the weights, [rows][OUTPUTS]: as the FFI handlers go about it.
template <class T>
std::vector<float> product(const Weights& w, const std::vector<T>& x, int rows, const float* norm = nullptr, float epsilon = 0, float offset = 0) {
  const Kernels& k = kernels();
  const int inputs = w.matrix.inputs, size = int(x.size()) / rows, panel_rows = std::min(rows, PANEL_ROWS);
  const int panels = (rows + panel_rows - 1) / panel_rows;
  const size_t room = (size_t(panels) * panel_rows + 16) * inputs;  // what lies past the last row is read, and changes nothing
  std::vector<int8_t> codes(room, 100);
  std::vector<RowBlock> blocks(room / BLOCK, RowBlock{NAN, NAN, 0, 0});
  std::vector<float> values(room), scratch(inputs), out(size_t(rows) * OUTPUTS);
  std::vector<uint16_t> halves(room, 0x7fc0);
  Activations a{inputs, panel_rows, nullptr, nullptr, nullptr, nullptr};
  if (w.matrix.takes_codes()) a.codes = codes.data(), a.blocks = blocks.data();
  else if (w.matrix.in_bf16 || (w.matrix.format == Format::bf16 && k.has_bf16)) a.halves = halves.data();
  else a.values = values.data();
  for (int m = 0; m < rows; m++) k.prepare({&x[size_t(m) * size], sizeof(T) == 2, size, norm, epsilon, offset}, a, m, scratch.data());
  for (int first = 0; first < rows; first += panel_rows)
    for (int group = 0; group < OUTPUTS / ROWS; group += 2) {
      const int count = std::min(panel_rows, rows - first), groups = std::min(2, OUTPUTS / ROWS - group);
      std::vector<float> panel(PANEL_ROWS * PANEL_COLUMNS, 1000.f);
      k.product(w.matrix, a, first, count, group, groups, panel.data());
      CHECK(std::count(panel.begin() + count * PANEL_COLUMNS, panel.end(), 1000.f) == (PANEL_ROWS - count) * PANEL_COLUMNS, "rows behind %d are written to", count);
      for (int m = 0; m < count; m++) memcpy(&out[size_t(first + m) * OUTPUTS + group * ROWS], &panel[m * PANEL_COLUMNS], size_t(groups) * ROWS * 4);
    }
  return out;
}

// What a product with such weights takes a row for.
std::vector<double> rounded(const float* x, int size, const Matrix& w) {
  std::vector<double> r(x, x + size);
  if (w.in_bf16 || (w.format == Format::bf16 && kernels().has_bf16))
    for (int i = 0; i < size; i++) r[i] = float_of_bf16(bf16_of_float(x[i]));
  if (!w.takes_codes()) return r;
  for (int b = 0; b < size; b += BLOCK) {
    float largest = 0;
    for (int i = b; i < b + BLOCK; i++) largest = std::max(largest, fabsf(x[i]));
    for (int i = b; i < b + BLOCK; i++) r[i] = largest == 0 ? 0 : double(rintf(x[i] * (127 / largest))) * double(largest / 127);
  }
  return r;
}

// `y` is the product up to float32 sums of that many products.
void expect_product(const Weights& w, const double* x, int size, const float* y, double tolerance, const char* what) {
  for (int o = 0; o < OUTPUTS; o++) {
    double sum = 0, bound = 0;
    for (int i = 0; i < size; i++) {
      const double term = x[i] * double(w.values[size_t(o) * w.matrix.inputs + i]);
      sum += term, bound += fabs(term);
    }
    CHECK(fabs(y[o] - sum) <= tolerance * bound + 1e-6, "%s, format %d, output %d: %g is not %g", what, int(w.matrix.format), o, y[o], sum);
  }
}

uint64_t check_format(Format format, uint64_t hash, bool in_bf16 = false) {
  const int inputs = layout(format).inputs == 256 ? 512 : 160;
  const Weights w = random_weights(format, inputs, uint64_t(format), in_bf16);
  const std::vector<float> x = random_rows(MOST_ROWS, inputs, 7);
  const std::vector<float> all = product(w, x, MOST_ROWS);
  for (int m = 0; m < MOST_ROWS; m++)
    expect_product(w, rounded(&x[size_t(m) * inputs], inputs, w.matrix).data(), inputs, &all[size_t(m) * OUTPUTS], 2e-6, "a product");

  std::vector<int> counts = {47, 48, 63, 64, 65};
  for (int rows = 1; rows <= 33; rows++) counts.push_back(rows);
  for (int rows : counts) {  // to the last bit, whatever rows are beside it
    const std::vector<float> some = product(w, std::vector<float>(x.begin(), x.begin() + rows * inputs), rows);
    CHECK(!memcmp(some.data(), all.data(), some.size() * 4), "format %d: %d rows differ from the same among %d", int(format), rows, MOST_ROWS);
  }
  for (int rows : {3, 13, 20})
    for (float bad : {NAN, INFINITY, -INFINITY}) {  // spoils its row alone
      std::vector<float> spoilt(x.begin(), x.begin() + rows * inputs);
      spoilt[inputs + 77] = bad;
      const std::vector<float> y = product(w, spoilt, rows);
      for (int i = 0; i < rows * OUTPUTS; i++)
        CHECK(i / OUTPUTS == 1 ? !std::isfinite(y[i]) : y[i] == all[i], "format %d, row %d beside %g: %g", int(format), i / OUTPUTS, bad, y[i]);
    }
  const std::vector<uint16_t> short_x = bf16s_of(std::vector<float>(x.begin(), x.begin() + 5 * inputs));
  CHECK(product(w, short_x, 5) == product(w, floats_of(short_x), 5), "format %d: bf16 activations", int(format));
  if (in_bf16 || format == Format::bf16) return hash;  // not all instruction sets round activations to it
  for (float y : all) hash = (hash ^ bits_of_float(y)) * 0x100000001b3;
  return hash;
}

// Activations of `size` inputs, where weights have room for 96.
void check_three_blocks(Format format, int size) {
  const Weights w = random_weights(format, 96, 3);
  const std::vector<float> x = random_rows(18, size, 5);
  const std::vector<float> y = product(w, x, 18);
  for (int m = 0; m < 18; m++) expect_product(w, rounded(&x[m * size], size, w.matrix).data(), size, &y[m * OUTPUTS], 2e-6, "three blocks");
}

// A thread's tiles keep their shape while it does not change, and no longer than until the thread rests.
void check_shapes() {
  const std::vector<float> x = random_rows(20, 512, 7);
  const auto shaped_by = [&](Format format, int rows) {
    const int before = times_tiles_were_shaped();
    product(random_weights(format, 512, 1), std::vector<float>(x.begin(), x.begin() + rows * 512), rows);
    return times_tiles_were_shaped() - before;
  };
  kernels().rest();
  const int found[] = {shaped_by(Format::q4_1, 11), shaped_by(Format::q4_1, 12), shaped_by(Format::q4_0, 20), shaped_by(Format::q6_k, 20),
                       shaped_by(Format::bf16, 20), shaped_by(Format::bf16, 3), shaped_by(Format::q6_k, 11)};
  const int expected[] = {0, 1, 0, 1, 1, 1, 0};
  for (int i = 0; i < 7; i++) CHECK(found[i] == expected[i], "product %d shapes tiles %d times", i, found[i]);
  CHECK(tiles_are_shaped(), "not shaped");
  kernels().rest();
  CHECK(!tiles_are_shaped(), "shaped at rest");
}

}  // namespace

uint64_t check_products() {
  uint64_t hash = 0xcbf29ce484222325;
  for (int format = 0; format < int(Format::count); format++) hash = check_format(Format(format), hash);
  for (int format = 0; format < int(Format::count) && kernels().has_bf16; format++)
    if (layout(Format(format)).integer()) check_format(Format(format), 0, true);
  check_three_blocks(Format::f32, 83);
  check_three_blocks(Format::bf16, 83);
  check_three_blocks(Format::q4_1, 96);
  if (times_tiles_were_shaped()) check_shapes();
  return hash;
}

void check_norms() {
  const Weights w = random_weights(Format::f32, 96, 11);
  for (int size : {96, 83, 5}) {
    const std::vector<float> x = random_rows(17, size, 13), norm = Random(17).floats(size);
    const std::vector<float> y = product(w, x, 17, norm.data(), 1e-2f, 1.0f);
    for (int m = 0; m < 17; m++) {
      double squares = 0;
      for (int i = 0; i < size; i++) squares += double(x[m * size + i]) * x[m * size + i];
      std::vector<double> row(size);
      for (int i = 0; i < size; i++) row[i] = x[m * size + i] / sqrt(squares / size + double(1e-2f)) * (double(norm[i]) + 1);
      expect_product(w, row.data(), size, &y[m * OUTPUTS], 2e-6, "a normalised product");
    }
  }
}

void check_gates() {
  constexpr int COUNT = 17 * PANEL_COLUMNS;
  std::vector<float> x = Random(19).floats(COUNT), up = Random(23).floats(COUNT);
  for (int i = 0; i < COUNT; i++) x[i] = ldexpf(x[i], i % 9);  // up to 256, where exponentials overflow
  for (int kind = 0; kind < int(Activation::count); kind++) {
    std::vector<float> y = x;
    kernels().gate(Activation(kind), 17, y.data(), up.data());
    for (int i = 0; i < COUNT; i++) {
      const double v = x[i], cubic = sqrt(2 / M_PI) * (v + 0.044715 * v * v * v);
      const double expected[] = {v / (1 + exp(-v)), 0.5 * v * (1 + tanh(cubic)), 0.5 * v * (1 + erf(v / sqrt(2.0))), std::max(v, 0.0), v > 0 ? v * v : 0};
      const double e = expected[kind] * up[i];
      CHECK(fabs(y[i] - e) <= 2e-5 * fabs(e) + 1e-6, "activation %d of %g by %g: %g is not %g", kind, v, up[i], y[i], e);
    }
    y[3] = NAN;
    kernels().gate(Activation(kind), 17, y.data(), up.data());
    CHECK(std::isnan(y[3]), "activation %d of NaN: %g", kind, y[3]);
  }
}
