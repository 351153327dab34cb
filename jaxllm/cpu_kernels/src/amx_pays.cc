// AMX was never seen by its authors but in an emulator: a processor takes it by itself if it proves to be worth it.
#include <string.h>
#include <time.h>

#include <vector>

#include "dispatch.h"

#ifdef WITH_amx

namespace {

constexpr int INPUTS = 1024, TURNS = 8;

struct Trial {
  std::vector<uint8_t> tiles = std::vector<uint8_t>(2 * INPUTS / BLOCK * layout(Format::q4_0).bytes());
  std::vector<int8_t> codes = std::vector<int8_t>(PANEL_ROWS * INPUTS);
  std::vector<RowBlock> blocks = std::vector<RowBlock>(PANEL_ROWS * INPUTS / BLOCK, {1, 0, 0, 0});

  Trial() {
    uint32_t state = 1;
    const auto random = [&] { return uint8_t((state = state * 1664525 + 1013904223) >> 24); };
    for (uint8_t& byte : tiles) byte = random() & 0x3f;  // small numbers, where they are read as halves
    for (int8_t& code : codes) code = int8_t(random());
  }

  void run(const Kernels& kernels, std::vector<float>& out) {
    const Matrix w{Format::q4_0, tiles.data(), 2 * ROWS, 2, INPUTS, nullptr, 0};
    const Activations x{INPUTS, PANEL_ROWS, codes.data(), blocks.data(), nullptr, nullptr};
    kernels.product(w, x, 0, PANEL_ROWS, 0, 2, out.data());
  }
};

int64_t nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t(1000000000) + now.tv_nsec;
}

}  // namespace

bool amx_pays() {
  Trial trial;
  const Kernels* const tried[2] = {kernels_avx512bf16(), kernels_amx()};
  std::vector<float> out[2] = {std::vector<float>(PANEL_ROWS * PANEL_COLUMNS), std::vector<float>(PANEL_ROWS * PANEL_COLUMNS)};
  int64_t best[2] = {INT64_MAX, INT64_MAX};
  for (int turn = 0; turn < TURNS; turn++)
    for (int i = 0; i < 2; i++) {
      const int64_t start = nanoseconds();
      trial.run(*tried[i], out[i]);
      const int64_t took = nanoseconds() - start;
      if (took < best[i]) best[i] = took;
    }
  return !memcmp(out[0].data(), out[1].data(), out[0].size() * sizeof(float)) && best[1] < best[0];
}

#endif
