// paged_mqa_logits for one token and one block of keys: products, ReLU, weights and the sum over heads in one go.
// Included after flash_mla_decode_kernel.h, whose head groups it shares.

constexpr int kIndexStride = kIndexDim + 16;  // floats; an odd number of cache lines

// A packed query: per head group [kIndexDim][width], then [width] weights.
inline int64_t packed_group_floats() { return int64_t{kGroupWidth} * (kIndexDim + 1); }
inline int64_t logits_query_floats(int heads) { return head_groups(heads) * packed_group_floats(); }

inline void pack_logits_query(const LogitsQuery& query, float* packed) {
  float row[kIndexDim];
  uint8_t data[kIndexDim], scales[IndexFp8::kScaleBytes];
  for (int head = 0; head < head_groups(query.heads) * kGroupWidth; ++head) {
    const int group = head / kGroupWidth, column = head % kGroupWidth;
    const int width = group_width(query.heads, group);
    if (column >= width) continue;
    float* out = packed + group * packed_group_floats();
    float weight = 0.0f;
    for (int d = 0; d < kIndexDim; ++d) row[d] = 0.0f;
    if (head < query.heads) {
      const uint8_t* scale_bytes = query.scales + head * query.scale_head_stride;
      for (int g = 0; g < IndexFp8::kScaleBytes; ++g) {
        scales[g] = scale_bytes[g / query.scale_item * query.scale_stride + g % query.scale_item];
      }
      with_format<IndexFp8, IndexFp4>(query.format, [&](auto record) {
        using Record = decltype(record);
        for (int i = 0; i < Record::kDataBytes; ++i)
          data[i] = query.data[head * query.head_stride + i * query.dim_stride];
        decode_token<Record, Side::kQuery>(data, scales, row);
      });
      const int64_t at = head * query.weight_stride;
      weight = query.weights_bf16 ? from_bf16(static_cast<const uint16_t*>(query.weights)[at])
                                  : static_cast<const float*>(query.weights)[at];
    }
    for (int d = 0; d < kIndexDim; ++d) out[d * width + column] = row[d];
    out[kIndexDim * width + column] = weight;
  }
}

inline void decode_logits_keys(const LogitsKeys& keys, float* panel) {
  with_format<IndexFp8, IndexFp4>(keys.format, [&](auto record) {
    for (int key = 0; key < keys.count; ++key) {
      decode_token<decltype(record), Side::kKey>(keys.data[key], keys.scales[key], panel + key * kIndexStride);
    }
  });
}

// sums[key] += relu(q . k) * weight, still one vector of heads per key
template <int kVectors>
struct ReluSum {
  const float* panel;
  const float* packed;
  float* sums;

  template <int R>
  void tile(int key) const {
    const auto products = multiply<R, kVectors, kIndexStride, 1>(panel + key * kIndexStride, packed, kIndexDim);
    for (int r = 0; r < R; ++r) {
      float* out = sums + (key + r) * kLanes;
      vf total = loadf(out);
      for (int v = 0; v < kVectors; ++v) {
        const vf x = products.acc[r][v];
        const vf relu = x < 0.0f ? vf{} : x;  // keeps NaN
        total += relu * loadf(packed + (kIndexDim * kVectors + v) * kLanes);
      }
      store(out, total);
    }
  }
};

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
  float sums[kLogitsKeys * kLanes];
  for (int i = 0; i < keys * kLanes; ++i) sums[i] = 0.0f;
  for_each_group(heads, 0, head_groups(heads), LogitsBody{panel, packed, keys, sums});
  for (int key = 0; key < keys; ++key) out[key] = to_bf16(splat(sum(loadf(sums + key * kLanes))))[0];
}
