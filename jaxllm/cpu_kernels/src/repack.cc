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
    case Format::mxfp4: return 17;
    case Format::nvfp4:
    case Format::iq4_nl: return 18;
    case Format::iq4_xs: return 136;
    case Format::u4: return 19;
    case Format::i8:
    case Format::e4m3: return 32;
    case Format::bf16: return 64;
    default: return 128;
  }
}

uint32_t word_at(const uint8_t* p) {
  uint32_t word;
  memcpy(&word, p, 4);
  return word;
}

// Eight bytes hold sixteen codes of four bits: two quads of low nibbles, or of high ones, as a tile's line has them.
uint32_t low_nibbles(const uint8_t* p) { return (word_at(p) & 0x0f0f0f0f) | (word_at(p + 4) & 0x0f0f0f0f) << 4; }
uint32_t high_nibbles(const uint8_t* p) { return (word_at(p) >> 4 & 0x0f0f0f0f) | (word_at(p + 4) & 0xf0f0f0f0); }

// Bit 4 q + i to bit q of byte i.
uint32_t fifths_by_quad(uint32_t bits) {
  uint32_t out = 0;
  for (int i = 0; i < 4; i++) {
    uint32_t x = bits >> i & 0x11111111;
    x = (x | x >> 3) & 0x03030303;
    x = (x | x >> 6) & 0x000f000f;
    out |= ((x | x >> 12) & 0xff) << 8 * i;
  }
  return out;
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
    case Format::u4:
      half(0, 0);
      tile[32 + r] = block[2];
      break;
    case Format::mxfp4: tile[r] = block[0]; break;
    case Format::iq4_xs:
      half(0, 0);
      for (int i = 0; i < 8; i++)  // six bits: the two high ones of all, then the low ones in nibbles
        tile[32 + 16 * i + r] = uint8_t(((block[4 + i / 2] >> 4 * (i % 2) & 15) | (block[2 + i / 4] >> 2 * (i % 4) & 3) << 4) - 32);
      break;
    case Format::nvfp4: tile[r] = block[0], tile[16 + r] = block[1]; break;
    case Format::i8: break;
    default:
      half(0, 0);
      if (layout(format).minimum) half(2, 1);
  }
}

// Codes of row `r`, the first 32 of them from `tile` on: a quad's four codes lie side by side, 64 bytes a line.
void place_codes(Format format, const uint8_t* block, int r, uint8_t* tile) {
  const auto put = [&](int line, uint32_t word) { memcpy(tile + 64 * line + 4 * r, &word, 4); };
  // 16 bytes: low nibbles are the first 16 codes, high ones the last.
  const auto nibbles = [&](int line, const uint8_t* p) {
    put(line, low_nibbles(p));
    put(line + 1, low_nibbles(p + 8));
    put(line + 2, high_nibbles(p));
    put(line + 3, high_nibbles(p + 8));
  };
  // 32 bytes: low nibbles are 32 codes, high ones others.
  const auto lines_of_nibbles = [&](int low, int high, const uint8_t* p) {
    for (int i = 0; i < 4; i++) {
      put(low + i, low_nibbles(p + 8 * i));
      put(high + i, high_nibbles(p + 8 * i));
    }
  };
  switch (format) {
    case Format::q4_0:
    case Format::nvfp4:
    case Format::iq4_nl: return nibbles(0, block + 2);
    case Format::iq4_xs:
      for (int i = 0; i < 8; i++) nibbles(4 * i, block + 8 + 16 * i);
      return;
    case Format::mxfp4: return nibbles(0, block + 1);
    case Format::q4_1: return nibbles(0, block + 4);
    case Format::q5_0: put(0, fifths_by_quad(word_at(block + 2))); return nibbles(1, block + 6);
    case Format::q5_1: put(0, fifths_by_quad(word_at(block + 4))); return nibbles(1, block + 8);
    case Format::u4: return nibbles(0, block + 3);
    case Format::q8_0: block += 2;  // after its scale, the same
    case Format::i8:
      for (int i = 0; i < 8; i++) put(i, word_at(block + 4 * i) ^ 0x80808080);  // counts from 128
      return;
    case Format::e4m3:
      for (int i = 0; i < BLOCK; i++) tile[i * ROWS + r] = block[i];
      return;
    case Format::q4_k:  // four lines of 32 bytes, 64 codes each
      for (int line = 0; line < 4; line++) lines_of_nibbles(8 * line, 8 * line + 4, block + 16 + 32 * line);
      return;
    case Format::q5_k:  // likewise; bit `sub` of the 32 bytes before them is the fifth
      for (int line = 0; line < 4; line++) lines_of_nibbles(10 * line + 1, 10 * line + 6, block + 48 + 32 * line);
      for (int sub = 0; sub < 8; sub++) {
        uint32_t fifths = 0;
        for (int q = 0; q < 8; q++) fifths |= (word_at(block + 16 + 4 * q) >> sub & 0x01010101) << q;
        put(5 * sub, fifths);
      }
      return;
    case Format::q6_k:  // halves of 128 codes: 64 bytes, all their low nibbles before the high ones, and 32 of high pairs
      for (int half = 0; half < 2; half++) {
        const uint8_t *low = block + 64 * half, *pairs = block + 128 + 32 * half;
        for (int line = 0; line < 2; line++)
          lines_of_nibbles(24 * half + 6 * line + 2, 24 * half + 6 * line + 14, low + 32 * line);
        for (int part = 0; part < 4; part++)
          for (int line = 0; line < 2; line++) {
            uint32_t high = 0;
            for (int q = 0; q < 4; q++) high |= (word_at(pairs + 16 * line + 4 * q) >> 2 * part & 0x03030303) << 2 * q;
            put(24 * half + 6 * part + line, high);
          }
      }
      return;
    default:  // floats, word by word
      for (int i = 0; i < block_bytes(format) / 4; i++) put(i, word_at(block + 4 * i));
  }
}

void place_block(Format format, const uint8_t* block, int r, uint8_t* tile) {
  if (layout(format).integer()) place_scales(format, block, r, tile);
  place_codes(format, block, r, tile + layout(format).header);
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
EXPORT int jaxllm_has_scales(int format) { return has_scales(Format(format)); }
EXPORT int jaxllm_block_bytes(int format) { return block_bytes(Format(format)); }

// blocks [rows, columns, block_bytes] -> tiles [ceil(rows / 16), columns, tile_bytes]; rows that are not there are zero.
EXPORT void jaxllm_repack(int format, const uint8_t* blocks, int rows, int columns, uint8_t* tiles, int threads) {
  const Layout form = layout(Format(format));
  const int size = block_bytes(Format(format));
  in_parallel((rows + ROWS - 1) / ROWS, threads, [&](int begin, int end) {
    for (int g = begin; g < end; g++) {
      uint8_t* tile = tiles + int64_t(g) * columns * form.bytes();
      const int count = std::min(ROWS, rows - g * ROWS);
      if (count < ROWS) memset(tile, 0, size_t(columns) * form.bytes());
      for (int c = 0; c < columns; c++, tile += form.bytes())
        for (int r = 0; r < count; r++)
          place_block(Format(format), blocks + (int64_t(g * ROWS + r) * columns + c) * size, r, tile);
    }
  });
}

// tiles, and scales of formats that have them -> [rows, inputs]
EXPORT void jaxllm_unpack(int format, const uint8_t* tiles, const float* scales, int runs, int rows, int columns, int inputs, float* out, int threads) {
  const Matrix w{Format(format), tiles, rows, (rows + ROWS - 1) / ROWS, columns * layout(Format(format)).inputs, scales, runs};
  in_parallel(rows, threads, [&](int begin, int end) {
    for (int r = begin; r < end; r++) unpack_row(w, r, inputs, out + int64_t(r) * inputs);
  });
}
