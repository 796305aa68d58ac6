// Operators that only allocate their result, with the schemas of the small-call cases and registered as deepinfer_ops
// registers its own: boxed by the stable ABI, one CPU kernel each. What the real ones cost beyond these is theirs.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor softmax_pool(const Tensor& score_rows, const Tensor&) {
  return torch::stable::new_empty(score_rows, {score_rows.size(0), score_rows.size(2)}, ScalarType::BFloat16);
}

Tensor flash_mla_decode(const Tensor& q, const Tensor&, const Tensor&, const std::optional<Tensor>&,
                        const std::optional<Tensor>&, const std::optional<Tensor>&, const std::optional<Tensor>&,
                        const std::optional<Tensor>&, double, std::optional<int64_t>, std::optional<int64_t>,
                        const std::optional<Tensor>&, std::optional<int64_t>, const std::optional<Tensor>&) {
  return torch::stable::new_empty(q, {q.size(0), q.size(1), q.size(2), q.size(3)});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepinfer_empty, CPU, m) {
  m.impl("softmax_pool", TORCH_BOX(&softmax_pool));
  m.impl("flash_mla_decode", TORCH_BOX(&flash_mla_decode));
}
