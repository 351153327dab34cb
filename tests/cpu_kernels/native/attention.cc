// rotate, keep and attend against float64.
#include <string.h>

#include <algorithm>
#include <numeric>

#include "check.h"

namespace {

struct Case {
  const char* name;
  int heads, kv_heads, dim, value_dim, page_size;
  int window;
  float softcap;
  bool sinks, latent;  // latent: values are the first channels of the keys
  bool slopes = false;
};

constexpr Case CASES[] = {
    {"plain", 2, 2, 64, 64, 16, 0, 0, false, false},
    {"groups of 3, softcap, sinks", 6, 2, 80, 80, 8, 0, 5, true, false},
    {"group of 7, window", 7, 1, 64, 32, 64, 24, 0, false, false},
    {"group of 20, window over blocks, sinks", 20, 1, 32, 32, 16, 100, 0, true, false},
    {"narrow heads", 3, 1, 4, 12, 4, 0, 0, false, false},
    {"odd values", 2, 1, 20, 7, 16, 0, 0, true, false},
    {"latent", 5, 1, 96, 64, 16, 0, 0, false, true},
    {"groups of 3, slopes", 6, 2, 64, 64, 16, 0, 0, false, false, true},
    {"slopes, softcap, sinks, window", 4, 4, 20, 20, 16, 100, 5, true, false, true},
};
constexpr PageFormat FORMATS[] = {PageFormat::f32, PageFormat::bf16, PageFormat::int8, PageFormat::e4m3};
constexpr int SEQUENCES = 2, LENGTH = 330, TOKENS = 40;  // of each sequence; the last ones have queries
constexpr int POSITION = LENGTH - TOKENS;                // of a sequence's first query

double number_of(uint8_t code, PageFormat format) {
  if (format == PageFormat::int8) return int8_t(code);
  const int exponent = code >> 3 & 15, fraction = code & 7;
  return (code & 0x80 ? -1 : 1) * (exponent ? ldexp(8 + fraction, exponent - 10) : ldexp(fraction, -9));
}

bool is_number(uint8_t code, PageFormat format) { return format == PageFormat::int8 || (code & 0x7f) != 0x7f; }

// Rows of pages in some format, and as the numbers that they hold. Those of codes are random, as are their scales.
struct Rows {
  std::vector<float> floats;
  std::vector<uint8_t> bytes;

  Rows() {}
  Rows(const std::vector<float>& x, int size, PageFormat format, Random& random, float unit = 1) : floats(x) {
    const auto append = [&](const void* p, size_t count) { bytes.insert(bytes.end(), (const uint8_t*)p, (const uint8_t*)p + count); };
    if (!is_coded(format))
      for (float& v : floats) v *= unit;
    if (format == PageFormat::f32) append(floats.data(), 4 * x.size());
    if (format == PageFormat::bf16) {
      const std::vector<uint16_t> bits = bf16s_of(floats);
      floats = floats_of(bits);
      append(bits.data(), 2 * bits.size());
    }
    for (size_t at = 0; is_coded(format) && at < x.size(); at += size) {
      const float scale = x[at] == 1000 ? 1000 : 0x1p-9f * (2 + random.uniform()) * (format == PageFormat::e4m3 ? 0.3f : 1) * unit;
      for (int d = 0; d < size; d++) {
        uint8_t code;
        do code = uint8_t(random.bits());
        while (!is_number(code, format));
        bytes.push_back(code);
        floats[at + d] = float(number_of(code, format) * scale);
      }
      append(&scale, SCALE_BYTES);
    }
  }
};

// Keys and values of two sequences in shuffled pages. Rows that no query may see hold 1000, or codes of that scale.
struct Batch {
  Case c;
  PageFormat format;
  int columns, key_dim, value_dim;  // of a row
  float scale;
  std::vector<float> q, sinks, slopes;
  Rows keys, values;
  std::vector<int32_t> table;

  // With `tiny` ones many products and sums are about 2^-126, though logits are greater.
  Batch(const Case& c, PageFormat format, uint64_t seed, bool tiny = false) : c(c), format(format), scale(tiny ? 0x1p20f : 1 / sqrtf(float(c.dim))) {
    Random random(seed);
    columns = (LENGTH + c.page_size - 1) / c.page_size;
    key_dim = c.dim, value_dim = c.latent ? c.dim : c.value_dim;
    table.resize(SEQUENCES * columns);
    std::iota(table.begin(), table.end(), 0);
    for (size_t i = table.size() - 1; i; i--) std::swap(table[i], table[random.bits() % (i + 1)]);
    const size_t rows = table.size() * c.kv_heads * c.page_size;
    std::vector<float> key_floats = random.floats(rows * key_dim), value_floats = random.floats(rows * value_dim);
    for (int s = 0; s < SEQUENCES; s++)
      for (int k = 0; k < c.kv_heads; k++)
        for (int p = LENGTH; p < columns * c.page_size; p++) {
          std::fill_n(key_floats.begin() + at(s, k, p) * key_dim, key_dim, 1000.f);
          std::fill_n(value_floats.begin() + at(s, k, p) * value_dim, value_dim, 1000.f);
        }
    keys = Rows(key_floats, key_dim, format, random, tiny ? 0x1p-64f : 1);
    if (!c.latent) values = Rows(value_floats, value_dim, format, random, tiny ? 0x1p-124f : 1);
    q = random.floats(size_t(SEQUENCES) * TOKENS * c.heads * c.dim);
    for (float& x : q) x *= tiny ? 0x1p-61f : 4;
    sinks = random.floats(c.heads);
    for (int head = 0; head < c.heads; head++) slopes.push_back(ldexpf(1, -head));
  }

  // Which row of the pages a key lies in.
  size_t at(int sequence, int kv_head, int position) const {
    const int page = table[sequence * columns + position / c.page_size];
    return (size_t(page) * c.kv_heads + kv_head) * c.page_size + position % c.page_size;
  }

  Attention attention() const {
    Attention a{};
    a.q = q.data(), a.heads = c.heads, a.kv_heads = c.kv_heads, a.dim = c.dim, a.value_dim = c.value_dim;
    const int beside = is_coded(format) ? SCALE_BYTES : 0;
    a.keys = keys.bytes.data(), a.values = c.latent ? a.keys : values.bytes.data();
    a.format = format, a.page_size = c.page_size, a.key_row = key_dim + beside, a.value_row = value_dim + beside;
    a.page_table = table.data(), a.columns = columns;
    a.scale = scale, a.softcap = c.softcap, a.window = c.window;
    a.sinks = c.sinks ? sinks.data() : nullptr;
    a.slopes = c.slopes ? slopes.data() : nullptr;
    return a;
  }
};

struct Result {
  std::vector<float> out, softmax;
};

// Sums that are yet to be divided.
Result attend(const Batch& b, const AttentionUnit& u, const AttentionUnit* next) {
  const Attention a = b.attention();
  std::vector<uint8_t> scratch(a.scratch_bytes() + 64);
  Result r{std::vector<float>(size_t(u.count) * a.value_dim), std::vector<float>(2 * u.count)};
  kernels().attend(a, u, next, r.out.data(), r.softmax.data(), (uint8_t*)((uintptr_t(scratch.data()) + 63) / 64 * 64));
  return r;
}

// The whole of a unit whose keys may be of several segments.
Result attend_whole(const Batch& b, const AttentionUnit& u, const AttentionUnit* next) {
  Result whole;
  for (int begin = u.key_begin; begin < u.key_end;) {
    AttentionUnit part = u;
    part.key_begin = begin, part.key_end = u.decode ? std::min(u.key_end, begin / SEGMENT * SEGMENT + SEGMENT) : u.key_end;
    part.sinks = u.sinks && begin == u.key_begin;
    const Result r = attend(b, part, next);
    if (begin == u.key_begin) whole = r;
    else kernels().join(r.out.data(), r.softmax.data(), u.count, b.c.value_dim, whole.out.data(), whole.softmax.data());
    begin = part.key_end;
  }
  for (int v = 0; v < u.count; v++)
    for (int d = 0; d < b.c.value_dim; d++) whole.out[v * b.c.value_dim + d] /= whole.softmax[2 * v + 1] == 0 ? 1 : whole.softmax[2 * v + 1];
  return whole;
}

// The softmax's denominator, and the channels of the values that it divides, of the keys of a range in float64.
void sum(const Batch& b, const Attention& a, int sequence, int token, int head, int group, int position, bool sinks, int begin, int end, double* totals) {
  const float* q = &b.q[(size_t(token) * a.heads + head) * a.dim];
  totals[0] = sinks && a.sinks ? exp(double(a.sinks[head])) : 0;
  for (int key = begin; key < end; key++) {
    double logit = 0;
    const size_t row = b.at(sequence, head / group, key);
    const float *k = &b.keys.floats[row * b.key_dim], *value = b.c.latent ? k : &b.values.floats[row * b.value_dim];
    for (int d = 0; d < a.dim; d++) logit += double(q[d]) * k[d];
    logit *= a.scale;
    if (a.softcap > 0) logit = a.softcap * tanh(logit / a.softcap);
    if (a.slopes) logit += double(a.slopes[head]) * (key - position);
    totals[0] += exp(logit);
    for (int d = 0; d < a.value_dim; d++) totals[1 + d] += exp(logit) * value[d];
  }
}

void expect_attention(const Batch& b, const AttentionUnit& u, const Result& r, double tolerance) {
  const Attention a = b.attention();
  const int group = a.heads / a.kv_heads;
  for (int v = 0; v < u.count; v++) {
    const int token = u.token_of(v, group), head = u.head(v, group), position = u.position + token - u.token;
    const int begin = std::max(u.key_begin, a.window ? position - a.window + 1 : 0), end = std::min(u.key_end, position + 1);
    const double* found = expected.next(1 + a.value_dim, [&](double* totals) { sum(b, a, u.sequence, token, head, group, position, u.sinks, begin, end, totals); });
    const double total = found[0], *sums = found + 1;
    const double share = r.softmax[2 * v] * log(2.) + log(double(r.softmax[2 * v + 1]));
    CHECK(total == 0 ? r.softmax[2 * v + 1] == 0 : fabs(share - log(total)) <= tolerance, "%s, vector %d: %g is not %g", b.c.name, v, share, log(total));
    for (int d = 0; d < a.value_dim; d++) {
      const double wanted = total == 0 ? 0 : sums[d] / total, got = r.out[size_t(v) * a.value_dim + d];
      CHECK(fabs(got - wanted) <= tolerance * (1 + fabs(wanted)), "%s, keys %d to %d, vector %d, channel %d: %g is not %g", b.c.name, u.key_begin, u.key_end, v, d, got, wanted);
    }
  }
}

// Decode rows at the edges of blocks and pages, ranges of their keys, and runs of tokens.
std::vector<AttentionUnit> units_of(const Case& c) {
  std::vector<AttentionUnit> units;
  const int group = c.heads / c.kv_heads;
  for (int s = 0; s < SEQUENCES; s++)
    for (int head = 0; head < c.kv_heads; head++) {
      const auto lowest = [&](int position) { return c.window ? std::max(0, position - c.window + 1) : 0; };
      for (int position : {0, 1, 14, 15, 16, 63, 64, 65, 127, 200, 255, 256, 300}) {
        // the query of any token will do: where it is said to stand decides what it sees
        const int token = s * TOKENS + position % TOKENS;
        for (int heads : {1, c.kv_heads - head})
          units.push_back({s, head, heads, token, position, 0, heads * group, lowest(position), position + 1, true, true});
      }
      units.push_back({s, head, 1, s * TOKENS, 200, 0, group, std::max(128, lowest(200)), 201, false, true});
      for (int position : {0, 5, POSITION})
        for (int first = 0; first < TOKENS * group; first += MAX_VECTORS) {
          const int count = std::min(MAX_VECTORS, TOKENS * group - first), end = position + (first + count - 1) / group + 1;
          units.push_back({s, head, 1, s * TOKENS, position, first, count, lowest(position + first / group), end, true, false});
        }
    }
  return units;
}

void check_case(const Case& c, PageFormat format) {
  Batch b(c, format, 29 + int(format));
  const double tolerance = format != PageFormat::f32 && kernels().has_bf16 ? 2e-2 : 2e-5;
  const std::vector<AttentionUnit> units = units_of(c);
  std::vector<Result> results;
  for (size_t i = 0; i < units.size(); i++) {
    results.push_back(attend_whole(b, units[i], i + 1 < units.size() && units[i + 1].decode ? &units[i + 1] : nullptr));
    expect_attention(b, units[i], results[i], tolerance);
  }
  const int group = c.heads / c.kv_heads;
  for (size_t i = 0; i < units.size(); i += 3) {  // a query that is not finite spoils itself alone
    const AttentionUnit& u = units[i];
    const int spoilt = u.count / 2;
    float& channel = b.q[(size_t(u.token_of(spoilt, group)) * c.heads + u.head(spoilt, group)) * c.dim + 1];
    const float before = channel;
    channel = NAN;
    const Result r = attend_whole(b, u, nullptr);
    channel = before;
    for (int j = 0; j < u.count * c.value_dim; j++) {
      const bool own = j / c.value_dim == spoilt;
      CHECK(own ? std::isnan(r.out[j]) : r.out[j] == results[i].out[j], "%s, vector %d beside NaN in %d: %g", c.name, j / c.value_dim, spoilt, r.out[j]);
    }
  }
}

// A token's attention has the same bits by itself as in a run that begins with any other one. With a window of 100 the keys of the runs
// begin with keys 16, 17 and 31 of a block, and with one of 40 as well.
void check_same_bits(const Case& c, PageFormat format, bool tiny) {
  const Batch b(c, format, 41, tiny);
  const int group = c.heads / c.kv_heads;
  const auto result_of = [&](int first, int tokens, bool decode) {
    const int position = POSITION + first;
    const AttentionUnit u{1, 1, 1, TOKENS + first, position, 0, tokens * group, c.window ? position - c.window + 1 : 0, position + tokens, true, decode};
    return attend_whole(b, u, nullptr);
  };
  std::vector<Result> alone;
  for (int token = 0; token < TOKENS; token++) alone.push_back(result_of(token, 1, true));
  for (int first : {0, 1, 17, 18, 21, 22, 32, 36, TOKENS - 1}) {
    const int tokens = std::min(TOKENS - first, MAX_VECTORS / group);
    const Result run = result_of(first, tokens, false);
    for (int i = 0; i < tokens; i++) {
      const Result& token = alone[first + i];
      const bool same = std::equal(token.softmax.begin(), token.softmax.end(), &run.softmax[2 * i * group]) &&
                        std::equal(token.out.begin(), token.out.end(), &run.out[size_t(i) * group * c.value_dim]);
      CHECK(same, "%s, pages %d of %d, window %d: token %d of a run from %d on", c.name, int(format), c.page_size, c.window, i, first);
    }
  }
}

// The nearest code to each number in units of its row's scale, of two the even one.
void check_codes(PageFormat format) {
  Random random(37);
  const float largest = format == PageFormat::int8 ? 127 : 448;
  for (int size : {1, 20, 64, 77})
    for (float unit : {1.f, 1e-30f, 1e30f}) {
      std::vector<float> x = random.floats(size);
      for (int d = 1; d < size; d += 2) x[d] = ldexpf(roundf(largest * x[d]), -int(random.bits() % 12)) / largest;
      x[0] = 1;
      for (float& v : x) v *= unit;
      if (size > 4) x[2] = NAN, x[3] = -INFINITY, x[4] = 0;
      std::vector<uint8_t> row(size + SCALE_BYTES);
      kernels().keep(x.data(), false, size, row.data(), format);
      float scale;
      memcpy(&scale, &row[size], SCALE_BYTES);
      CHECK(scale == unit * (1 / largest), "the scale of %g is %g", unit, scale);
      for (int d = 0; d < size; d++) {
        const double wanted = std::isfinite(x[d]) ? double(x[d] * (1 / scale)) : 0;
        const auto distance = [&](int code) { return fabs(number_of(uint8_t(code), format) - wanted); };
        int best = 0;
        for (int code = 0; code < 256; code++)
          if (is_number(uint8_t(code), format) && (distance(code) < distance(best) || (distance(code) == distance(best) && code % 2 < best % 2))) best = code;
        CHECK(number_of(row[d], format) == number_of(uint8_t(best), format), "%g is not code %d but %d", wanted, row[d], best);
      }
    }
}

}  // namespace

void check_attention() {
  for (const Case& c : CASES)
    for (PageFormat format : FORMATS) check_case(c, format);
  for (int window : {0, 40, 100})
    for (int page_size : {4, 8, 16})
      for (PageFormat format : FORMATS) {
        check_same_bits({"groups of 3", 6, 2, 64, 32, page_size, window, 0, true, false}, format, false);
        check_same_bits({"tiny numbers", 6, 2, 64, 32, page_size, window, 0, false, false}, format, true);
      }
}

void check_heads() {
  Random random(31);
  for (int dim : {64, 20}) {
    const std::vector<float> x = random.floats(dim), norm = random.floats(dim), angles = random.floats(3 * dim);
    for (int half : {0, dim / 4, dim / 2})
      for (int kind = 0; kind < 8; kind++) {
        const bool interleaved = kind & 1, with_norm = kind & 2, is_bf16 = kind & 4;
        std::vector<float> cosines, sines, y(dim);
        for (float angle : angles) cosines.push_back(cosf(3 * angle)), sines.push_back(sinf(3 * angle));
        const std::vector<uint16_t> short_x = bf16s_of(x);
        const std::vector<float> taken = is_bf16 ? floats_of(short_x) : x;
        const int token = 2;
        kernels().rotate({is_bf16, dim, 1e-2f, 1, half ? cosines.data() : nullptr, sines.data(), half, interleaved}, is_bf16 ? (const void*)short_x.data() : x.data(), token,
                       with_norm ? norm.data() : nullptr, y.data());
        std::vector<double> expected(taken.begin(), taken.end());
        double squares = 0;
        for (double v : expected) squares += v * v;
        for (int d = 0; d < dim && with_norm; d++) expected[d] *= (double(norm[d]) + 1) / sqrt(squares / dim + double(1e-2f));
        for (int i = 0; i < half; i++) {
          double &a = expected[interleaved ? 2 * i : i], &b = expected[interleaved ? 2 * i + 1 : half + i];
          const double first = a, second = b, cosine = cosines[token * half + i], sine = sines[token * half + i];
          a = first * cosine - second * sine, b = second * cosine + first * sine;
        }
        for (int d = 0; d < dim; d++) CHECK(fabs(y[d] - expected[d]) <= 1e-5, "rotating %d of %d, kind %d, channel %d: %g is not %g", half, dim, kind, d, y[d], expected[d]);
      }
  }
  const std::vector<float> x = {1, NAN, -2, INFINITY, -INFINITY, 0x1.0181p0f, 3e38f}, kept = {1, 0, -2, 0, 0, 0x1.0181p0f, 3e38f};
  std::vector<float> row(x.size());
  kernels().keep(x.data(), false, int(x.size()), row.data(), PageFormat::f32);
  CHECK(row == kept, "floats");
  std::vector<uint16_t> bits(x.size());
  kernels().keep(x.data(), false, int(x.size()), bits.data(), PageFormat::bf16);
  CHECK(bits == bf16s_of(kept), "floats as bf16");
  const std::vector<uint16_t> short_x = bf16s_of(x);
  kernels().keep(short_x.data(), true, int(x.size()), bits.data(), PageFormat::bf16);
  CHECK(bits == bf16s_of(kept), "bf16");
  for (PageFormat format : {PageFormat::int8, PageFormat::e4m3}) check_codes(format);
}
