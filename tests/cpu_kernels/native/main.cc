// Checks the kernels of each instruction set that is named and that this machine has, the best first: prints its name and
// a hash of its products. AMX is emulated where there is AVX-512 without it. The first argument is a file of what to
// expect, which is written if there is none.
#include <inttypes.h>
#include <string.h>

#include <fstream>

#include "amx_emulator.h"
#include "check.h"

extern "C" bool jaxllm_set_isa(const char* name);

Expected expected;

int main(int count, char** arguments) {
  const char* path = arguments[1];
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const bool known = bool(file);
  if (known) {
    expected.numbers.resize(size_t(file.tellg()) / sizeof(double));
    file.seekg(0);
    file.read((char*)expected.numbers.data(), std::streamsize(expected.numbers.size() * sizeof(double)));
    CHECK(bool(file) && expected.numbers.size(), "%s cannot be read", path);
  }
  for (int i = 2; i < count; i++)
    if (!strcmp(arguments[i], "amx")) emulate_amx();
  printf("best %s\n", kernels().name);
  for (int i = 2; i < count; i++) {
    if (!jaxllm_set_isa(arguments[i])) continue;
    const uint64_t hash = check_products();
    check_norms();
    check_gates();
    check_heads();
    check_attention();
    expected.begin_again();
    printf("%s %016" PRIx64 "\n", arguments[i], hash);
  }
  if (known || expected.numbers.empty()) return 0;
  std::ofstream kept(path, std::ios::binary);
  kept.write((const char*)expected.numbers.data(), std::streamsize(expected.numbers.size() * sizeof(double)));
  CHECK(bool(kept), "%s cannot be written", path);
}
