// What the host side and the per-instruction-set kernels share: parameter structs and the table of kernels. No torch.
#pragma once

#include <cstdint>

#include "record_format.h"

namespace deepinfer {

// A key split of flash_mla_decode covers at most this many keys: its decoded panel (kMaxKeys x 512 fp32) stays in L2.
constexpr int kMaxKeys = 112;
// Heads are processed in blocks of at most this many, which bounds every buffer, whatever h_q is.
constexpr int kMaxHeads = 128;

struct DecodeQuery {
  const uint16_t* q;    // [heads, 512] bf16 of one row
  int64_t head_stride;  // elements
  int64_t dim_stride;   // elements
  int heads;            // <= kMaxHeads
  float sign;           // of softmax_scale: folded into q, so that the largest logit belongs to the largest product
  double scale;         // |softmax_scale|
};

// The live keys of one split: pointers to records, first those of the main scope, then those of the extra scope.
struct DecodeKeys {
  const uint8_t* records[kMaxKeys];
  int count;
  int main_count;
  Format main_format;
  Format extra_format;
};

// The softmax of some of a row's keys over one block of heads. Head groups are padded to whole vectors; a kernel's own
// layout is [group][512][width of group] for `out`, and [group][width] for the statistics.
struct DecodePartial {
  float* out;     // mean of the keys, weighted by the softmax over this partial's keys
  float* max;     // largest product q' . k, where q' is the packed query
  float* weight;  // sum of exp(scale * (product - max))
  float* scale;   // logit = scale * product, per head
};
constexpr int64_t kPartialOut = int64_t{kMaxHeads} * kLatentDim;  // floats in DecodePartial::out, at most
constexpr int64_t kPartialFloats = kPartialOut + 3 * kMaxHeads;   // and in the whole partial

struct DecodeOutput {
  uint16_t* out;      // [heads, 512] bf16, contiguous
  const float* sink;  // [heads] or null
  int64_t sink_stride;
};

struct LogitsQuery {
  const uint8_t* data;        // [heads, data bytes]
  int64_t head_stride;        // bytes
  int64_t dim_stride;         // bytes
  const uint8_t* scales;      // [heads, 4] ue8m0
  int64_t scale_head_stride;  // bytes
  int64_t scale_stride;       // bytes between the scales an item of q_sf holds
  int scale_item;             // bytes of a q_sf item: 1, or 2 (two scales, low byte first)
  const void* weights;        // [heads] bf16 or fp32
  int64_t weight_stride;      // elements
  bool weights_bf16;
  int heads;
  Format format;
};

struct LogitsKeys {
  const uint8_t* data[48];    // element bytes of each key
  const uint8_t* scales[48];  // its 4 scale bytes
  int count;
  Format format;
};
constexpr int kLogitsKeys = 48;  // keys per block: panel (48 x 128 fp32) and a head group of queries share L1 and L2

struct PoolRow {
  const float* score;  // [R, D] of one row n
  const float* latent;
  int64_t score_row_stride, score_dim_stride;    // elements
  int64_t latent_row_stride, latent_dim_stride;  // elements
  int64_t rows;                                  // R
  uint16_t* out;                                 // [D] bf16
};

struct LogitsKernels {
  void (*pack_query)(const LogitsQuery& query, float* packed);
  void (*decode_keys)(const LogitsKeys& keys, float* panel);  // panel: kLogitsPanelFloats
  void (*score)(const float* panel, int keys, const float* packed, int heads, uint16_t* out);  // out: [keys] bf16
};
constexpr int64_t kLogitsPanelFloats = kLogitsKeys * (kIndexDim + 16);

constexpr int64_t kPackedFloats = kPartialOut + kMaxHeads;

// One instruction set's kernels. Scratch is the caller's, 64-byte aligned, one per thread.
struct KernelTable {
  const char* name;

  // Query of a row -> packed queries, [group][512][width], then each head's scale: kPackedFloats.
  void (*pack_query)(const DecodeQuery& query, float* packed);
  int64_t (*decode_scratch_floats)();
  void (*decode_split)(const DecodeQuery& query, const float* packed, const DecodeKeys& keys, float* scratch,
                       const DecodePartial& partial);
  // state <- state joined with next, for head groups [begin, end).
  void (*merge)(const DecodeQuery& query, int group_begin, int group_end, const DecodePartial& next,
                const DecodePartial& state);
  void (*finish)(const DecodeQuery& query, int group_begin, int group_end, const DecodePartial& state,
                 const DecodeOutput& output);
  int (*head_groups)(int heads);

  // Two ways to score a block of keys: in fp32, and in integers where query and keys allow it.
  int64_t (*logits_query_floats)(int heads);  // size of a packed logits query, either way
  bool (*integer_query)(const LogitsQuery& query);
  int (*integer_keys)(const LogitsKeys& keys);  // how many keys from the first on
  LogitsKernels fp32_logits, integer_logits;

  void (*pool)(const PoolRow& row, int64_t dim_begin, int64_t dim_end);
};

// Seen by the Python module _C; everything else in the library is hidden.
#define DEEPINFER_EXPORT __attribute__((visibility("default")))
DEEPINFER_EXPORT const KernelTable& kernels();           // the best the CPU and DEEPINFER_CPU_CAPABILITY allow
DEEPINFER_EXPORT const char* const* capabilities();      // names the CPU can run, best first, null-terminated
DEEPINFER_EXPORT bool set_capability(const char* name);  // false if unknown or not supported here

}  // namespace deepinfer
