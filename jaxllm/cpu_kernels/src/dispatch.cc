#include "dispatch.h"

#include <string.h>

#include <atomic>
#include <utility>
#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

#if defined(__x86_64__)
EXPORT bool jaxllm_has_amx();
#endif

namespace {

struct Candidate {
  const Kernels* (*table)();
  bool (*runs_here)();
};

#if defined(__x86_64__)

// Bits of cpuid leaf 7, subleaf 1, register eax.
bool leaf_7_1(int bit) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> bit & 1);
}

// __builtin_cpu_supports also asks whether the operating system keeps the registers.
[[maybe_unused]] bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
[[maybe_unused]] bool has_avxvnni() { return has_avx2() && leaf_7_1(4); }
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}
bool has_avx512bf16() { return has_avx512() && leaf_7_1(5); }

// Tiles with int8 and bf16; Linux lets a process have them that asks.
bool has_tiles() {
#if defined(__linux__)
  constexpr unsigned needed = 1 << 22 | 1 << 24 | 1 << 25;
  constexpr long request_permission = 0x1023, tile_data = 18;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & needed) == needed && !syscall(SYS_arch_prctl, request_permission, tile_data);
#else
  return false;
#endif
}

#elif defined(__aarch64__) && defined(__APPLE__)

bool has_feature(const char* name) {
  int value = 0;
  size_t size = sizeof value;
  return !sysctlbyname(name, &value, &size, nullptr, 0) && value;
}
[[maybe_unused]] bool has_neon() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
[[maybe_unused]] bool has_neon_i8mm() { return has_neon() && has_feature("hw.optional.arm.FEAT_I8MM"); }

#elif defined(__aarch64__)

// Bits of the kernel's interface: HWCAP_ASIMDDP and HWCAP2_I8MM, which old headers lack.
[[maybe_unused]] bool has_neon() { return getauxval(AT_HWCAP) >> 20 & 1; }
[[maybe_unused]] bool has_neon_i8mm() { return has_neon() && (getauxval(AT_HWCAP2) >> 13 & 1); }

#endif

// Of those that were compiled, the best first: which of them a process takes depends on nothing but what runs here.
const Candidate CANDIDATES[] = {
#ifdef WITH_amx
    {kernels_amx, jaxllm_has_amx},
#endif
#ifdef WITH_avx512bf16
    {kernels_avx512bf16, has_avx512bf16},
#endif
#ifdef WITH_avx512
    {kernels_avx512, has_avx512},
#endif
#ifdef WITH_avxvnni
    {kernels_avxvnni, has_avxvnni},
#endif
#ifdef WITH_avx2
    {kernels_avx2, has_avx2},
#endif
#ifdef WITH_neon_i8mm
    {kernels_neon_i8mm, has_neon_i8mm},
#endif
#ifdef WITH_neon
    {kernels_neon, has_neon},
#endif
    {kernels_portable, [] { return true; }},
};

const Kernels* find(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  for (const Candidate& candidate : CANDIDATES)
    if ((!name || !strcmp(candidate.table()->name, name)) && candidate.runs_here()) return candidate.table();
  return nullptr;
}

std::atomic<const Kernels*> chosen{nullptr};
std::atomic<int> thread_count{1};

}  // namespace

#if defined(__x86_64__)
EXPORT bool jaxllm_has_amx() { return has_avx512bf16() && has_tiles(); }

bool reads_by_group = (__builtin_cpu_init(), __builtin_cpu_is("amd"));
#else
bool reads_by_group = false;
#endif

const Kernels& kernels() {
  if (!chosen) chosen = find(nullptr);
  return *chosen;
}

int threads() { return thread_count; }

// Null for the best; false where this machine cannot run it.
EXPORT bool jaxllm_set_isa(const char* name) {
  const Kernels* found = find(name);
  if (found) chosen = found;
  return found;
}

EXPORT bool jaxllm_runs_isa(const char* name) { return find(name); }

// Whether its products with bf16 weights, and its attention over pages of 16 or 8 bits, round what they multiply to bf16.
EXPORT bool jaxllm_rounds_to_bf16(const char* name) {
  const Kernels* found = find(name);
  return found && found->has_bf16;
}

// Gives what was set before.
EXPORT bool jaxllm_set_reads_by_group(bool value) { return std::exchange(reads_by_group, value); }

EXPORT const char* jaxllm_isa() { return kernels().name; }

EXPORT void jaxllm_set_threads(int count) { thread_count = count < 1 ? 1 : count; }
