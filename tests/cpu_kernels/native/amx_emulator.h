// Where the processor has AVX-512 and no AMX, lets the kernels believe that it has, and does what they ask of it.
#pragma once

void emulate_amx();

// Of this thread, where they are emulated.
bool tiles_are_shaped();
int times_tiles_were_shaped();
