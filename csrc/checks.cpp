#include "checks.h"

#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <cstring>
#include <iterator>
#include <stdexcept>

namespace deepinfer {
namespace {

// In the order of torch's ScalarType, which only ever grows at its end. Read as a number: the stable ABI's own
// conversion refuses the rarer ones.
constexpr const char* kDtypeNames[] = {"uint8",
                                       "int8",
                                       "int16",
                                       "int32",
                                       "int64",
                                       "float16",
                                       "float32",
                                       "float64",
                                       "complex32",
                                       "complex64",
                                       "complex128",
                                       "bool",
                                       "qint8",
                                       "quint8",
                                       "qint32",
                                       "bfloat16",
                                       "quint4x2",
                                       "quint2x4",
                                       "bits1x8",
                                       "bits2x4",
                                       "bits4x2",
                                       "bits8",
                                       "bits16",
                                       "float8_e5m2",
                                       "float8_e4m3fn",
                                       "float8_e5m2fnuz",
                                       "float8_e4m3fnuz",
                                       "uint16",
                                       "uint32",
                                       "uint64",
                                       "uint1",
                                       "uint2",
                                       "uint3",
                                       "uint4",
                                       "uint5",
                                       "uint6",
                                       "uint7",
                                       "int1",
                                       "int2",
                                       "int3",
                                       "int4",
                                       "int5",
                                       "int6",
                                       "int7",
                                       "float8_e8m0fnu",
                                       "float4_e2m1fn_x2",
                                       "bcomplex32"};

std::string dtype_name(int32_t dtype) {
  return dtype >= 0 && dtype < static_cast<int32_t>(std::size(kDtypeNames)) ? kDtypeNames[dtype] : "another dtype";
}

// "a", "a or b", "a, b or c"
void append_choice(std::string& text, const std::string& word, size_t index, size_t count) {
  if (index > 0) text += index + 1 == count ? " or " : ", ";
  text += word;
}

// The stable ABI has no requires_grad getter. A view made in grad mode is a leaf only if its base requires no gradient.
bool requires_grad(const Tensor& tensor) {
  const auto call = [](const char* op, const Tensor& self) {
    StableIValue stack[] = {torch::stable::detail::from(self)};
    STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, "", stack, TORCH_ABI_VERSION));
    return stack[0];
  };
  if (!aoti_torch_grad_mode_is_enabled()) return false;
  const Tensor view = torch::stable::detail::to<Tensor>(call("aten::alias", tensor));
  return !torch::stable::detail::to<bool>(call("aten::is_leaf", view));
}

}  // namespace

int32_t dtype_of(const Tensor& tensor) {
  int32_t dtype = -1;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return dtype;
}

std::string list_text(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t i = 0; i < tensor.dim(); ++i) text += (i ? ", " : "") + std::to_string(tensor.size(i));
  return text + "]";
}

void Checker::fail(const char* argument, const std::string& expected, const std::string& got) const {
  throw std::runtime_error(std::string("deepinfer::") + op_ + ": " + argument + ": expected " + expected + ", got " +
                           got);
}

int64_t* Checker::find(const char* name) {
  for (int i = 0; i < bound_count_; ++i) {
    if (std::strcmp(bound_[i].name, name) == 0) return &bound_[i].size;
  }
  return nullptr;
}

void Checker::no_grad(const char* argument, const Tensor& tensor) const {
  if (requires_grad(tensor)) {
    fail(argument, "a tensor that does not require grad (there is no backward)", "requires_grad=True");
  }
}

void Checker::tensor(const char* argument, const Tensor& tensor, std::initializer_list<ScalarType> dtypes,
                     std::initializer_list<Dim> shape) {
  const int32_t got = dtype_of(tensor);
  bool known = false;
  for (const ScalarType dtype : dtypes) known = known || static_cast<int32_t>(dtype) == got;
  if (!known) {
    std::string text = "dtype ";
    size_t index = 0;
    for (const ScalarType dtype : dtypes)
      append_choice(text, dtype_name(static_cast<int32_t>(dtype)), index++, dtypes.size());
    fail(argument, text, dtype_name(got));
  }
  bool same = tensor.dim() == static_cast<int64_t>(shape.size());
  const int bound_before = bound_count_;
  int64_t i = 0;
  for (const Dim* dim = shape.begin(); same && dim != shape.end(); ++dim, ++i) {
    const int64_t size = tensor.size(i);
    if (dim->name == nullptr) {
      same = size == dim->size;
    } else if (const int64_t* bound = find(dim->name)) {
      same = size == *bound;
    } else {
      bound_[bound_count_++] = {dim->name, size};
    }
  }
  if (same) return;
  bound_count_ = bound_before;  // the message names the sizes this tensor was to bind
  std::string text = "shape [";
  for (const Dim* dim = shape.begin(); dim != shape.end(); ++dim) {
    const int64_t* bound = dim->name == nullptr ? &dim->size : find(dim->name);
    text += (dim == shape.begin() ? "" : ", ") + (bound ? std::to_string(*bound) : dim->name);
  }
  fail(argument, text + "]", list_text(tensor));
}

void Checker::at_least(const char* argument, const char* name, int64_t value, int64_t minimum) const {
  if (value < minimum) fail(argument, std::string(name) + " >= " + std::to_string(minimum), std::to_string(value));
}

void Checker::together(const char* argument, bool given, const char* partner, bool partner_given) const {
  if (given && !partner_given) fail(argument, std::string("None without ") + partner, "a value");
  if (!given && partner_given) fail(argument, std::string("a value with ") + partner, "None");
}

Format Checker::paged_cache(const char* argument, const Tensor& cache, const NamedFormat (&formats)[2],
                            std::initializer_list<Dim> shape, bool planar) {
  tensor(argument, cache, {ScalarType::Byte}, shape);
  const int64_t blocks = cache.size(0), page = cache.size(1), record = cache.size(3);
  const NamedFormat* found = nullptr;
  std::string known;
  for (const NamedFormat& entry : formats) {
    if (entry.bytes == record) found = &entry;
  }
  if (found == nullptr) {
    size_t index = 0;
    for (const NamedFormat& entry : formats) {
      append_choice(known, std::to_string(entry.bytes) + " (" + entry.name + ")", index++, 2);
    }
    fail(argument, std::string((shape.begin() + 3)->name) + " " + known, std::to_string(record));
  }
  at_least(argument, (shape.begin() + 1)->name, page, 1);
  const auto stride = [&](int64_t i) { return [&cache, i] { return std::to_string(cache.stride(i)); }; };
  require(cache.stride(3) == 1, argument, [] { return "stride(3) 1"; }, stride(3));
  int64_t token = record;
  if (page > 1) {
    token = cache.stride(1);
    require(
        planar ? token == record : token >= record, argument,
        [&] { return std::string("stride(1) ") + (planar ? "" : ">= ") + std::to_string(record); }, stride(1));
  }
  if (blocks > 1) {
    // Blocks follow each other, or (records of many blocks in turn) tokens do.
    const int64_t block = cache.stride(0);
    const bool apart =
        block >= (page - 1) * token + record || (block >= record && token >= (blocks - 1) * block + record);
    require(
        apart, argument, [] { return std::string("blocks that do not overlap"); },
        [&] { return "stride(0) " + std::to_string(block) + ", stride(1) " + std::to_string(token); });
  }
  return found->format;
}

}  // namespace deepinfer
