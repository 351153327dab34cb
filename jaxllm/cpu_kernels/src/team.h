// Threads of our own that help whoever makes a call.
//
// Work comes as phases of numbered units, claimed one by one by the caller and its helpers. Helpers wait for the next
// phase spinning, for the calls of a step follow each other within microseconds and waking a thread takes tens of them;
// after a while without work they sleep. While they help one caller, others work alone.
#pragma once
#include <functional>
#include <initializer_list>

struct Phase {
  int units;
  std::function<void(int unit)> work;
};

// Returns when all phases are done, one after the other. At most `threads` work at once, the caller among them.
void run_phases(int threads, std::initializer_list<Phase> phases);
