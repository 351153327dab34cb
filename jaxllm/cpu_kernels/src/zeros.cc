// Zeroed memory that lies in huge pages from the start, where the system has them: gathering it afterwards takes longer.
// On Linux it takes memory only as it is used.
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "calls.h"
#include "team.h"

namespace {

constexpr size_t HUGE = size_t(2) << 20;
constexpr size_t PAGE = size_t(64) << 10;  // a multiple of every page size that Linux has on x86 and ARM

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

// Gives whole pages back to the system, which clears each when it is next used: until then it takes no memory. What
// XLA allocates is private to the process and comes from no file. Returns whether the system did so.
bool give_back(uint8_t* first, uint8_t* last) {
#if defined(__linux__)
  return first >= last || madvise(first, last - first, MADV_DONTNEED) == 0;
#else
  (void)first, (void)last;
  return false;
#endif
}

ffi::Error zeros(ffi::Result<ffi::AnyBuffer> out) {
  uint8_t* const begin = static_cast<uint8_t*>(out->untyped_data());
  const size_t bytes = out->size_bytes();
  uint8_t* const end = begin + bytes;
  uint8_t* const first = begin + (PAGE - reinterpret_cast<uintptr_t>(begin) % PAGE) % PAGE;
  uint8_t* const last = end - reinterpret_cast<uintptr_t>(end) % PAGE;
  ask_for_huge_pages(begin, bytes);
  if (first < last && give_back(first, last)) {
    memset(begin, 0, first - begin);
    memset(last, 0, end - last);
    return ffi::Error::Success();
  }
  const auto clear = [=](int piece) { memset(begin + piece * HUGE, 0, std::min(HUGE, bytes - piece * HUGE)); };
  run_phases(threads(), {{int((bytes + HUGE - 1) / HUGE), clear}});
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_zeros, zeros, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());
