// How weights lie in memory: tiles of 16 output rows by one block of inputs.
//
// A tile is [scales of the 16 rows][codes of 32 inputs] (inputs / 32 times the codes). Codes are unsigned and lie in
// "quads": 64 bytes = 16 rows x 4 consecutive inputs, the operand of one 512-bit dot product. 32 inputs are 8 quads.
//   4 bits: four lines of 64 bytes; the low nibbles of line p are quad 2p, the high ones quad 2p + 1
//   5 bits: one line of fifth bits before them; bit p of a byte belongs to quad p
//   6 bits: two lines of high bits before them; bits 2(p % 4) and up of line p / 4 belong to quad p
//   8 bits: eight lines, one a quad
//   bf16:   16 lines of [16 rows][2 inputs];   f32, e4m3: 32 inputs of [16 rows]
// Scales are IEEE halves unless said:
//   q4_0, q5_0, q8_0: [d]; w = d (code - zero)       q4_1, q5_1: [d][m]; w = d code + m
//   q4_k, q5_k: [d][dmin][8 x scale u8][8 x minimum u8]; w = d scale code - dmin minimum
//   q6_k: [d][16 x scale i8], one for 16 inputs; w = d scale (code - zero)
//   u4: [d][zero u8]; w = d (code - zero)
//   iq4_nl: [d]; iq4_xs: [d][8 x scale i8]; a nibble's code is 128 plus what it stands for; w = d scale (code - zero)
//   mxfp4: [e8m0]; the nibble n stands for a float of four bits; its code is 16 + twice that; w = 2^(e - 128) (code - zero)
//   nvfp4: [2 x e4m3], one for 16 inputs; codes as mxfp4; a float for each row lies outside of the tiles
//   i8, e4m3: none; a float for each row and run of inputs lies outside of the tiles
#pragma once
#include <stdint.h>

// Kernels of several ISAs share these types: their functions must never be calls into one another's copies.
#define MEMBER __attribute__((always_inline))

enum class Format : int { q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k, bf16, f32, u4, i8, e4m3, mxfp4, iq4_nl, iq4_xs, nvfp4, count };

constexpr int ROWS = 16;   // output rows in a tile
constexpr int BLOCK = 32;  // inputs that share an activation scale, and that kernels take at a time

struct Layout {
  int inputs;    // in a tile
  int bits;
  bool minimum;  // w = scale code + minimum, instead of scale (code - zero)
  int zero_log2; // log2 of zero; -1 where there is a minimum
  int header;    // bytes of scales
  int codes;     // bytes of codes of 32 inputs

  MEMBER constexpr int blocks() const { return inputs / BLOCK; }
  MEMBER constexpr int bytes() const { return header + codes * blocks(); }
  // Bits of a code as products take it, where nibbles are looked up.
  MEMBER constexpr int code_bits() const { return bits > zero_log2 ? bits : zero_log2 + 1; }
  MEMBER constexpr bool integer() const { return minimum || zero_log2 >= 0; }
};

static constexpr Layout layout(Format format) {
  switch (format) {
    case Format::q4_0: return {32, 4, false, 3, 32, 256};
    case Format::q4_1: return {32, 4, true, -1, 64, 256};
    case Format::q5_0: return {32, 5, false, 4, 32, 320};
    case Format::q5_1: return {32, 5, true, -1, 64, 320};
    case Format::q8_0: return {32, 8, false, 7, 32, 512};
    case Format::q4_k: return {256, 4, true, -1, 320, 256};
    case Format::q5_k: return {256, 5, true, -1, 320, 320};
    case Format::q6_k: return {256, 6, false, 5, 288, 384};
    case Format::u4: return {32, 4, true, -1, 48, 256};
    case Format::i8: return {32, 8, false, 7, 0, 512};
    case Format::e4m3: return {32, 8, false, -1, 0, 512};
    case Format::mxfp4: return {32, 4, false, 4, 16, 256};
    case Format::iq4_nl: return {32, 4, false, 7, 32, 256};
    case Format::iq4_xs: return {256, 4, false, 7, 160, 256};
    case Format::nvfp4: return {32, 4, false, 4, 32, 256};
    case Format::bf16: return {32, 16, false, -1, 0, 1024};
    default: return {32, 32, false, -1, 0, 2048};
  }
}

// Codes that nibbles are looked up in: floats of four bits (E2M1), doubled and counted from 16; what those of iq4 stand for, from 128.
static constexpr uint8_t FP4_CODES[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};
static constexpr uint8_t IQ4_CODES[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
MEMBER static inline constexpr bool has_levels(Format format) { return format >= Format::mxfp4 && format <= Format::nvfp4; }
MEMBER static inline constexpr const uint8_t* codes_of(Format format) { return format == Format::iq4_nl || format == Format::iq4_xs ? IQ4_CODES : FP4_CODES; }
// Whether each 16 inputs have a scale of their own.
MEMBER static inline constexpr bool splits(Format format) { return format == Format::q6_k || format == Format::nvfp4; }

MEMBER static inline constexpr bool has_scales(Format format) { return format == Format::i8 || format == Format::e4m3 || format == Format::nvfp4; }

// One matrix, [rows, inputs], in tiles [groups, blocks].
struct Matrix {
  Format format;
  const uint8_t* tiles;
  int rows;
  int groups;
  int inputs;           // padded to whole tiles
  const float* scales;  // [groups, runs, 16] of formats that have them; the inputs are so many runs of one length
  int runs;
  // Products of integer formats unpack weights with their scales to bf16, and take inputs as bf16, too.
  bool in_bf16 = false;

  MEMBER bool takes_codes() const { return layout(format).integer() && !in_bf16; }
  MEMBER const float* scales_of(int g) const { return scales + int64_t(g) * runs * ROWS; }
  // The same of another one of a stack that this is the first of.
  MEMBER Matrix of_stack(int64_t index) const {
    return {format, tiles + index * groups * group_bytes(), rows, groups, inputs, scales ? scales + index * groups * runs * ROWS : nullptr, runs, in_bf16};
  }
  MEMBER int64_t group_bytes() const { return int64_t(inputs / layout(format).inputs) * layout(format).bytes(); }
  MEMBER const uint8_t* group(int g) const { return tiles + g * group_bytes(); }
};
