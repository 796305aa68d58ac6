// The vocabulary of input checks, and the one form of their messages. deepinfer_ops/contract.py speaks the same one for
// fake functions and Neuron; tests/test_contract.py demands the same verdict and the same words from both.
//
// Devices need no check here: the dispatcher only calls a CPU kernel when every tensor argument is on the CPU.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "record_format.h"

namespace deepinfer {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A literal size, or the name of a size: bound where it first appears, compared from then on.
struct Dim {
  Dim(const char* name) : name(name) {}         // NOLINT: implicit, so that shapes read as lists
  Dim(int size) : name(nullptr), size(size) {}  // NOLINT
  const char* name;
  int64_t size = 0;
};

struct NamedFormat {
  Format format;
  const char* name;
  int64_t bytes;
};
inline constexpr NamedFormat kKvFormats[] = {{Format::kFp8, "fp8", KvFp8::kBytes},
                                             {Format::kFp4, "fp4", KvFp4::kBytes}};
inline constexpr NamedFormat kIndexFormats[] = {{Format::kFp8, "fp8", IndexFp8::kBytes},
                                                {Format::kFp4, "fp4", IndexFp4::kBytes}};

class Checker {
 public:
  explicit Checker(const char* op) : op_(op) {}

  [[noreturn]] void fail(const char* argument, const std::string& expected, const std::string& got) const;

  // `expected` and `got` are only called to build the message.
  template <class Expected, class Got>
  void require(bool ok, const char* argument, const Expected& expected, const Got& got) const {
    if (!ok) fail(argument, expected(), got());
  }

  // There is no backward: refuse to return a result that silently has no gradient.
  void no_grad(const char* argument, const Tensor& tensor) const;
  void no_grad(const char* argument, const std::optional<Tensor>& tensor) const {
    if (tensor) no_grad(argument, *tensor);
  }

  // dtype and shape, in this order
  void tensor(const char* argument, const Tensor& tensor, std::initializer_list<ScalarType> dtypes,
              std::initializer_list<Dim> shape);

  void at_least(const char* argument, const char* name, int64_t value, int64_t minimum) const;

  // `argument` comes exactly when `partner` does.
  void together(const char* argument, bool given, const char* partner, bool partner_given) const;

  // A paged uint8 cache [blocks, page, 1, bytes]. planar: stride(1) is exactly bytes, otherwise it may be larger.
  Format paged_cache(const char* argument, const Tensor& cache, const NamedFormat (&formats)[2],
                     std::initializer_list<Dim> shape, bool planar);

 private:
  struct Bound {
    const char* name;
    int64_t size;
  };
  const char* op_;
  Bound bound_[16];
  int bound_count_ = 0;

  int64_t* find(const char* name);
};

int32_t dtype_of(const Tensor& tensor);  // a ScalarType, as a number
inline bool is(const Tensor& tensor, ScalarType dtype) { return dtype_of(tensor) == static_cast<int32_t>(dtype); }
std::string list_text(const Tensor& tensor);

}  // namespace deepinfer
