// flash_mla_decode for one row: pack the query, attend to one split of the keys, join splits, write the row.
// Included after matmul_tile.h; every loop over heads runs in groups of whole vectors ("head groups").

constexpr int kPanelStride = kLatentDim + 16;  // floats; an odd number of cache lines, so rows do not share L1 sets
constexpr int kDimBlock = 64;                  // the query-key product is summed in blocks: shorter chains round less
constexpr int kGroupWidth = 2 * kLanes;

inline int head_groups(int heads) { return (heads + kGroupWidth - 1) / kGroupWidth; }
// The last group is one vector wide where that suffices.
inline int group_width(int heads, int group) { return heads - group * kGroupWidth <= kLanes ? kLanes : kGroupWidth; }

// Calls body.template group<kVectors>(group) for head groups [begin, end).
template <class Body>
inline void for_each_group(int heads, int begin, int end, const Body& body) {
  for (int group = begin; group < end; ++group) {
    if (group_width(heads, group) == kLanes) {
      body.template group<1>(group);
    } else {
      body.template group<2>(group);
    }
  }
}

// Exponent of the power of two that brings a head's largest |element| below 2^-11: no sum of 512 products with keys in
// the range of bf16 overflows then, nor a difference of two sums. In -139..114; 0 for zeros, NaN and infinity.
inline int headroom(const uint16_t* q, int64_t dim_stride) {
  uint16_t largest = 0;
  const auto find_largest = [&](int64_t stride) {
    for (int d = 0; d < kLatentDim; ++d) {
      const uint16_t magnitude = q[d * stride] & 0x7fff;
      largest = magnitude > largest ? magnitude : largest;
    }
  };
  if (dim_stride == 1) {
    find_largest(1);  // inlined with a constant stride: vectorized
  } else {
    find_largest(dim_stride);
  }
  const int exponent = static_cast<int>(largest >> 7);  // biased
  return largest == 0 || exponent == 255 ? 0 : exponent == 0 ? 114 : 115 - exponent;
}
inline float power_of_two(int exponent) { return as_float(uint32_t(127 + exponent) << 23); }

inline void pack_query(const DecodeQuery& query, float* packed) {
  // Two factors: 2^-139 is no normal fp32 number.
  float factors[kMaxHeads], more[kMaxHeads];
  for (int head = 0; head < kMaxHeads; ++head) {
    const bool real = head < query.heads;
    const int exponent = real ? headroom(query.q + head * query.head_stride, query.dim_stride) : 0;
    factors[head] = power_of_two(exponent / 2) * query.sign;
    more[head] = power_of_two(exponent - exponent / 2);
    const double scale = query.scale / (double{power_of_two(exponent / 2)} * more[head]);
    packed[kPartialOut + head] = static_cast<float>(scale < 3.0e38 ? scale : 3.0e38);
  }
  for (int first = 0; first < query.heads; first += kLanes) {
    const int group = first / kGroupWidth;
    const int width = group_width(query.heads, group);
    float* out = packed + int64_t{group} * kGroupWidth * kLatentDim + first % kGroupWidth;
    const vf factor = loadf(factors + first), again = loadf(more + first);
    for (int d = 0; d < kLatentDim; d += kLanes) {
      vf block[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) {
        block[lane] = vf{};
        if (first + lane >= query.heads) continue;
        const uint16_t* q = query.q + (first + lane) * query.head_stride + d * query.dim_stride;
        if (query.dim_stride == 1) {
          block[lane] = from_bf16(q);
        } else {
          for (int i = 0; i < kLanes; ++i) block[lane][i] = from_bf16(q[i * query.dim_stride]);
        }
      }
      transpose(block);
      for (int i = 0; i < kLanes; ++i) store(out + int64_t{d + i} * width, block[i] * factor * again);
    }
  }
}

inline void decode_panel(const DecodeKeys& keys, float* panel) {
  int key = 0;
  const auto decode_until = [&](int end, Format format) {
    with_format<KvFp8, KvFp4>(format, [&](auto record) {
      using Record = decltype(record);
      for (; key < end; ++key) {
        const uint8_t* bytes = keys.records[key];
        decode_token<Record, Side::kKey>(bytes, bytes + Record::kDataBytes, panel + key * kPanelStride);
      }
    });
  };
  decode_until(keys.main_count, keys.main_format);
  decode_until(keys.count, keys.extra_format);
}

// products[key][width] = q . k, over one block of the latent
template <int kVectors>
struct QueryKey {
  const float* panel;
  const float* packed;  // [kDimBlock, width]
  float* products;
  bool first;

  template <int R>
  void tile(int key) const {
    auto sums = multiply<R, kVectors, kPanelStride, 1>(panel + key * kPanelStride, packed, kDimBlock);
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        float* out = products + ((key + r) * kVectors + v) * kLanes;
        store(out, first ? sums.acc[r][v] : loadf(out) + sums.acc[r][v]);
      }
    }
  }
};

// products -> probabilities that sum to 1 over these keys. Dividing now keeps the weighted mean below the largest
// |element|: huge keys cannot overflow it.
template <int kVectors>
inline void softmax(float* products, int keys, const float* scales, float* max_out, float* weight_out) {
  constexpr int kWidth = kVectors * kLanes;
  for (int v = 0; v < kVectors; ++v) {
    float* column = products + v * kLanes;
    const vf scale = loadf(scales + v * kLanes);
    vf max = splat(-__builtin_inff());
    for (int k = 0; k < keys; ++k) max = larger(max, loadf(column + k * kWidth));
    vf weight{};
    for (int k = 0; k < keys; ++k) {
      const vf p = exp((loadf(column + k * kWidth) - max) * scale);
      store(column + k * kWidth, p);
      weight += p;
    }
    const vf inverse = 1.0f / weight;
    for (int k = 0; k < keys; ++k) store(column + k * kWidth, loadf(column + k * kWidth) * inverse);
    store(max_out + v * kLanes, max);
    store(weight_out + v * kLanes, weight);
  }
}

// out[d][width] = sum over keys of probability * key[d]
template <int kVectors>
struct WeightedKeys {
  const float* panel;
  const float* probabilities;  // [keys, width]
  int keys;
  float* out;

  template <int R>
  void tile(int d) const {
    const auto sums = multiply<R, kVectors, 1, kPanelStride>(panel + d, probabilities, keys);
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < kVectors; ++v) store(out + ((d + r) * kVectors + v) * kLanes, sums.acc[r][v]);
    }
  }
};

struct SplitBody {
  const DecodeQuery& query;
  const float* packed;
  const float* panel;
  int keys;
  float* products;
  const DecodePartial& partial;

  template <int kVectors>
  void group(int group) const {
    const int64_t offset = int64_t{group} * kGroupWidth;
    const float* q = packed + offset * kLatentDim;
    for (int d = 0; d < kLatentDim; d += kDimBlock) {
      for_each_tile(keys, QueryKey<kVectors>{panel + d, q + d * kVectors * kLanes, products, d == 0});
    }
    softmax<kVectors>(products, keys, partial.scale + offset, partial.max + offset, partial.weight + offset);
    for_each_tile(kLatentDim, WeightedKeys<kVectors>{panel, products, keys, partial.out + offset * kLatentDim});
  }
};

inline int64_t decode_scratch_floats() { return int64_t{kMaxKeys} * (kPanelStride + kGroupWidth); }

inline void decode_split(const DecodeQuery& query, const float* packed, const DecodeKeys& keys, float* scratch,
                         const DecodePartial& partial) {
  float* panel = scratch;
  float* products = scratch + kMaxKeys * kPanelStride;
  decode_panel(keys, panel);
  for (int head = 0; head < kMaxHeads; ++head) partial.scale[head] = packed[kPartialOut + head];
  for_each_group(query.heads, 0, head_groups(query.heads),
                 SplitBody{query, packed, panel, keys.count, products, partial});
}

struct MergeBody {
  const DecodeQuery& query;
  const DecodePartial& next;
  const DecodePartial& state;

  template <int kVectors>
  void group(int group) const {
    for (int v = 0; v < kVectors; ++v) {
      const int64_t offset = int64_t{group} * kGroupWidth + v * kLanes;
      const vf max_a = loadf(state.max + offset), max_b = loadf(next.max + offset);
      const vf max = larger(max_a, max_b), scale = loadf(state.scale + offset);
      const vf weight_a = loadf(state.weight + offset) * exp((max_a - max) * scale);
      const vf weight_b = loadf(next.weight + offset) * exp((max_b - max) * scale);
      const vf weight = weight_a + weight_b;
      store(state.max + offset, max);
      store(state.weight + offset, weight);
      const vf share_a = weight_a / weight, share_b = weight_b / weight;
      const int64_t first = int64_t{group} * kGroupWidth * kLatentDim + v * kLanes;
      for (int64_t d = 0; d < kLatentDim; ++d) {
        const int64_t i = first + d * kVectors * kLanes;
        store(state.out + i, loadf(state.out + i) * share_a + loadf(next.out + i) * share_b);
      }
    }
  }
};

inline void merge(const DecodeQuery& query, int group_begin, int group_end, const DecodePartial& next,
                  const DecodePartial& state) {
  for_each_group(query.heads, group_begin, group_end, MergeBody{query, next, state});
}

// Applies the sink, transposes a head group back to [heads, 512] and rounds to bf16.
struct FinishBody {
  const DecodeQuery& query;
  const DecodePartial& state;
  const DecodeOutput& output;

  template <int kVectors>
  void group(int group) const {
    for (int v = 0; v < kVectors; ++v) {
      const int head = group * kGroupWidth + v * kLanes;
      vf share = splat(1.0f);
      if (output.sink != nullptr) {
        vf sink{};
        for (int lane = 0; lane < kLanes && head + lane < query.heads; ++lane) {
          sink[lane] = output.sink[(head + lane) * output.sink_stride];
        }
        const vf weight = loadf(state.weight + head);
        // An infinite sink decides alone: the largest logit may itself overflow fp32.
        const vf logit = loadf(state.max + head) * loadf(state.scale + head);
        const vf above = (sink - sink == 0.0f) ? sink - logit : sink;
        share = above > 88.0f ? vf{} : weight / (weight + exp(above));
      }
      const float* values = state.out + int64_t{group} * kGroupWidth * kLatentDim + v * kLanes;
      for (int d = 0; d < kLatentDim; d += kLanes) {
        vf block[kLanes];
        for (int i = 0; i < kLanes; ++i) block[i] = loadf(values + (d + i) * kVectors * kLanes) * share;
        transpose(block);
        for (int lane = 0; lane < kLanes && head + lane < query.heads; ++lane) {
          store(output.out + int64_t{head + lane} * kLatentDim + d, to_bf16(block[lane]));
        }
      }
    }
  }
};

inline void finish(const DecodeQuery& query, int group_begin, int group_end, const DecodePartial& state,
                   const DecodeOutput& output) {
  for_each_group(query.heads, group_begin, group_end, FinishBody{query, state, output});
}
