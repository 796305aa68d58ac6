#include "parallel.h"

#include <pthread.h>

#include <atomic>

namespace deepinfer {
namespace {

std::atomic<bool> forked{false};

const int registered = pthread_atfork(nullptr, nullptr, [] { forked.store(true); });

}  // namespace

bool threads_usable() { return registered != 0 || !forked.load(std::memory_order_relaxed); }

}  // namespace deepinfer
