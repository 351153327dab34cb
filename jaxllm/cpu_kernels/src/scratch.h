#pragma once
#include <stddef.h>
#include <stdint.h>

#include <vector>

// Bytes that live as long as the thread, and grow.
class Scratch {
 public:
  void clear() { used_ = 0; }
  void reserve(size_t bytes) {
    if (bytes + 64 > room_.size()) room_.resize(bytes + 64);
  }
  // Room must have been reserved.
  template <class T>
  T* take(size_t count) {
    const size_t base = reinterpret_cast<size_t>(room_.data()), at = (base + used_ + 63) / 64 * 64 - base;
    used_ = at + count * sizeof(T);
    return reinterpret_cast<T*>(room_.data() + at);
  }

 private:
  std::vector<uint8_t> room_;
  size_t used_ = 0;
};
