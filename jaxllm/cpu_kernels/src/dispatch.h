// Which ISA's kernels run, and on how many threads. Both may be changed at any time between calls.
#pragma once
#include "kernels.h"

const Kernels& kernels();
int threads();

// Whether AMX's kernels compute what AVX-512's do on this processor, which has both, and in less time.
bool amx_pays();
