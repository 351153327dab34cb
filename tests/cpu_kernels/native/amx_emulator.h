// Where the processor has AVX-512 and no AMX, lets the kernels believe that it has, and does what they ask of it.
#pragma once

void emulate_amx();
