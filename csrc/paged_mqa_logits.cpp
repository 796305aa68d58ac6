// deepinfer::paged_mqa_logits on CPU: checks, work plan, threads. The loops are in paged_mqa_logits_kernel.h.
//
// Consecutive tokens whose block tables agree (speculative tokens, a prompt chunk) form a group: a block of keys is
// decoded once for all of them. Every logit is computed alone, so grouping and threads never change a bit.
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "checks.h"
#include "kernels.h"
#include "parallel.h"

namespace deepinfer {
namespace {

constexpr int64_t kRowAlignment = 256;        // elements: 512 bytes, as in DeepGEMM
constexpr int64_t kGroupFloats = 1 << 16;     // packed queries of one group stay in L2
constexpr int64_t kMaxGroup = 8;              // tokens
constexpr int64_t kSerialProducts = 1 << 20;  // below this many key x head x dim products threads do not pay
constexpr uint16_t kMinusInfinity = 0xff80;   // bf16

// Tokens [begin, end) that read the same pages, and their share of the work items (one per block of keys).
struct Group {
  int64_t begin, end;
  int64_t leader;  // the token with the longest context
  int64_t first_item;
};

class Logits {
 public:
  Logits(const Tensor& q_data, const Tensor& q_sf, Format q_format, const Tensor& cache, Format k_format,
         const Tensor& weights, const Tensor& block_table, bool one_sequence);
  void set_contexts(const Checker& check, const Tensor& context_lens, int64_t max_context_len, int64_t pages);
  void run(uint16_t* out, int64_t out_stride, int64_t max_context_len) const;

 private:
  const int32_t* table_row(int64_t t) const { return table_ + (one_sequence_ ? 0 : t * table_stride_t_); }
  int32_t page(int64_t t, int64_t column) const { return table_row(t)[column * table_stride_w_]; }
  int64_t pages_of(int64_t context) const { return (context + page_kv_ - 1) / page_kv_; }
  bool same_pages(int64_t t, int64_t other) const;
  LogitsQuery query(int64_t t) const;
  LogitsKeys keys(int64_t t, int64_t begin, int64_t end) const;
  std::vector<Group> groups(int64_t& items) const;

  int64_t tokens_, heads_;
  const uint8_t *q_data_, *q_sf_, *cache_, *weights_;
  int64_t q_stride_[4], sf_stride_[4], weight_stride_[2];
  int sf_item_;
  bool weights_bf16_;
  Format q_format_, k_format_;
  int64_t data_bytes_, scale_bytes_, page_kv_, block_stride_;
  const int32_t* table_;
  int64_t table_stride_t_, table_stride_w_, table_width_;
  bool one_sequence_;
  std::vector<int64_t> contexts_;
};

Logits::Logits(const Tensor& q_data, const Tensor& q_sf, Format q_format, const Tensor& cache, Format k_format,
               const Tensor& weights, const Tensor& block_table, bool one_sequence) {
  tokens_ = q_data.size(0), heads_ = q_data.size(2);
  q_data_ = static_cast<const uint8_t*>(q_data.const_data_ptr());
  q_sf_ = static_cast<const uint8_t*>(q_sf.const_data_ptr());
  cache_ = cache.const_data_ptr<uint8_t>();
  weights_ = static_cast<const uint8_t*>(weights.const_data_ptr());
  sf_item_ = is(q_sf, ScalarType::Short) ? 2 : 1;
  for (int i = 0; i < 4; ++i) q_stride_[i] = q_data.stride(i), sf_stride_[i] = q_sf.stride(i) * sf_item_;
  for (int i = 0; i < 2; ++i) weight_stride_[i] = weights.stride(i);
  weights_bf16_ = is(weights, ScalarType::BFloat16);
  q_format_ = q_format, k_format_ = k_format;
  with_format<IndexFp8, IndexFp4>(k_format, [&](auto record) {
    data_bytes_ = decltype(record)::kDataBytes;
    scale_bytes_ = decltype(record)::kScaleBytes;
  });
  page_kv_ = cache.size(1), block_stride_ = cache.stride(0);
  table_ = block_table.const_data_ptr<int32_t>();
  table_stride_t_ = block_table.stride(0), table_stride_w_ = block_table.stride(1), table_width_ = block_table.size(1);
  one_sequence_ = one_sequence;
}

void Logits::set_contexts(const Checker& check, const Tensor& context_lens, int64_t max_context_len, int64_t pages) {
  const auto* lens = context_lens.const_data_ptr<int32_t>();
  const int64_t stride = context_lens.stride(0);
  const int64_t reach = std::min(max_context_len, table_width_ * page_kv_);
  contexts_.resize(tokens_);
  for (int64_t t = 0; t < tokens_; ++t) {
    const int64_t length = lens[t * stride];
    check.require(
        length >= 0, "context_lens", [] { return std::string("a length >= 0"); },
        [&] { return std::to_string(length) + " at [" + std::to_string(t) + ", 0]"; });
    contexts_[t] = std::min(length, reach);
  }
  for (int64_t t = 0; t < tokens_; ++t) {
    const int64_t columns = pages_of(contexts_[t]);
    for (int64_t column = 0; column < columns; ++column) {
      const int32_t id = page(t, column);
      check.require(
          id >= 0 && id < pages, "block_table", [&] { return "a page below " + std::to_string(pages); },
          [&] {
            return std::to_string(id) + " at [" + std::to_string(one_sequence_ ? 0 : t) + ", " +
                   std::to_string(column) + "]";
          });
    }
  }
}

bool Logits::same_pages(int64_t t, int64_t other) const {
  if (table_row(t) == table_row(other)) return true;
  const int64_t columns = std::min(pages_of(contexts_[t]), pages_of(contexts_[other]));
  for (int64_t column = 0; column < columns; ++column) {
    if (page(t, column) != page(other, column)) return false;
  }
  return true;
}

std::vector<Group> Logits::groups(int64_t& items) const {
  const int64_t limit =
      std::clamp<int64_t>(kGroupFloats / kernels().logits_query_floats(static_cast<int>(heads_)), 1, kMaxGroup);
  std::vector<Group> groups;
  items = 0;
  for (int64_t t = 0; t < tokens_;) {
    Group group{t, t + 1, t, items};
    for (; group.end < tokens_ && group.end - group.begin < limit && same_pages(group.end, group.leader); ++group.end) {
      if (contexts_[group.end] > contexts_[group.leader]) group.leader = group.end;
    }
    t = group.end;
    items += (contexts_[group.leader] + kLogitsKeys - 1) / kLogitsKeys;
    groups.push_back(group);
  }
  return groups;
}

LogitsQuery Logits::query(int64_t t) const {
  const int64_t weight_bytes = weights_bf16_ ? 2 : 4;
  return {q_data_ + t * q_stride_[0],
          q_stride_[2],
          q_stride_[3],
          q_sf_ + t * sf_stride_[0],
          sf_stride_[2],
          sf_stride_[3],
          sf_item_,
          weights_ + t * weight_stride_[0] * weight_bytes,
          weight_stride_[1],
          weights_bf16_,
          static_cast<int>(heads_),
          q_format_};
}

LogitsKeys Logits::keys(int64_t t, int64_t begin, int64_t end) const {
  LogitsKeys keys;
  keys.count = static_cast<int>(end - begin);
  keys.format = k_format_;
  for (int64_t j = begin; j < end; ++j) {
    const uint8_t* base = cache_ + int64_t{page(t, j / page_kv_)} * block_stride_;
    const int64_t offset = j % page_kv_;
    keys.data[j - begin] = base + offset * data_bytes_;
    keys.scales[j - begin] = base + page_kv_ * data_bytes_ + offset * scale_bytes_;
  }
  return keys;
}

void Logits::run(uint16_t* out, int64_t out_stride, int64_t max_context_len) const {
  const KernelTable& table = kernels();
  const int64_t query_floats = table.logits_query_floats(static_cast<int>(heads_));
  int64_t items = 0, products = 0;
  const std::vector<Group> all = groups(items);
  for (const int64_t context : contexts_) products += context * heads_ * kIndexDim;

  parallel_ranges(items, products > kSerialProducts, [&](int64_t begin, int64_t end) {
    static thread_local Scratch memory;
    float* panel = memory.get(kLogitsPanelFloats + kMaxGroup * query_floats);
    float* packed = panel + kLogitsPanelFloats;
    // The last group that starts at or before the first item; groups without items share their start with the next one.
    auto group = std::upper_bound(all.begin(), all.end(), begin,
                                  [](int64_t item, const Group& g) { return item < g.first_item; }) -
                 1;
    const Group* ready = nullptr;
    // Whether a token goes through integers depends on it and on its own keys in a block, never on its group.
    struct {
      bool allows_integers;
      const LogitsKernels* packed_for;
    } tokens[kMaxGroup];
    for (int64_t item = begin; item < end; ++item) {
      while (group + 1 != all.end() && item >= (group + 1)->first_item) ++group;
      for (int64_t t = group->begin; ready != &*group && t < group->end; ++t) {
        tokens[t - group->begin] = {table.integer_query(query(t)), nullptr};
      }
      ready = &*group;
      const int64_t first = (item - group->first_item) * kLogitsKeys;
      const int64_t last = std::min(first + kLogitsKeys, contexts_[group->leader]);
      const LogitsKeys block = keys(group->leader, first, last);
      const int64_t integer_keys = table.integer_keys(block);
      const LogitsKernels* decoded_for = nullptr;
      for (int64_t t = group->begin; t < group->end; ++t) {
        const int64_t count = std::min(last, contexts_[t]) - first;
        if (count <= 0) continue;
        auto& token = tokens[t - group->begin];
        float* q = packed + (t - group->begin) * query_floats;
        const bool integers = token.allows_integers && count <= integer_keys;
        const LogitsKernels* way = integers ? &table.integer_logits : &table.fp32_logits;
        if (token.packed_for != way) way->pack_query(query(t), q);
        if (decoded_for != way) way->decode_keys(block, panel);
        token.packed_for = decoded_for = way;
        way->score(panel, static_cast<int>(count), q, static_cast<int>(heads_), out + t * out_stride + first);
      }
    }
  });
  parallel_ranges(tokens_, tokens_ * max_context_len > 1 << 18, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      std::fill(out + t * out_stride + contexts_[t], out + t * out_stride + max_context_len, kMinusInfinity);
    }
  });
}

Tensor paged_mqa_logits(const Tensor& q_data, const Tensor& q_sf, const Tensor& kv_cache, const Tensor& weights,
                        const Tensor& context_lens, const Tensor& block_table, int64_t max_context_len,
                        bool one_sequence) {
  Checker check("paged_mqa_logits");
  check.no_grad("q_data", q_data);
  check.no_grad("weights", weights);
  const Format q_format = is(q_data, ScalarType::Float8_e4m3fn) ? Format::kFp8 : Format::kFp4;
  const int q_bytes = q_format == Format::kFp8 ? IndexFp8::kDataBytes : IndexFp4::kDataBytes;
  check.tensor("q_data", q_data, {ScalarType::Float8_e4m3fn, ScalarType::Char, ScalarType::Byte},
               {"T", 1, "H", q_bytes});
  check.at_least("q_data", "H", q_data.size(2), 1);
  // Scales may come two to an int16, as DeepGEMM's packed layouts do.
  const int per_item = is(q_sf, ScalarType::Short) ? 2 : 1;
  check.tensor("q_sf", q_sf, {ScalarType::Byte, ScalarType::Short}, {"T", 1, "H", IndexFp8::kScaleBytes / per_item});
  const Format k_format =
      check.paged_cache("kv_cache", kv_cache, kIndexFormats, {"pages", "page_kv", 1, "token_bytes"}, /*planar=*/true);
  check.tensor("weights", weights, {ScalarType::BFloat16, ScalarType::Float}, {"T", "H"});
  check.tensor("context_lens", context_lens, {ScalarType::Int}, {"T", 1});
  check.tensor("block_table", block_table, {ScalarType::Int}, {"T", "W"});
  check.at_least("max_context_len", "max_context_len", max_context_len, 0);

  Logits logits(q_data, q_sf, q_format, kv_cache, k_format, weights, block_table, one_sequence);
  logits.set_contexts(check, context_lens, max_context_len, kv_cache.size(0));
  const int64_t tokens = q_data.size(0);
  const int64_t out_stride = (max_context_len + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
  const int64_t sizes[] = {tokens, max_context_len}, strides[] = {out_stride, 1};
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(2, sizes, strides, aoti_torch_dtype_bfloat16(),
                                                         aoti_torch_device_type_cpu(), 0, &handle));
  Tensor out(handle);
  if (tokens > 0 && max_context_len > 0) {
    logits.run(static_cast<uint16_t*>(out.mutable_data_ptr()), out_stride, max_context_len);
  }
  return out;
}

}  // namespace
}  // namespace deepinfer

STABLE_TORCH_LIBRARY_IMPL(deepinfer, CPU, m) { m.impl("paged_mqa_logits", TORCH_BOX(&deepinfer::paged_mqa_logits)); }
