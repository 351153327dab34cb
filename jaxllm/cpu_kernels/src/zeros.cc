// Zeroed memory that lies in huge pages from the start, where the system has them: gathering it afterwards takes longer.
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "calls.h"
#include "team.h"

namespace {

constexpr size_t HUGE = size_t(2) << 20;

// What of [begin, begin + bytes) is whole huge pages. Refused advice costs nothing but speed.
void ask_for_huge_pages(uint8_t* begin, size_t bytes) {
#if defined(__linux__)
  const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + HUGE - 1) / HUGE * HUGE;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(begin) + bytes) / HUGE * HUGE;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)begin, (void)bytes;
#endif
}

ffi::Error zeros(ffi::Result<ffi::AnyBuffer> out) {
  uint8_t* const begin = static_cast<uint8_t*>(out->untyped_data());
  const size_t bytes = out->size_bytes();
  ask_for_huge_pages(begin, bytes);
  const auto clear = [=](int piece) { memset(begin + piece * HUGE, 0, std::min(HUGE, bytes - piece * HUGE)); };
  run_phases(threads(), {{int((bytes + HUGE - 1) / HUGE), clear}});
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_zeros, zeros, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());
