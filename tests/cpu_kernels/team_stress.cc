// Every unit of every phase is worked on once, phases follow each other, whoever calls and however many threads help. Threads rest
// when there are no more.
#include "dispatch.h"
#include "team.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

thread_local bool working = false;  // since it last rested
std::atomic<int> workers{0};

const Kernels& kernels() {
  static const Kernels table = [] {
    Kernels table{};
    table.rest = [] { workers -= working, working = false; };
    return table;
  }();
  return table;
}

void begin_unit() { workers += !working, working = true; }

void work(int caller) {
  unsigned seed = 7 * caller + 1;
  for (int round = 0; round < 3000; round++) {
    seed = seed * 1103515245 + 12345;
    const int units = int(seed >> 16) % 40, threads = 1 + int(seed >> 8) % 5;
    std::vector<int> first(units), second(units);  // written without a lock: only one thread may touch each
    run_phases(threads, {{units, [&](int u) { begin_unit(), first[u]++; }},
                         {units, [&](int u) { begin_unit(), second[u] += first[units - 1 - u]; }}});  // sees all of the first phase
    if (working) printf("caller %d round %d: no rest after the call\n", caller, round), exit(1);
    for (int u = 0; u < units; u++)
      if (first[u] != 1 || second[u] != 1) printf("caller %d round %d unit %d\n", caller, round, u), exit(1);
    if (round % 1000 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // helpers fall asleep
  }
}

int main() {
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; caller++) callers.emplace_back(work, caller);
  for (std::thread& caller : callers) caller.join();
  while (workers) std::this_thread::yield();
  puts("done");
  fflush(stdout);
  _Exit(0);  // helpers never end
}
