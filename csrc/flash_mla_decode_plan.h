// The work plan of flash_mla_decode: which keys of which row make one split. No torch; checks and threads are
// elsewhere.
//
// Work is cut the same way for every thread count and every place of a row in the batch: a unit is one row and one
// block of at most kMaxHeads heads; its live keys are cut into splits by their number alone; splits are merged in key
// order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace deepinfer {

// One scope's cache and index lists. Strides of the cache in bytes, of the lists in elements.
struct Scope {
  const char* indices_name;
  const char* length_name;
  const uint8_t* cache;  // [blocks, page, record]
  int64_t block_stride, token_stride, page, slots;
  Format format;
  const int32_t* indices;  // [b, s_q, topk]
  int64_t stride_b, stride_s, stride_k, topk;
  const int32_t* lengths;  // [b] or null
  int64_t stride_length;

  int64_t length(int64_t b) const { return lengths ? std::min<int64_t>(lengths[b * stride_length], topk) : topk; }
  const int32_t* row(int64_t b, int64_t s) const { return indices + b * stride_b + s * stride_s; }
  // Also false for an index that another thread changed after the checks: nothing is read out of bounds.
  bool live(int32_t slot) const { return slot >= 0 && slot < slots; }
  const uint8_t* record(int32_t slot) const {  // 64-bit byte offsets: caches exceed 2 GiB
    return cache + slot / page * block_stride + slot % page * token_stride;
  }
};

// A position in a row's live keys: main scope first, then extra.
struct Cursor {
  int scope = 0;
  int64_t k = 0;
};

struct Unit {
  int64_t row = 0;
  int64_t head_begin = 0;
  bool operator==(const Unit& other) const { return row == other.row && head_begin == other.head_begin; }
};

struct Split {
  Unit unit;
  Cursor begin;
  int count;
  bool first, last;  // of its unit
};

class DecodePlan {
 public:
  DecodePlan(int64_t rows, int64_t s_q, int64_t h_q, std::vector<Scope> scopes)
      : rows_(rows), s_q_(s_q), h_q_(h_q), scopes_(std::move(scopes)), live_(rows) {}

  const std::vector<Scope>& scopes() const { return scopes_; }
  int32_t live(int64_t row) const { return live_[row]; }

  // Counts a row's live keys; false if an index in it is neither -1 nor a slot.
  bool count(int64_t row) {
    int64_t live = 0;
    bool valid = true;
    for (const Scope& scope : scopes_) {
      const int32_t* indices = scope.row(row / s_q_, row % s_q_);
      const int64_t length = scope.length(row / s_q_);
      for (int64_t k = 0; k < length; ++k) {
        const int32_t slot = indices[k * scope.stride_k];
        live += slot >= 0;
        valid &= slot >= -1 && slot < scope.slots;
      }
    }
    live_[row] = valid ? static_cast<int32_t>(live) : -1;
    return valid;
  }

  // The next split in order of rows, head blocks and keys; false after the last one.
  bool next(Split& split) {
    while (unit_.row < rows_) {
      const int32_t live = live_[unit_.row];
      if (done_ < live) {
        const int count = std::min(split_size(live), live - done_);
        split = {unit_, cursor_, count, done_ == 0, done_ + count == live};
        DecodeKeys keys;
        cursor_ = gather(split, keys);
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

  // The records of a split's keys; returns the position after them.
  Cursor gather(const Split& split, DecodeKeys& keys) const {
    keys.count = 0;
    keys.main_count = 0;
    keys.main_format = scopes_.front().format;
    keys.extra_format = scopes_.back().format;
    Cursor at = split.begin;
    for (; at.scope < static_cast<int>(scopes_.size()); at = {at.scope + 1, 0}) {
      const Scope& scope = scopes_[at.scope];
      const int32_t* indices = scope.row(split.unit.row / s_q_, split.unit.row % s_q_);
      const int64_t length = scope.length(split.unit.row / s_q_);
      for (; keys.count < split.count && at.k < length; ++at.k) {
        const int32_t slot = indices[at.k * scope.stride_k];
        if (scope.live(slot)) keys.records[keys.count++] = scope.record(slot);
      }
      if (at.scope == 0) keys.main_count = keys.count;
      if (keys.count == split.count) break;
    }
    return at;
  }

 private:
  // Even splits of at most kMaxKeys, an even number of them: two threads share a single row fairly.
  static int split_size(int32_t live) {
    if (live < 32) return live;
    const int splits = (live + 2 * kMaxKeys - 1) / (2 * kMaxKeys) * 2;
    return (live + splits - 1) / splits;
  }

  int64_t rows_, s_q_, h_q_;
  std::vector<Scope> scopes_;
  std::vector<int32_t> live_;  // live keys of each row; -1: a bad index
  Unit unit_;                  // where next() stands
  Cursor cursor_;
  int32_t done_ = 0;
};

}  // namespace deepinfer
