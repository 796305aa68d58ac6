// Asks the CPU once which kernels it can run, honours DEEPINFER_CPU_CAPABILITY, and hands out one table.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace deepinfer {

namespace generic {
extern const KernelTable table;
}
#ifdef DEEPINFER_X86
namespace avx2 {
extern const KernelTable table;
}
namespace avx512 {
extern const KernelTable table;
}
#endif
#ifdef DEEPINFER_TEST_WIDE
namespace wide {
extern const KernelTable table;
}
#endif

namespace {

// Every table this CPU and operating system can run, best first. __builtin_cpu_supports also asks XCR0 whether the
// system saves the registers, so a masked AVX-512 is not chosen.
struct Supported {
  const KernelTable* tables[5] = {};
  const char* names[5] = {};
  int count = 0;

  Supported() {
#ifdef DEEPINFER_X86
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
    if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      add(avx512::table);
    }
    if (has_avx2) add(avx2::table);
#endif
    add(generic::table);
#ifdef DEEPINFER_TEST_WIDE
    add(wide::table);
#endif
  }

  void add(const KernelTable& table) {
    tables[count] = &table;
    names[count++] = table.name;
  }

  const KernelTable* find(const char* name) const {
    for (int i = 0; i < count; ++i) {
      if (std::strcmp(names[i], name) == 0) return tables[i];
    }
    return nullptr;
  }
};

const Supported& supported() {
  static const Supported instance;
  return instance;
}

const KernelTable* initial() {
  const char* wanted = std::getenv("DEEPINFER_CPU_CAPABILITY");
  if (wanted == nullptr || *wanted == '\0') return supported().tables[0];
  if (const KernelTable* table = supported().find(wanted)) return table;
  std::string known;
  for (int i = 0; i < supported().count; ++i) known += std::string(i ? ", " : "") + supported().names[i];
  throw std::runtime_error("DEEPINFER_CPU_CAPABILITY: expected one of " + known + ", got " + wanted);
}

std::atomic<const KernelTable*>& active() {
  static std::atomic<const KernelTable*> table{initial()};
  return table;
}

}  // namespace

const KernelTable& kernels() { return *active().load(std::memory_order_relaxed); }

const char* const* capabilities() { return supported().names; }

bool set_capability(const char* name) {
  const KernelTable* table = supported().find(name);
  if (table == nullptr) return false;
  active().store(table);
  return true;
}

}  // namespace deepinfer
