// Which ISA's kernels run, and on how many threads. Both may be changed at any time between calls.
#pragma once
#include "kernels.h"

const Kernels& kernels();
int threads();
