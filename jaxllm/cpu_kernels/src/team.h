// A parallel region on XLA's own thread pool.
//
// Work is cut into phases of numbered units, claimed one by one by whoever is there: the caller, and workers that the
// pool sends when it can. A phase is over when its units are done, so a worker that comes late, or never, costs nothing
// but its share. A late worker finds every unit taken and leaves; it never touches what the caller's frame held.
#pragma once
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <initializer_list>
#include <memory>

#include "xla/ffi/api/ffi.h"

struct Phase {
  int units;
  std::function<void(int unit)> work;
};

class Region {
 public:
  explicit Region(std::initializer_list<Phase> phases) : count_(int(phases.size())) {
    std::copy(phases.begin(), phases.end(), phases_);
  }

  void work() {
    for (int p = 0; p < count_; p++) {
      const Phase& phase = phases_[p];
      State& state = states_[p];
      int done = 0;
      for (int unit; (unit = state.next.fetch_add(1, std::memory_order_relaxed)) < phase.units; done++) phase.work(unit);
      state.done.fetch_add(done, std::memory_order_acq_rel);
      for (int spins = 0; state.done.load(std::memory_order_acquire) < phase.units;) pause(++spins);
    }
  }

 private:
  static constexpr int MOST = 4;

  struct State {
    alignas(64) std::atomic<int> next{0};
    alignas(64) std::atomic<int> done{0};
  };

  static void pause(int spins) {
    if (spins % 4096 == 0) {
      sched_yield();
      return;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  int count_;
  Phase phases_[MOST];
  State states_[MOST];
};

// Returns when all phases are done, one after the other.
inline void run_phases(xla::ffi::ThreadPool& pool, int threads, std::initializer_list<Phase> phases) {
  int most = 0;
  for (const Phase& phase : phases) most = std::max(most, phase.units);
  const auto region = std::make_shared<Region>(phases);
  for (int helper = 1; helper < std::min(threads, most); helper++) pool.Schedule([region] { region->work(); });
  region->work();
}
