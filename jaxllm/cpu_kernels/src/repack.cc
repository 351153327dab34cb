// From a checkpoint's blocks, row by row, to tiles; and back to floats. Layouts of the blocks: ggml-common.h and
// ggml-quants.c, https://github.com/ggml-org/ggml
#include <string.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "unpack.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

int block_bytes(Format format) {
  switch (format) {
    case Format::q4_0: return 18;
    case Format::q4_1: return 20;
    case Format::q5_0: return 22;
    case Format::q5_1: return 24;
    case Format::q8_0: return 34;
    case Format::q4_k: return 144;
    case Format::q5_k: return 176;
    case Format::q6_k: return 210;
    case Format::bf16: return 64;
    default: return 128;
  }
}

// Low nibbles are the first 16 codes, high ones the last 16; bit i of `high`, if there is one, is code i's fifth.
void expand_32(const uint8_t* nibbles, const uint8_t* high, uint8_t* codes) {
  uint32_t fifth = 0;
  if (high) memcpy(&fifth, high, 4);
  for (int i = 0; i < 16; i++) {
    codes[i] = uint8_t((nibbles[i] & 15) | (fifth >> i & 1) << 4);
    codes[i + 16] = uint8_t(nibbles[i] >> 4 | (fifth >> (i + 16) & 1) << 4);
  }
}

// Four lines of 32 bytes: low nibbles are 32 codes, high ones the next 32; bit g of `high`'s byte i is for code 32 g + i.
void expand_k(const uint8_t* nibbles, const uint8_t* high, uint8_t* codes) {
  for (int group = 0; group < 8; group++)
    for (int i = 0; i < 32; i++) {
      const int nibble = nibbles[32 * (group / 2) + i] >> 4 * (group % 2) & 15;
      codes[32 * group + i] = uint8_t(nibble | (high ? (high[i] >> group & 1) << 4 : 0));
    }
}

// Halves of 128 codes: 64 bytes of nibbles and 32 of high pairs each.
void expand_q6(const uint8_t* low, const uint8_t* high, uint8_t* codes) {
  for (int half = 0; half < 2; half++, low += 64, high += 32)
    for (int part = 0; part < 4; part++)
      for (int i = 0; i < 32; i++) {
        const int nibble = low[32 * (part % 2) + i] >> 4 * (part / 2) & 15;
        *codes++ = uint8_t(nibble | (high[i] >> 2 * part & 3) << 4);
      }
}

// Eight scales and eight minima of 6 bits in 12 bytes.
void k_scales(const uint8_t* packed, uint8_t* scale, uint8_t* minimum) {
  for (int i = 0; i < 4; i++) {
    scale[i] = packed[i] & 63;
    minimum[i] = packed[i + 4] & 63;
    scale[i + 4] = uint8_t((packed[i + 8] & 15) | packed[i] >> 6 << 4);
    minimum[i + 4] = uint8_t(packed[i + 8] >> 4 | packed[i + 4] >> 6 << 4);
  }
}

// The block of row `r` into its places in a tile.
void place_scales(Format format, const uint8_t* block, int r, uint8_t* tile) {
  const auto half = [&](int from, int line) { memcpy(tile + 32 * line + 2 * r, block + from, 2); };
  switch (format) {
    case Format::q6_k:
      half(208, 0);
      for (int i = 0; i < 16; i++) tile[32 + 16 * i + r] = block[192 + i];
      break;
    case Format::q4_k:
    case Format::q5_k: {
      uint8_t scale[8], minimum[8];
      k_scales(block + 4, scale, minimum);
      half(0, 0);
      half(2, 1);
      for (int i = 0; i < 8; i++) tile[64 + 16 * i + r] = scale[i], tile[192 + 16 * i + r] = minimum[i];
      break;
    }
    default:
      half(0, 0);
      if (layout(format).minimum) half(2, 1);
  }
}

void expand(Format format, const uint8_t* block, uint8_t* codes) {
  switch (format) {
    case Format::q4_0: return expand_32(block + 2, nullptr, codes);
    case Format::q4_1: return expand_32(block + 4, nullptr, codes);
    case Format::q5_0: return expand_32(block + 6, block + 2, codes);
    case Format::q5_1: return expand_32(block + 8, block + 4, codes);
    case Format::q4_k: return expand_k(block + 16, nullptr, codes);
    case Format::q5_k: return expand_k(block + 48, block + 16, codes);
    case Format::q6_k: return expand_q6(block, block + 128, codes);
    default:
      for (int i = 0; i < 32; i++) codes[i] = block[2 + i] ^ 0x80;  // q8_0: counts from 128
  }
}

uint32_t word_at(const uint8_t* p) {
  uint32_t word;
  memcpy(&word, p, 4);
  return word;
}

// 32 codes of row `r`, four at a time: a quad's four codes lie side by side.
template <int BITS>
void place_codes(const uint8_t* codes, int r, uint8_t* out) {
  constexpr int planes = BITS == 5 ? 1 : BITS == 6 ? 2 : 0;
  const auto put = [&](int line, uint32_t word) { memcpy(out + 64 * line + 4 * r, &word, 4); };
  if constexpr (BITS == 8) {
    for (int quad = 0; quad < 8; quad++) put(quad, word_at(codes + 4 * quad));
    return;
  }
  for (int p = 0; p < 4; p++) {
    const uint32_t low = word_at(codes + 8 * p) & 0x0f0f0f0f, high = word_at(codes + 8 * p + 4) & 0x0f0f0f0f;
    put(planes + p, low | high << 4);
  }
  for (int plane = 0; plane < planes; plane++) {
    constexpr int quads = planes ? 8 / planes : 8;
    uint32_t bits = 0;
    for (int q = 0; q < quads; q++) {
      const uint32_t top = word_at(codes + 4 * (plane * quads + q)) >> 4 & (BITS == 5 ? 0x01010101 : 0x03030303);
      bits |= top << (BITS - 4) * q;
    }
    put(plane, bits);
  }
}

void place_codes(int bits, const uint8_t* codes, int r, uint8_t* out) {
  switch (bits) {
    case 4: return place_codes<4>(codes, r, out);
    case 5: return place_codes<5>(codes, r, out);
    case 6: return place_codes<6>(codes, r, out);
    default: return place_codes<8>(codes, r, out);
  }
}

void place_block(Format format, const uint8_t* block, int r, uint8_t* tile) {
  const Layout form = layout(format);
  if (format == Format::bf16) {
    for (int i = 0; i < BLOCK; i++) memcpy(tile + (i / 2 * ROWS + r) * 4 + i % 2 * 2, block + 2 * i, 2);
    return;
  }
  if (format == Format::f32) {
    for (int i = 0; i < BLOCK; i++) memcpy(tile + (i * ROWS + r) * 4, block + 4 * i, 4);
    return;
  }
  uint8_t codes[256];
  expand(format, block, codes);
  place_scales(format, block, r, tile);
  for (int sub = 0; sub < form.blocks(); sub++)
    place_codes(form.bits, codes + sub * BLOCK, r, tile + form.header + sub * form.codes);
}

// Runs work(begin, end) over [0, count) on some threads of its own: at load time nothing else runs.
template <class F>
void in_parallel(int count, int threads, F work) {
  threads = std::max(1, std::min(threads, count / 4));
  std::vector<std::thread> team;
  const auto part = [&](int t) { work(int(int64_t(count) * t / threads), int(int64_t(count) * (t + 1) / threads)); };
  for (int t = 1; t < threads; t++) team.emplace_back(part, t);
  part(0);
  for (std::thread& thread : team) thread.join();
}

}  // namespace

EXPORT int jaxllm_tile_inputs(int format) { return layout(Format(format)).inputs; }
EXPORT int jaxllm_tile_bytes(int format) { return layout(Format(format)).bytes(); }
EXPORT int jaxllm_block_bytes(int format) { return block_bytes(Format(format)); }

// blocks [rows, columns, block_bytes] -> tiles [ceil(rows / 16), columns, tile_bytes]; rows that are not there are zero.
EXPORT void jaxllm_repack(int format, const uint8_t* blocks, int rows, int columns, uint8_t* tiles, int threads) {
  const Layout form = layout(Format(format));
  const int size = block_bytes(Format(format));
  in_parallel((rows + ROWS - 1) / ROWS, threads, [&](int begin, int end) {
    for (int g = begin; g < end; g++) {
      uint8_t* tile = tiles + int64_t(g) * columns * form.bytes();
      memset(tile, 0, size_t(columns) * form.bytes());
      const int count = std::min(ROWS, rows - g * ROWS);
      for (int c = 0; c < columns; c++, tile += form.bytes())
        for (int r = 0; r < count; r++)
          place_block(Format(format), blocks + (int64_t(g * ROWS + r) * columns + c) * size, r, tile);
    }
  });
}

// tiles -> [rows, inputs]
EXPORT void jaxllm_unpack(int format, const uint8_t* tiles, int rows, int columns, int inputs, float* out, int threads) {
  const Matrix w{Format(format), tiles, rows, (rows + ROWS - 1) / ROWS, columns * layout(Format(format)).inputs};
  in_parallel(rows, threads, [&](int begin, int end) {
    for (int r = begin; r < end; r++) unpack_row(w, r, inputs, out + int64_t(r) * inputs);
  });
}
