#include "team.h"

#include <sched.h>
#include <stdint.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "dispatch.h"

namespace {

constexpr int MOST_THREADS = 256;
constexpr auto AWAKE = std::chrono::microseconds(200);  // that a helper looks for work before it sleeps

// One moment of waiting. Now and then another thread that wants this core gets it.
void pause(unsigned& spins) {
  if (++spins % 128 == 0) {
    sched_yield();
    return;
  }
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Team {
 public:
  // False where it is busy with another caller's.
  bool run(int threads, std::initializer_list<Phase> phases) {
    if (busy_.test_and_set(std::memory_order_acquire)) return false;
    threads = std::min(threads, MOST_THREADS);
    while (helpers_ < threads - 1) std::thread(&Team::help, this, ++helpers_).detach();
    threads_.store(threads, std::memory_order_relaxed);
    for (const Phase& phase : phases)
      if (phase.units) run(phase);
    busy_.clear(std::memory_order_release);
    return true;
  }

 private:
  // Each thread begins with its own share of the units, which lie beside each other in memory, and then takes what is
  // left of others'. A share's ticket counts the units that nobody has claimed; who claimed one may read what else there
  // is of the phase, for until that unit is done the caller goes nowhere.
  struct Ticket {
    alignas(64) std::atomic<uint64_t> left{0};  // below the phase's number, so that a late claim of another phase's fails
  };

  void run(const Phase& phase) {
    done_.store(0, std::memory_order_relaxed);
    units_.store(phase.units, std::memory_order_relaxed);
    work_.store(&phase.work, std::memory_order_relaxed);
    const uint64_t number = phase_.load(std::memory_order_relaxed) + 1;
    const int threads = threads_.load(std::memory_order_relaxed);
    for (int t = 0; t < threads; t++)
      tickets_[t].left.store(number << 32 | uint32_t(end(t) - end(t - 1)), std::memory_order_release);
    phase_.store(number);
    if (phase.units > 1 && asleep_.load()) {
      { const std::lock_guard<std::mutex> lock(mutex_); }
      awake_.notify_all();
    }
    work(0);
    for (unsigned spins = 0; done_.load(std::memory_order_acquire) < phase.units;) pause(spins);
  }

  // Where the share of thread `t` ends.
  int end(int t) const {
    return int(int64_t(units_.load(std::memory_order_relaxed)) * (t + 1) / threads_.load(std::memory_order_relaxed));
  }

  // Units that are left, of the thread's own share first.
  void work(int thread) {
    const int threads = threads_.load(std::memory_order_relaxed);
    for (int k = 0; k < threads; k++)
      for (const int t = (thread + k) % threads; work_a_unit(t);) {}
    kernels().rest();
  }

  bool work_a_unit(int t) {
    uint64_t left = tickets_[t].left.load(std::memory_order_acquire);
    do {
      if (!uint32_t(left)) return false;
    } while (!tickets_[t].left.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel));
    (*work_.load(std::memory_order_relaxed))(end(t) - int(uint32_t(left)));
    done_.fetch_add(1, std::memory_order_release);
    return true;
  }

  void help(int thread) {
    uint64_t seen = 0;
    auto since = std::chrono::steady_clock::now();
    for (unsigned spins = 0;;) {
      if (const uint64_t phase = phase_.load(std::memory_order_acquire); phase != seen) {
        seen = phase;
        if (thread < threads_.load(std::memory_order_relaxed)) work(thread);
        spins = 0;
        since = std::chrono::steady_clock::now();
        continue;
      }
      pause(spins);
      if (spins % 128 == 0 && std::chrono::steady_clock::now() - since > AWAKE) {
        std::unique_lock<std::mutex> lock(mutex_);
        asleep_.fetch_add(1);
        awake_.wait(lock, [&] { return phase_.load() != seen; });
        asleep_.fetch_sub(1);
      }
    }
  }

  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
  int helpers_ = 0;  // threads that were started; the busy caller's
  std::mutex mutex_;
  std::condition_variable awake_;
  std::atomic<int> asleep_{0};
  alignas(64) std::atomic<uint64_t> phase_{0};  // number of the last
  std::atomic<int> threads_{1}, units_{0};
  std::atomic<const std::function<void(int)>*> work_{nullptr};
  alignas(64) std::atomic<int> done_{0};
  Ticket tickets_[MOST_THREADS];
};

}  // namespace

void run_phases(int threads, std::initializer_list<Phase> phases) {
  static Team* const team = new Team;  // never deleted: helpers outlive main
  int most = 0;
  for (const Phase& phase : phases) most = std::max(most, phase.units);
  if (most > 1 && threads > 1 && team->run(std::min(threads, most), phases)) return;
  for (const Phase& phase : phases)
    for (int unit = 0; unit < phase.units; unit++) phase.work(unit);
  kernels().rest();
}
