// Checks the kernels of each instruction set that is named and that this machine has, the best first: prints its name and
// a hash of its products.
#include <inttypes.h>

#include "check.h"

extern "C" bool jaxllm_set_isa(const char* name);

int main(int count, char** names) {
  printf("best %s\n", kernels().name);
  for (int i = 1; i < count; i++) {
    if (!jaxllm_set_isa(names[i])) continue;
    const uint64_t hash = check_products();
    check_norms();
    check_gates();
    check_heads();
    check_attention();
    printf("%s %016" PRIx64 "\n", names[i], hash);
  }
}
