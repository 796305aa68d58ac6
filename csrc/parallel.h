// Threads: torch's own pool, through the stable ABI.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <cstdlib>
#include <new>

namespace deepinfer {

// False in a child forked from a process that had loaded the library: OpenMP's worker threads do not survive a fork,
// and starting a team there can hang, so the child computes on its one thread.
bool threads_usable();

inline int64_t thread_count() { return threads_usable() ? torch::stable::get_num_threads() : 1; }

// body(begin, end) over [0, n) in contiguous chunks, one per thread; inline where threads are not worth starting.
template <class Body>
void parallel_ranges(int64_t n, bool worthwhile, const Body& body) {
  if (n <= 0) return;
  if (n == 1 || !worthwhile || !threads_usable()) {
    body(int64_t{0}, n);
  } else {
    torch::stable::parallel_for(0, n, 1, body);
  }
}

// Float memory of one thread, 64-byte aligned, kept between calls so that small calls pay no allocation.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  float* get(int64_t floats) {
    if (floats > size_) {
      std::free(data_);
      size_ = 0;
      const size_t bytes = (static_cast<size_t>(floats) * sizeof(float) + 63) / 64 * 64;
      data_ = static_cast<float*>(std::aligned_alloc(64, bytes));
      if (data_ == nullptr) throw std::bad_alloc();
      size_ = floats;
    }
    return data_;
  }

 private:
  float* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace deepinfer
