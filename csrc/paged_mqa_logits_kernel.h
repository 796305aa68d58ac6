// paged_mqa_logits for one token and one block of keys: products, ReLU, weights and the sum over heads in one go.
// Included after flash_mla_decode_kernel.h, whose head groups it shares.

constexpr int kIndexStride = kIndexDim + 16;  // floats; an odd number of cache lines

// A packed query: per head group [kIndexDim][width], then [width] weights.
inline int64_t packed_group_floats() { return int64_t{kGroupWidth} * (kIndexDim + 1); }
inline int64_t logits_query_floats(int heads) { return head_groups(heads) * packed_group_floats(); }

// Calls visit(head, group, column, width) for every column of every head group; head is -1 for padding.
template <class Visitor>
inline void for_each_column(int heads, const Visitor& visit) {
  for (int group = 0; group < head_groups(heads); ++group) {
    const int width = group_width(heads, group);
    for (int column = 0; column < width; ++column) {
      const int head = group * kGroupWidth + column;
      visit(head < heads ? head : -1, group, column, width);
    }
  }
}

// One head's bytes, gathered from whatever strides q has.
struct HeadBytes {
  uint8_t data[kIndexDim], scales[IndexFp8::kScaleBytes];
  float weight;

  HeadBytes(const LogitsQuery& query, int head) {
    const uint8_t* from = query.scales + head * query.scale_head_stride;
    for (int g = 0; g < IndexFp8::kScaleBytes; ++g) {
      scales[g] = from[g / query.scale_item * query.scale_stride + g % query.scale_item];
    }
    const int bytes = query.format == Format::kFp8 ? IndexFp8::kDataBytes : IndexFp4::kDataBytes;
    for (int i = 0; i < bytes; ++i) data[i] = query.data[head * query.head_stride + i * query.dim_stride];
    const int64_t at = head * query.weight_stride;
    weight = query.weights_bf16 ? from_bf16(static_cast<const uint16_t*>(query.weights)[at])
                                : static_cast<const float*>(query.weights)[at];
  }
};

inline void pack_logits_query(const LogitsQuery& query, float* packed) {
  for_each_column(query.heads, [&](int head, int group, int column, int width) {
    float* out = packed + group * packed_group_floats();
    float row[kIndexDim] = {}, weight = 0.0f;
    if (head >= 0) {
      const HeadBytes bytes(query, head);
      with_format<IndexFp8, IndexFp4>(query.format, [&](auto record) {
        decode_token<decltype(record), Side::kQuery>(bytes.data, bytes.scales, row);
      });
      weight = bytes.weight;
    }
    for (int d = 0; d < kIndexDim; ++d) out[d * width + column] = row[d];
    out[kIndexDim * width + column] = weight;
  });
}

inline void decode_logits_keys(const LogitsKeys& keys, float* panel) {
  with_format<IndexFp8, IndexFp4>(keys.format, [&](auto record) {
    for (int key = 0; key < keys.count; ++key) {
      decode_token<decltype(record), Side::kKey>(keys.data[key], keys.scales[key], panel + key * kIndexStride);
    }
  });
}

// sums[key] += relu(q . k) * weight, still one vector of heads per key
template <int R, int kVectors>
inline void add_relu(const vf (&products)[R][kVectors], const float* weights, float* sums) {
  for (int r = 0; r < R; ++r) {
    vf total = loadf(sums + r * kLanes);
    for (int v = 0; v < kVectors; ++v) {
      const vf x = products[r][v];
      const vf relu = x < 0.0f ? vf{} : x;  // keeps NaN
      total += relu * loadf(weights + v * kLanes);
    }
    store(sums + r * kLanes, total);
  }
}

template <int kVectors>
struct ReluSum {
  const float* panel;
  const float* packed;
  float* sums;

  template <int R>
  void tile(int key) const {
    const auto products = multiply<R, kVectors, kIndexStride, 1>(panel + key * kIndexStride, packed, kIndexDim);
    add_relu(products.acc, packed + kIndexDim * kVectors * kLanes, sums + key * kLanes);
  }
};

// Runs Body(group) over all head groups for one block of keys, then sums the heads of each key.
template <class MakeBody>
inline void score_keys(int keys, int heads, uint16_t* out, const MakeBody& make_body) {
  float sums[kLogitsKeys * kLanes];
  for (int i = 0; i < keys * kLanes; ++i) sums[i] = 0.0f;
  for_each_group(heads, 0, head_groups(heads), make_body(sums));
  for (int key = 0; key < keys; ++key) out[key] = to_bf16(splat(sum(loadf(sums + key * kLanes))))[0];
}

struct LogitsBody {
  const float* panel;
  const float* packed;
  int keys;
  float* sums;

  template <int kVectors>
  void group(int group) const {
    for_each_tile(keys, ReluSum<kVectors>{panel, packed + group * packed_group_floats(), sums});
  }
};

inline void logits(const float* panel, int keys, const float* packed, int heads, uint16_t* out) {
  score_keys(keys, heads, out, [&](float* sums) { return LogitsBody{panel, packed, keys, sums}; });
}
