// deepinfer::flash_mla_decode on CPU: checks, work plan, threads. The loops are in flash_mla_decode_kernel.h.
//
// Work is cut the same way for every thread count and every place of a row in the batch: a unit is one row and one
// block of at most kMaxHeads heads; its live keys are cut into splits by their number alone; splits are merged in key
// order. Splits run in waves whose partial results fit a bounded buffer.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "checks.h"
#include "kernels.h"
#include "parallel.h"

namespace deepinfer {
namespace {

constexpr int kWavePerThread = 8;  // splits in flight per thread: 8 x 258 KiB of partial results
constexpr int64_t kSerialProducts =
    1 << 20;  // below this many key x head x latent products threads cost more than they save

// One scope's cache and index lists.
struct Scope {
  const char* indices_name;
  const char* length_name;
  const uint8_t* cache = nullptr;
  int64_t block_stride = 0, token_stride = 0, slots = 0;  // bytes, bytes, count
  uint32_t page = 1;
  Format format = Format::kFp8;
  const int32_t* indices = nullptr;
  int64_t stride_b = 0, stride_s = 0, stride_k = 0, topk = 0;
  const int32_t* lengths = nullptr;
  int64_t stride_length = 0;

  int64_t length(int64_t b) const { return lengths ? lengths[b * stride_length] : topk; }
  const int32_t* row(int64_t b, int64_t s) const { return indices + b * stride_b + s * stride_s; }
  const uint8_t* record(int32_t slot) const {
    const auto index = static_cast<uint32_t>(slot);  // 64-bit byte offsets: caches exceed 2 GiB
    return cache + int64_t{index / page} * block_stride + int64_t{index % page} * token_stride;
  }
};

Scope make_scope(const char* indices_name, const char* length_name, const Tensor& cache, Format format,
                 const Tensor& indices, const std::optional<Tensor>& lengths) {
  Scope scope{indices_name, length_name};
  scope.cache = cache.const_data_ptr<uint8_t>();
  scope.block_stride = cache.stride(0);
  scope.token_stride = cache.stride(1);
  scope.page = static_cast<uint32_t>(std::min<int64_t>(cache.size(1), UINT32_MAX));
  scope.slots = cache.size(0) * cache.size(1);
  scope.format = format;
  scope.indices = indices.const_data_ptr<int32_t>();
  scope.stride_b = indices.stride(0);
  scope.stride_s = indices.stride(1);
  scope.stride_k = indices.stride(2);
  scope.topk = indices.size(2);
  if (lengths) {
    scope.lengths = lengths->const_data_ptr<int32_t>();
    scope.stride_length = lengths->stride(0);
  }
  return scope;
}

// A position in a row's live keys: main scope first, then extra.
struct Cursor {
  int scope = 0;
  int64_t k = 0;
};

struct Unit {
  int64_t row;
  int head_begin;
};

struct Split {
  Unit unit;
  Cursor begin;
  int count;
  bool first, last;  // of its unit
};

class Decode {
 public:
  Decode(const Tensor& q, const Tensor& out, double softmax_scale) {
    q_ = static_cast<const uint16_t*>(q.const_data_ptr());
    out_ = static_cast<uint16_t*>(out.mutable_data_ptr());
    b_ = q.size(0), s_q_ = q.size(1), h_q_ = q.size(2);
    for (int i = 0; i < 4; ++i) q_stride_[i] = q.stride(i);
    const double folded = std::clamp(softmax_scale, -1.0, 1.0);
    q_scale_ = static_cast<float>(folded);
    q_scale_low_ = static_cast<float>(folded - q_scale_);
    scale_ = static_cast<float>(std::clamp(std::abs(softmax_scale), 1.0, 3.0e38));
  }

  void add_scope(const Scope& scope) { scopes_[scope_count_++] = scope; }
  void set_sink(const Tensor& sink) {
    sink_ = sink.const_data_ptr<float>();
    sink_stride_ = sink.stride(0);
  }
  void run(const Checker& check);

 private:
  void count_live_keys(const Checker& check);
  void check_lengths(const Checker& check, const Scope& scope) const;
  [[noreturn]] void fail_index(const Checker& check, int64_t row) const;
  int64_t live_in_row(int64_t row) const;
  DecodeQuery query(const Unit& unit) const;
  DecodeOutput output(const Unit& unit) const;
  bool next_split(Split& split);
  void advance(int64_t row, Cursor& cursor, int count, DecodeKeys* keys) const;
  void attend(const std::vector<Split>& wave, int64_t begin, int64_t end) const;
  void merge(const std::vector<Split>& wave, int64_t begin, int64_t end) const;
  DecodePartial partial(int64_t index) const;

  const uint16_t* q_;
  uint16_t* out_;
  int64_t b_, s_q_, h_q_, q_stride_[4];
  float q_scale_, q_scale_low_, scale_;
  Scope scopes_[2];
  int scope_count_ = 0;
  const float* sink_ = nullptr;
  int64_t sink_stride_ = 0;

  std::vector<int32_t> live_;  // live keys of each row
  float* partials_ = nullptr;  // one for the unit a wave leaves unfinished, then one per split of the wave
  bool threads_worthwhile_ = false;

  // where next_split() stands
  Unit unit_{0, 0};
  Cursor cursor_;
  int32_t done_ = 0;
};

void Decode::check_lengths(const Checker& check, const Scope& scope) const {
  for (int64_t b = 0; scope.lengths && b < b_; ++b) {
    const int64_t length = scope.length(b);
    check.require(
        length >= 0 && length <= scope.topk, scope.length_name,
        [&] { return "a length in 0.." + std::to_string(scope.topk); },
        [&] { return std::to_string(length) + " at [" + std::to_string(b) + "]"; });
  }
}

// The number of live keys, or -1 if an index is outside its cache.
int64_t Decode::live_in_row(int64_t row) const {
  int64_t live = 0;
  bool valid = true;
  for (int i = 0; i < scope_count_; ++i) {
    const Scope& scope = scopes_[i];
    const int32_t* indices = scope.row(row / s_q_, row % s_q_);
    const int64_t length = scope.length(row / s_q_);
    for (int64_t k = 0; k < length; ++k) {
      const int32_t slot = indices[k * scope.stride_k];
      live += slot >= 0;
      valid &= slot >= -1 && slot < scope.slots;
    }
  }
  return valid ? live : -1;
}

void Decode::fail_index(const Checker& check, int64_t row) const {
  const int64_t b = row / s_q_, s = row % s_q_;
  for (int i = 0; i < scope_count_; ++i) {
    const Scope& scope = scopes_[i];
    for (int64_t k = 0; k < scope.length(b); ++k) {
      const int32_t slot = scope.row(b, s)[k * scope.stride_k];
      if (slot >= -1 && slot < scope.slots) continue;
      check.fail(scope.indices_name, "-1 or a slot below " + std::to_string(scope.slots),
                 std::to_string(slot) + " at [" + std::to_string(b) + ", " + std::to_string(s) + ", " +
                     std::to_string(k) + "]");
    }
  }
  check.fail(scopes_[0].indices_name, "indices that do not change during the call", "a change");
}

void Decode::count_live_keys(const Checker& check) {
  const int64_t rows = b_ * s_q_;
  for (int i = 0; i < scope_count_; ++i) check_lengths(check, scopes_[i]);
  live_.resize(rows);
  int64_t listed = 0;
  for (int i = 0; i < scope_count_; ++i) listed += scopes_[i].topk * rows;
  parallel_ranges(rows, listed > 1 << 16, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) live_[row] = static_cast<int32_t>(live_in_row(row));
  });
  int64_t total = 0;
  for (int64_t row = 0; row < rows; ++row) {
    if (live_[row] < 0) fail_index(check, row);
    total += live_[row];
  }
  threads_worthwhile_ = total * h_q_ * kLatentDim > kSerialProducts;
}

DecodeQuery Decode::query(const Unit& unit) const {
  const int64_t b = unit.row / s_q_, s = unit.row % s_q_;
  const uint16_t* q = q_ + b * q_stride_[0] + s * q_stride_[1] + unit.head_begin * q_stride_[2];
  const int heads = static_cast<int>(std::min<int64_t>(kMaxHeads, h_q_ - unit.head_begin));
  return {q, q_stride_[2], q_stride_[3], heads, q_scale_, q_scale_low_, scale_};
}

DecodeOutput Decode::output(const Unit& unit) const {
  return {out_ + (unit.row * h_q_ + unit.head_begin) * kLatentDim,
          sink_ ? sink_ + unit.head_begin * sink_stride_ : nullptr, sink_stride_};
}

DecodePartial Decode::partial(int64_t index) const {
  float* p = partials_ + index * kPartialFloats;
  return {p, p + kPartialOut, p + kPartialOut + kMaxHeads};
}

// Moves past `count` live keys, noting their records if asked to.
void Decode::advance(int64_t row, Cursor& cursor, int count, DecodeKeys* keys) const {
  int found = 0;
  while (found < count) {
    const Scope& scope = scopes_[cursor.scope];
    const int32_t* indices = scope.row(row / s_q_, row % s_q_);
    const int64_t length = scope.length(row / s_q_);
    for (; found < count && cursor.k < length; ++cursor.k) {
      const int32_t slot = indices[cursor.k * scope.stride_k];
      if (slot < 0) continue;
      if (keys) keys->records[found] = scope.record(slot);
      ++found;
    }
    if (keys && cursor.scope == 0) keys->main_count = found;
    if (found < count) cursor = {cursor.scope + 1, 0};
  }
}

// Splits of `live` keys: even ones of at most kMaxKeys, an even number of them so that two threads share a row fairly.
int split_size(int32_t live) {
  if (live < 32) return live;
  const int splits = (live + 2 * kMaxKeys - 1) / (2 * kMaxKeys) * 2;
  return (live + splits - 1) / splits;
}

bool Decode::next_split(Split& split) {
  const int64_t rows = b_ * s_q_;
  while (unit_.row < rows) {
    const int32_t live = live_[unit_.row];
    if (done_ < live) {
      const int count = std::min(split_size(live), live - done_);
      split = {unit_, cursor_, count, done_ == 0, done_ + count == live};
      advance(unit_.row, cursor_, count, nullptr);
      done_ += count;
      return true;
    }
    cursor_ = Cursor{};
    done_ = 0;
    unit_.head_begin += kMaxHeads;
    if (live == 0 || unit_.head_begin >= h_q_) unit_ = {unit_.row + 1, 0};
  }
  return false;
}

void Decode::attend(const std::vector<Split>& wave, int64_t begin, int64_t end) const {
  static thread_local Scratch memory;
  const KernelTable& table = kernels();
  float* packed = memory.get(kPartialOut + table.decode_scratch_floats());
  for (int64_t i = begin; i < end; ++i) {
    const Split& split = wave[i];
    const DecodeQuery q = query(split.unit);
    const bool same =
        i > begin && wave[i - 1].unit.row == split.unit.row && wave[i - 1].unit.head_begin == split.unit.head_begin;
    if (!same) table.pack_query(q, packed);
    DecodeKeys keys;
    keys.count = split.count;
    keys.main_count = 0;
    keys.main_format = scopes_[0].format;
    keys.extra_format = scopes_[1].format;
    Cursor cursor = split.begin;
    advance(split.unit.row, cursor, split.count, &keys);
    table.decode_split(q, packed, keys, packed + kPartialOut, partial(i + 1));
  }
}

// Joins the splits [begin, end) of one unit in key order; the state of an unfinished unit moves to partial 0.
void Decode::merge(const std::vector<Split>& wave, int64_t begin, int64_t end) const {
  const KernelTable& table = kernels();
  const DecodeQuery q = query(wave[begin].unit);
  const bool fresh = wave[begin].first, done = wave[end - 1].last;
  const DecodePartial state = partial(fresh ? begin + 1 : 0);
  parallel_ranges(table.head_groups(q.heads), threads_worthwhile_, [&](int64_t from, int64_t to) {
    const int first = static_cast<int>(from), last = static_cast<int>(to);
    for (int64_t i = begin + fresh; i < end; ++i) table.merge(q, first, last, partial(i + 1), state);
    if (done) table.finish(q, first, last, state, output(wave[begin].unit));
  });
  if (!done && fresh) std::copy_n(state.out, kPartialFloats, partials_);
}

void Decode::run(const Checker& check) {
  count_live_keys(check);
  for (int64_t row = 0; row < b_ * s_q_; ++row) {
    if (live_[row] == 0) std::fill_n(out_ + row * h_q_ * kLatentDim, h_q_ * kLatentDim, uint16_t{0});
  }
  static thread_local Scratch memory;
  const int64_t capacity = kWavePerThread * (threads_worthwhile_ ? thread_count() : 1);
  std::vector<Split> wave;
  Split split;
  bool more = next_split(split);
  while (more) {
    wave.clear();
    for (; more && static_cast<int64_t>(wave.size()) < capacity; more = next_split(split)) wave.push_back(split);
    const int64_t size = static_cast<int64_t>(wave.size());
    partials_ = memory.get((capacity + 1) * kPartialFloats);
    parallel_ranges(size, threads_worthwhile_, [&](int64_t begin, int64_t end) { attend(wave, begin, end); });
    for (int64_t begin = 0, end; begin < size; begin = end) {
      end = begin + 1;
      while (end < size && !wave[end].first) ++end;
      merge(wave, begin, end);
    }
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
  Decode decode(q, out, softmax_scale);
  decode.add_scope(make_scope("indices", "topk_length", k_cache, format, indices, topk_length));
  if (extra_k_cache) {
    decode.add_scope(make_scope("extra_indices", "extra_topk_length", *extra_k_cache, extra_format, *extra_indices,
                                extra_topk_length));
  }
  if (attn_sink) decode.set_sink(*attn_sink);
  decode.run(check);
  return out;
}

}  // namespace
}  // namespace deepinfer

STABLE_TORCH_LIBRARY_IMPL(deepinfer, CPU, m) { m.impl("flash_mla_decode", TORCH_BOX(&deepinfer::flash_mla_decode)); }
