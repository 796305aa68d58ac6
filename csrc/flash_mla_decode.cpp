// deepinfer::flash_mla_decode on CPU: checks, threads, memory. The plan is in flash_mla_decode_plan.h, the loops are in
// flash_mla_decode_kernel.h.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "checks.h"
#include "flash_mla_decode_plan.h"
#include "kernels.h"
#include "parallel.h"

namespace deepinfer {
namespace {

constexpr int64_t kWavePerThread = 8;         // splits in flight per thread: 8 x 258 KiB of partial results
constexpr int64_t kSerialProducts = 1 << 20;  // fewer key x head x latent products than this do not pay for threads

Scope make_scope(const char* indices_name, const char* length_name, const Tensor& cache, Format format,
                 const Tensor& indices, const std::optional<Tensor>& lengths) {
  return {indices_name,
          length_name,
          cache.const_data_ptr<uint8_t>(),
          cache.stride(0),
          cache.stride(1),
          cache.size(1),
          cache.size(0) * cache.size(1),
          format,
          indices.const_data_ptr<int32_t>(),
          indices.stride(0),
          indices.stride(1),
          indices.stride(2),
          indices.size(2),
          lengths ? lengths->const_data_ptr<int32_t>() : nullptr,
          lengths ? lengths->stride(0) : 0};
}

void check_lengths(const Checker& check, const Scope& scope, int64_t batch) {
  for (int64_t b = 0; scope.lengths && b < batch; ++b) {
    const int64_t length = scope.lengths[b * scope.stride_length];
    check.require(
        length >= 0 && length <= scope.topk, scope.length_name,
        [&] { return "a length in 0.." + std::to_string(scope.topk); },
        [&] { return std::to_string(length) + " at [" + std::to_string(b) + "]"; });
  }
}

[[noreturn]] void fail_index(const Checker& check, const std::vector<Scope>& scopes, int64_t b, int64_t s) {
  for (const Scope& scope : scopes) {
    for (int64_t k = 0; k < scope.length(b); ++k) {
      const int32_t slot = scope.row(b, s)[k * scope.stride_k];
      if (slot == -1 || scope.live(slot)) continue;
      const std::string at = std::to_string(b) + ", " + std::to_string(s) + ", " + std::to_string(k);
      check.fail(scope.indices_name, "-1 or a slot below " + std::to_string(scope.slots),
                 std::to_string(slot) + " at [" + at + "]");
    }
  }
  check.fail(scopes.front().indices_name, "indices that stay the same during the call", "a change");
}

class Decode {
 public:
  Decode(const Tensor& q, const Tensor& out, const std::optional<Tensor>& sink, double softmax_scale,
         std::vector<Scope> scopes)
      : b_(q.size(0)), s_q_(q.size(1)), h_q_(q.size(2)), plan_(b_ * s_q_, s_q_, h_q_, std::move(scopes)) {
    q_ = static_cast<const uint16_t*>(q.const_data_ptr());
    out_ = static_cast<uint16_t*>(out.mutable_data_ptr());
    for (int i = 0; i < 4; ++i) q_stride_[i] = q.stride(i);
    sink_ = sink ? sink->const_data_ptr<float>() : nullptr;
    sink_stride_ = sink ? sink->stride(0) : 0;
    sign_ = softmax_scale < 0 ? -1.0f : 1.0f;
    scale_ = std::abs(softmax_scale);
  }

  // Refuses bad lengths and indices, and learns how much work there is.
  void check_data(const Checker& check);
  void run();

 private:
  DecodeQuery query(const Unit& unit) const;
  DecodeOutput output(const Unit& unit) const;
  DecodePartial partial(int64_t index) const;
  void attend(const std::vector<Split>& wave, int64_t begin, int64_t end) const;
  void merge(const std::vector<Split>& wave) const;
  void merge_unit(const std::vector<Split>& wave, int64_t begin, int64_t end, int group) const;

  int64_t b_, s_q_, h_q_;
  DecodePlan plan_;
  const KernelTable& table_ = kernels();  // one instruction set for the whole call
  const uint16_t* q_;
  uint16_t* out_;
  int64_t q_stride_[4];
  const float* sink_;
  int64_t sink_stride_;
  float sign_;
  double scale_;
  float* partials_ = nullptr;  // one for the unit a wave leaves unfinished, then one per split of the wave
  bool threads_worthwhile_ = false;
};

void Decode::check_data(const Checker& check) {
  const int64_t rows = b_ * s_q_;
  int64_t listed = 0;
  for (const Scope& scope : plan_.scopes()) {
    check_lengths(check, scope, b_);
    listed += scope.topk * rows;
  }
  parallel_ranges(rows, listed > 1 << 16, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) plan_.count(row);
  });
  int64_t keys = 0;
  for (int64_t row = 0; row < rows; ++row) {
    if (plan_.live(row) < 0) fail_index(check, plan_.scopes(), row / s_q_, row % s_q_);
    keys += plan_.live(row);
  }
  threads_worthwhile_ = keys * h_q_ * kLatentDim > kSerialProducts;
}

DecodeQuery Decode::query(const Unit& unit) const {
  const int64_t b = unit.row / s_q_, s = unit.row % s_q_;
  const uint16_t* q = q_ + b * q_stride_[0] + s * q_stride_[1] + unit.head_begin * q_stride_[2];
  const int heads = static_cast<int>(std::min<int64_t>(kMaxHeads, h_q_ - unit.head_begin));
  return {q, q_stride_[2], q_stride_[3], heads, sign_, scale_};
}

DecodeOutput Decode::output(const Unit& unit) const {
  return {out_ + (unit.row * h_q_ + unit.head_begin) * kLatentDim,
          sink_ ? sink_ + unit.head_begin * sink_stride_ : nullptr, sink_stride_};
}

DecodePartial Decode::partial(int64_t index) const {
  float* p = partials_ + index * kPartialFloats;
  return {p, p + kPartialOut, p + kPartialOut + kMaxHeads, p + kPartialOut + 2 * kMaxHeads};
}

void Decode::attend(const std::vector<Split>& wave, int64_t begin, int64_t end) const {
  static thread_local Scratch memory;
  float* packed = memory.get(kPackedFloats + table_.decode_scratch_floats());
  for (int64_t i = begin; i < end; ++i) {
    const DecodeQuery q = query(wave[i].unit);
    if (i == begin || !(wave[i - 1].unit == wave[i].unit)) table_.pack_query(q, packed);
    DecodeKeys keys;
    plan_.gather(wave[i], keys);
    table_.decode_split(q, packed, keys, packed + kPackedFloats, partial(i + 1));
  }
}

// Joins the splits [begin, end) of one unit in key order; the state of an unfinished unit is kept in partial 0.
void Decode::merge_unit(const std::vector<Split>& wave, int64_t begin, int64_t end, int group) const {
  const Unit& unit = wave[begin].unit;
  const DecodeQuery q = query(unit);
  if (group >= table_.head_groups(q.heads)) return;
  const bool fresh = wave[begin].first;
  const DecodePartial state = partial(fresh ? begin + 1 : 0);
  for (int64_t i = begin + fresh; i < end; ++i) table_.merge(q, group, group + 1, partial(i + 1), state);
  if (wave[end - 1].last) table_.finish(q, group, group + 1, state, output(unit));
}

void Decode::merge(const std::vector<Split>& wave) const {
  std::vector<int64_t> units;  // begin of each unit in the wave, then the end
  const int64_t size = static_cast<int64_t>(wave.size());
  for (int64_t i = 0; i < size; ++i) {
    if (i == 0 || wave[i].first) units.push_back(i);
  }
  units.push_back(size);
  const int64_t groups = table_.head_groups(static_cast<int>(std::min<int64_t>(kMaxHeads, h_q_)));
  const int64_t tasks = (static_cast<int64_t>(units.size()) - 1) * groups;
  parallel_ranges(tasks, threads_worthwhile_, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      merge_unit(wave, units[task / groups], units[task / groups + 1], static_cast<int>(task % groups));
    }
  });
  const int64_t last_unit = units[units.size() - 2];
  if (!wave.back().last && wave[last_unit].first) {
    std::copy_n(partial(last_unit + 1).out, kPartialFloats, partials_);
  }
}

void Decode::run() {
  for (int64_t row = 0; row < b_ * s_q_; ++row) {
    if (plan_.live(row) == 0) std::fill_n(out_ + row * h_q_ * kLatentDim, h_q_ * kLatentDim, uint16_t{0});
  }
  static thread_local Scratch memory;
  const int64_t capacity = kWavePerThread * (threads_worthwhile_ ? thread_count() : 1);
  std::vector<Split> wave;
  Split split;
  bool more = plan_.next(split);
  while (more) {
    wave.clear();
    for (; more && static_cast<int64_t>(wave.size()) < capacity; more = plan_.next(split)) wave.push_back(split);
    const int64_t size = static_cast<int64_t>(wave.size());
    partials_ = memory.get((size + 1) * kPartialFloats);
    parallel_ranges(size, threads_worthwhile_, [&](int64_t begin, int64_t end) { attend(wave, begin, end); });
    merge(wave);
  }
}

Tensor flash_mla_decode(const Tensor& q, const Tensor& k_cache, const Tensor& indices,
                        const std::optional<Tensor>& topk_length, const std::optional<Tensor>& attn_sink,
                        const std::optional<Tensor>& extra_k_cache, const std::optional<Tensor>& extra_indices,
                        const std::optional<Tensor>& extra_topk_length, double softmax_scale,
                        std::optional<int64_t> max_requests, std::optional<int64_t> max_context,
                        const std::optional<Tensor>& chunk_block_table, std::optional<int64_t> chunk_blocks,
                        const std::optional<Tensor>& chunk_offset_len) {
  Checker check("flash_mla_decode");
  check.no_grad("q", q);
  check.no_grad("attn_sink", attn_sink);
  check.tensor("q", q, {ScalarType::BFloat16}, {"b", "s_q", "h_q", kLatentDim});
  const int64_t b = q.size(0), s_q = q.size(1), h_q = q.size(2);
  check.at_least("q", "s_q", s_q, 1);
  check.at_least("q", "h_q", h_q, 1);
  const Format format =
      check.paged_cache("k_cache", k_cache, kKvFormats, {"num_blocks", "page", 1, "bytes"}, /*planar=*/false);
  check.tensor("indices", indices, {ScalarType::Int}, {"b", "s_q", "topk"});
  if (topk_length) check.tensor("topk_length", *topk_length, {ScalarType::Int}, {"b"});
  if (attn_sink) check.tensor("attn_sink", *attn_sink, {ScalarType::Float}, {"h_q"});
  check.together("extra_indices", extra_indices.has_value(), "extra_k_cache", extra_k_cache.has_value());
  Format extra_format = format;
  if (extra_k_cache) {
    extra_format = check.paged_cache("extra_k_cache", *extra_k_cache, kKvFormats,
                                     {"extra_num_blocks", "extra_page", 1, "extra_bytes"}, /*planar=*/false);
    check.tensor("extra_indices", *extra_indices, {ScalarType::Int}, {"b", "s_q", "extra_topk"});
  }
  if (extra_topk_length) {
    if (!extra_k_cache) check.fail("extra_topk_length", "None without extra_k_cache", "a value");
    check.tensor("extra_topk_length", *extra_topk_length, {ScalarType::Int}, {"b"});
  }
  check.require(
      std::isfinite(softmax_scale), "softmax_scale", [] { return std::string("a finite number"); },
      [&] {
        return std::string(std::isnan(softmax_scale) ? "nan" : softmax_scale > 0 ? "inf" : "-inf");
      });
  if (max_requests) check.at_least("max_requests", "max_requests", *max_requests, 0);
  if (max_context) check.at_least("max_context", "max_context", *max_context, 0);
  check.together("chunk_blocks", chunk_blocks.has_value(), "chunk_block_table", chunk_block_table.has_value());
  check.together("chunk_offset_len", chunk_offset_len.has_value(), "chunk_block_table", chunk_block_table.has_value());
  if (chunk_block_table) {
    check.tensor("chunk_block_table", *chunk_block_table, {ScalarType::Int}, {"n"});
    check.at_least("chunk_blocks", "chunk_blocks", *chunk_blocks, 0);
    const int64_t n = chunk_block_table->size(0);
    check.require(
        *chunk_blocks <= n, "chunk_blocks", [&] { return "at most " + std::to_string(n); },
        [&] { return std::to_string(*chunk_blocks); });
    check.tensor("chunk_offset_len", *chunk_offset_len, {ScalarType::Int}, {"rows", 2});
    check.at_least("chunk_offset_len", "rows", chunk_offset_len->size(0), b * s_q);
  }

  Tensor out = torch::stable::new_empty(q, {b, s_q, h_q, kLatentDim});
  std::vector<Scope> scopes{make_scope("indices", "topk_length", k_cache, format, indices, topk_length)};
  if (extra_k_cache) {
    scopes.push_back(make_scope("extra_indices", "extra_topk_length", *extra_k_cache, extra_format, *extra_indices,
                                extra_topk_length));
  }
  Decode decode(q, out, attn_sink, softmax_scale, std::move(scopes));
  decode.check_data(check);
  decode.run();
  return out;
}

}  // namespace
}  // namespace deepinfer

STABLE_TORCH_LIBRARY_IMPL(deepinfer, CPU, m) { m.impl("flash_mla_decode", TORCH_BOX(&deepinfer::flash_mla_decode)); }
