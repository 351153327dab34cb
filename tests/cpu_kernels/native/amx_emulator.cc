// AMX for processors that lack it: instructions on tiles, which are illegal there, are done in the handler of that signal.
#if defined(__x86_64__)
#include "amx_emulator.h"

#include <dlfcn.h>
#include <signal.h>
#include <string.h>
#include <ucontext.h>

#include "check.h"
#include "half.h"

extern "C" bool jaxllm_runs_isa(const char* name);

namespace {

struct Tile {
  int rows = 0, bytes = 0;
  alignas(64) uint8_t data[16][64] = {};
};
thread_local Tile tiles[8];
thread_local bool shaped = false;
thread_local int times_shaped = 0;
bool emulating = false;

constexpr int REGISTERS[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                               REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

// One instruction with a VEX prefix of three bytes, in the map 0F38.
struct Instruction {
  greg_t* registers;
  const uint8_t* at;
  int opcode, prefix, extra_register, mod, reg, rm;
  const uint8_t* address = nullptr;  // without the index
  int64_t index = 0;                 // scaled: a stride, where tiles are loaded or stored
  int length;

  Instruction(const uint8_t* code, greg_t* registers) : registers(registers), at(code) {
    CHECK(at[0] == 0xc4 && (at[1] & 0x1f) == 2, "illegal instruction %02x %02x %02x %02x", at[0], at[1], at[2], at[3]);
    opcode = at[3], prefix = at[2] & 3, extra_register = ~at[2] >> 3 & 15;
    mod = at[4] >> 6, reg = at[4] >> 3 & 7, rm = at[4] & 7;
    length = 5;
    if (mod != 3) find_address();
  }

  int64_t value(int number) const { return registers[REGISTERS[number]]; }

  void find_address() {
    const int high_index = ~at[1] >> 6 & 1, high_base = ~at[1] >> 5 & 1;
    int64_t base = 0;
    int displacement = mod == 1 ? 1 : mod == 2 ? 4 : 0;
    bool from_next = false;
    if (rm == 4) {
      const uint8_t sib = at[length++];
      const int index_register = (sib >> 3 & 7) | high_index << 3;
      if (index_register != 4) index = value(index_register) << (sib >> 6);
      if ((sib & 7) == 5 && mod == 0) displacement = 4;
      else base = value((sib & 7) | high_base << 3);
    } else if (rm == 5 && mod == 0) {
      displacement = 4, from_next = true;
    } else {
      base = value(rm | high_base << 3);
    }
    if (displacement == 1) base += int8_t(at[length]);
    if (displacement == 4) {
      int32_t d;
      memcpy(&d, at + length, 4);
      base += d;
    }
    length += displacement;
    address = (const uint8_t*)(base + (from_next ? int64_t(at) + length : 0));
  }
};

// All 64 bytes: a compiler may drop stores of some, and a processor refuses what is left in the others.
void configure(const uint8_t* shapes) {
  CHECK(shapes[0] == 1 && shapes[1] == 0, "palette %d", shapes[0]);
  for (int i = 2; i < 64; i++)
    if (i < 16 || (i >= 32 && i < 48) || i >= 56) CHECK(!shapes[i], "byte %d of the shapes is %d", i, shapes[i]);
  for (int i = 0; i < 8; i++) {
    uint16_t bytes;
    memcpy(&bytes, shapes + 16 + 2 * i, 2);
    tiles[i] = Tile{};
    tiles[i].bytes = bytes, tiles[i].rows = shapes[48 + i];
    CHECK(bytes && bytes <= 64 && tiles[i].rows && tiles[i].rows <= 16, "tile %d of %d x %d", i, tiles[i].rows, bytes);
  }
  shaped = true, times_shaped++;
}

// By the kind of codes that each operand has: signed where `prefix` says so.
void multiply_codes(Tile& sums, const Tile& a, const Tile& b, int prefix) {
  const bool a_signed = prefix >= 2, b_signed = prefix == 1 || prefix == 3;
  const auto value = [](uint8_t code, bool is_signed) { return is_signed ? int(int8_t(code)) : int(code); };
  for (int m = 0; m < sums.rows; m++)
    for (int n = 0; n < sums.bytes / 4; n++) {
      int32_t sum;
      memcpy(&sum, &sums.data[m][4 * n], 4);
      for (int k = 0; k < a.bytes; k++) sum += value(a.data[m][k], a_signed) * value(b.data[k / 4][4 * n + k % 4], b_signed);
      memcpy(&sums.data[m][4 * n], &sum, 4);
    }
}

// Numbers below 2^-126 count as zero, inputs and results.
inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }

// Even inputs in one chain, odd ones in another, as Intel's manual has it and a processor was seen to do.
__attribute__((target("fma"))) void multiply_bf16(Tile& sums, const Tile& a, const Tile& b) {
  const auto number = [](const uint8_t* bits) {
    uint16_t x;
    memcpy(&x, bits, 2);
    return flushed(float_of_bf16(x));
  };
  float of_columns[16][2][16];
  for (int k = 0; k < b.rows; k++)
    for (int odd = 0; odd < 2; odd++)
      for (int n = 0; n < sums.bytes / 4; n++) of_columns[k][odd][n] = number(&b.data[k][4 * n + 2 * odd]);
  for (int m = 0; m < sums.rows; m++) {
    float of_pairs[2][16] = {};
    for (int k = 0; k < b.rows; k++)
      for (int odd = 0; odd < 2; odd++) {
        const float of_row = number(&a.data[m][4 * k + 2 * odd]);
        for (int n = 0; n < sums.bytes / 4; n++) of_pairs[odd][n] = flushed(__builtin_fmaf(of_row, of_columns[k][odd][n], of_pairs[odd][n]));
      }
    for (int n = 0; n < sums.bytes / 4; n++) {
      float sum;
      memcpy(&sum, &sums.data[m][4 * n], 4);
      sum = flushed(flushed(sum) + flushed(of_pairs[0][n] + of_pairs[1][n]));
      memcpy(&sums.data[m][4 * n], &sum, 4);
    }
  }
}

void run(const Instruction& i) {
  if (i.opcode == 0x49 && i.prefix == 0 && i.mod != 3) return configure(i.address);
  if (i.opcode == 0x49 && i.prefix == 0) {
    for (Tile& tile : tiles) tile = Tile{};
    shaped = false;
    return;
  }
  Tile& tile = tiles[i.reg];
  CHECK(tile.rows, "tile %d has no shape", i.reg);
  if (i.opcode == 0x49 && i.prefix == 3) {
    memset(tile.data, 0, sizeof tile.data);
  } else if (i.opcode == 0x4b && i.prefix == 3) {
    memset(tile.data, 0, sizeof tile.data);
    for (int r = 0; r < tile.rows; r++) memcpy(tile.data[r], i.address + r * i.index, size_t(tile.bytes));
  } else if (i.opcode == 0x4b && i.prefix == 2) {
    for (int r = 0; r < tile.rows; r++) memcpy((uint8_t*)i.address + r * i.index, tile.data[r], size_t(tile.bytes));
  } else {
    const Tile &a = tiles[i.rm], &b = tiles[i.extra_register];
    CHECK(i.mod == 3 && (i.opcode == 0x5e || (i.opcode == 0x5c && i.prefix == 2)), "unknown instruction %02x, prefix %d", i.opcode, i.prefix);
    CHECK(a.rows == tile.rows && b.bytes == tile.bytes && a.bytes == 4 * b.rows, "%d x %d by %d x %d", a.rows, a.bytes, b.rows, b.bytes);
    if (i.opcode == 0x5e) multiply_codes(tile, a, b, i.prefix);
    else multiply_bf16(tile, a, b);
  }
}

void on_illegal_instruction(int, siginfo_t*, void* context) {
  greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  const Instruction instruction((const uint8_t*)registers[REG_RIP], registers);
  run(instruction);
  registers[REG_RIP] += instruction.length;
}

}  // namespace

// In the place of the library's own.
extern "C" bool jaxllm_has_amx() {
  static const auto real = (bool (*)())dlsym(RTLD_NEXT, "jaxllm_has_amx");
  return emulating || real();
}

void emulate_amx() {
  if (jaxllm_has_amx() || !jaxllm_runs_isa("avx512bf16")) return;
  struct sigaction action = {};
  action.sa_sigaction = on_illegal_instruction;
  action.sa_flags = SA_SIGINFO;
  CHECK(!sigaction(SIGILL, &action, nullptr), "no handler");
  emulating = true;
}

bool tiles_are_shaped() { return shaped; }
int times_tiles_were_shaped() { return times_shaped; }

#else

#include "amx_emulator.h"
void emulate_amx() {}
bool tiles_are_shaped() { return false; }
int times_tiles_were_shaped() { return 0; }

#endif
