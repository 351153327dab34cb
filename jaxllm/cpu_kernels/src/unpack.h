// One row of a matrix in tiles, as floats.
#pragma once
#include <math.h>

#include "formats.h"
#include "half.h"

namespace {

inline float half_at(const uint8_t* p, int index) {
  uint16_t bits;
  memcpy(&bits, p + 2 * index, 2);
  return float_of_half(bits);
}

// Code of row `r` and input `i` (of 32) in the codes of one block.
inline int code_at(Format format, const uint8_t* codes, int r, int i) {
  const int bits = layout(format).bits;
  const int quad = i / 4, byte = r * 4 + i % 4;
  if (bits == 8) return codes[64 * quad + byte];
  const int planes = bits == 5 ? 1 : bits == 6 ? 2 : 0;
  const int nibble = codes[64 * (planes + quad / 2) + byte] >> 4 * (quad % 2) & 15;
  if (bits == 5) return nibble | (codes[byte] >> quad & 1) << 4;
  if (bits == 6) return nibble | (codes[64 * (quad / 4) + byte] >> 2 * (quad % 4) & 3) << 4;
  return has_levels(format) ? codes_of(format)[nibble] : nibble;
}

inline void unpack_tile(Format format, const uint8_t* tile, int r, float* out) {
  const Layout form = layout(format);
  for (int sub = 0; sub < form.blocks(); sub++, out += BLOCK) {
    const uint8_t* codes = tile + form.header + sub * form.codes;
    if (format == Format::f32) {
      for (int i = 0; i < BLOCK; i++) memcpy(out + i, codes + (i * ROWS + r) * 4, 4);
      continue;
    }
    if (format == Format::e4m3) {
      for (int i = 0; i < BLOCK; i++) out[i] = float_of_e4m3(codes[i * ROWS + r]);
      continue;
    }
    if (format == Format::bf16) {
      for (int i = 0; i < BLOCK; i++) {
        uint16_t bits;
        memcpy(&bits, codes + (i / 2 * ROWS + r) * 4 + i % 2 * 2, 2);
        out[i] = float_of_bf16(bits);
      }
      continue;
    }
    float scale = has_scales(format) ? 1 : format == Format::mxfp4 ? ldexpf(1, tile[r] - 128) : half_at(tile, r), minimum = 0;
    if (format == Format::u4) minimum = -scale * float(tile[32 + r]);
    if (format == Format::q4_1 || format == Format::q5_1) minimum = half_at(tile + 32, r);
    if (format == Format::q4_k || format == Format::q5_k) {
      scale *= float(tile[64 + 16 * sub + r]);
      minimum = -half_at(tile + 32, r) * float(tile[192 + 16 * sub + r]);
    }
    if (format == Format::iq4_xs) scale *= float(int8_t(tile[32 + 16 * sub + r]));
    const int zero = form.minimum ? 0 : 1 << form.zero_log2;
    for (int i = 0; i < BLOCK; i++) {
      float s = scale;
      if (format == Format::q6_k) s *= float(int8_t(tile[32 + 16 * (2 * sub + i / 16) + r]));
      if (format == Format::nvfp4) s *= float_of_e4m3(tile[16 * (i / 16) + r]) / 2;
      out[i] = s * float(code_at(format, codes, r, i) - zero) + minimum;
    }
  }
}

// `out` holds `size` inputs, which may end inside the last tile.
inline void unpack_row(const Matrix& w, int row, int size, float* out) {
  const Layout form = layout(w.format);
  const uint8_t* tile = w.group(row / ROWS);
  float last[256];
  for (int at = 0; at < size; at += form.inputs, tile += form.bytes()) {
    if (at + form.inputs <= size) {
      unpack_tile(w.format, tile, row % ROWS, out + at);
      continue;
    }
    unpack_tile(w.format, tile, row % ROWS, last);
    memcpy(out + at, last, size_t(size - at) * 4);
  }
  if (has_scales(w.format))
    for (int i = 0; i < size; i++) out[i] *= w.scales_of(row / ROWS)[i / (w.inputs / w.runs) * ROWS + row % ROWS];
}

}  // namespace
