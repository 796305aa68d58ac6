// deepinfer::softmax_pool on CPU: checks and threads. The loop is in softmax_pool_kernel.h.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "checks.h"
#include "kernels.h"
#include "parallel.h"

namespace deepinfer {
namespace {

constexpr int64_t kChunk = 128;              // columns of one work item, so that few wide rows still use every thread
constexpr int64_t kSerialEntries = 1 << 15;  // below this many scores threads cost more than they save

Tensor softmax_pool(const Tensor& score_rows, const Tensor& latent_rows) {
  Checker check("softmax_pool");
  check.no_grad("score_rows", score_rows);
  check.no_grad("latent_rows", latent_rows);
  check.tensor("score_rows", score_rows, {ScalarType::Float}, {"N", "R", "D"});
  const int64_t n = score_rows.size(0), r = score_rows.size(1), d = score_rows.size(2);
  check.at_least("score_rows", "R", r, 1);
  check.tensor("latent_rows", latent_rows, {ScalarType::Float}, {"N", "R", "D"});

  Tensor out = torch::stable::new_empty(score_rows, {n, d}, ScalarType::BFloat16);
  const KernelTable& table = kernels();
  const auto* score = score_rows.const_data_ptr<float>();
  const auto* latent = latent_rows.const_data_ptr<float>();
  auto* result = static_cast<uint16_t*>(out.mutable_data_ptr());
  const int64_t chunks = (d + kChunk - 1) / kChunk;
  const int64_t score_n = score_rows.stride(0), latent_n = latent_rows.stride(0);
  PoolRow row{
      nullptr, nullptr, score_rows.stride(1), score_rows.stride(2), latent_rows.stride(1), latent_rows.stride(2),
      r,       nullptr};
  parallel_ranges(n * chunks, n * r * d > kSerialEntries, [&, row](int64_t begin, int64_t end) {
    PoolRow item = row;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t at = i / chunks, first = i % chunks * kChunk;
      item.score = score + at * score_n;
      item.latent = latent + at * latent_n;
      item.out = result + at * d;
      table.pool(item, first, std::min(first + kChunk, d));
    }
  });
  return out;
}

}  // namespace
}  // namespace deepinfer

STABLE_TORCH_LIBRARY_IMPL(deepinfer, CPU, m) { m.impl("softmax_pool", TORCH_BOX(&deepinfer::softmax_pool)); }
