// paged_mqa_logits where query and keys are both e2m1: products of doubled elements are small integers, so four of them
// are one step of the byte multiply-add units, exact, and the group scales are applied after. Included after
// paged_mqa_logits_kernel.h.
//
// Keys are stored with an offset (0..24) because one operand of the instruction is unsigned; the offset's share,
// 12 * sum of the query's elements, is subtracted per head and group. A group's sums stay below 8 * 2 * 24 * 12 = 4608.

constexpr int kGroups = IndexFp4::kScaleBytes;  // 4 scale groups
constexpr int kQuads = IndexFp4::kGroup / 4;    // of 8 quads of elements
constexpr int8_t kDoubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr int kOffset = 12;

#if defined(DEEPINFER_BYTE_INTRINSICS)
typedef uint8_t bytes16 __attribute__((vector_size(16)));
typedef uint8_t vbytes __attribute__((vector_size(4 * kLanes)));
typedef int16_t vshorts __attribute__((vector_size(4 * kLanes)));

inline bytes16 look_up(bytes16 table, bytes16 index) {
  return (bytes16)_mm_shuffle_epi8((__m128i)table, (__m128i)index);
}

  // Sums of neighbouring products, unsigned x signed; and sums of neighbouring shorts.
  #if DEEPINFER_LANES == 16
inline vshorts multiply_bytes(vu keys, vbytes q) { return (vshorts)_mm512_maddubs_epi16((__m512i)keys, (__m512i)q); }
inline vi add_pairs(vshorts x) { return (vi)_mm512_madd_epi16((__m512i)x, _mm512_set1_epi16(1)); }
  #else
inline vshorts multiply_bytes(vu keys, vbytes q) { return (vshorts)_mm256_maddubs_epi16((__m256i)keys, (__m256i)q); }
inline vi add_pairs(vshorts x) { return (vi)_mm256_madd_epi16((__m256i)x, _mm256_set1_epi16(1)); }
  #endif

// A packed query, per head group: elements [group, quad, width, 4], then [group][width] offset shares and scales, then
// [width] weights. 32 + 4 + 4 + 1 floats per column.
inline int64_t integer_group_floats() { return int64_t{kGroupWidth} * (kIndexDim / 4 + 2 * kGroups + 1); }
// A key in the panel: 128 element bytes, then 4 fp32 scales.
constexpr int kIntegerKeyFloats = kIndexDim / 4 + kGroups;

// Integer sums are the definition's only while no factor of them overflows: scales 2^-27..2^27 of a query and 2^-100..
// 2^100 of the keys keep everything finite. 0 and NaN scales are exact either way.
inline bool between(uint8_t scale, int exponent) {
  return scale == 0 || scale == 255 || (scale >= 127 - exponent && scale <= 127 + exponent);
}
inline bool integer_query(const LogitsQuery& query) {
  bool all = query.format == Format::kFp4;
  for (int head = 0; all && head < query.heads; ++head) {
    const HeadBytes bytes(query, head);
    for (const uint8_t scale : bytes.scales) all = all && between(scale, 27);
  }
  return all;
}
// How many keys from the first on allow it.
inline int integer_keys(const LogitsKeys& keys) {
  if (keys.format != Format::kFp4) return 0;
  for (int key = 0; key < keys.count; ++key) {
    for (int g = 0; g < kGroups; ++g) {
      if (!between(keys.scales[key][g], 100)) return key;
    }
  }
  return keys.count;
}

inline void pack_integer_query(const LogitsQuery& query, float* packed) {
  for_each_column(query.heads, [&](int head, int group, int column, int width) {
    float* out = packed + group * integer_group_floats();
    auto* elements = reinterpret_cast<int8_t*>(out);
    float* shares = out + kIndexDim / 4 * width;
    float* scales = shares + kGroups * width;
    int8_t row[kIndexDim] = {};
    float weight = 0.0f;
    for (int g = 0; g < kGroups; ++g) scales[g * width + column] = 0.0f;
    if (head >= 0) {
      const HeadBytes bytes(query, head);
      for (int i = 0; i < kIndexDim; ++i) row[i] = kDoubled[bytes.data[i / 2] >> (i % 2 * 4) & 15];
      // The quarter undoes the doubling of both operands.
      for (int g = 0; g < kGroups; ++g) scales[g * width + column] = 0.25f * scale_value(UE8M0{}, bytes.scales[g]);
      weight = bytes.weight;
    }
    for (int g = 0; g < kGroups; ++g) {
      int32_t sum = 0;
      for (int i = 0; i < IndexFp4::kGroup; ++i) {
        const int d = g * IndexFp4::kGroup + i;
        sum += row[d];
        elements[(d / 4 * width + column) * 4 + d % 4] = row[d];
      }
      sum *= kOffset;
      __builtin_memcpy(shares + g * width + column, &sum, sizeof sum);
    }
    scales[kGroups * width + column] = weight;
  });
}

// A group with a NaN scale counts as 0.
inline void decode_integer_keys(const LogitsKeys& keys, float* panel) {
  bytes16 table;
  for (int i = 0; i < 16; ++i) table[i] = static_cast<uint8_t>(kDoubled[i] + kOffset);
  for (int key = 0; key < keys.count; ++key) {
    float* out = panel + key * kIntegerKeyFloats;
    auto* elements = reinterpret_cast<uint8_t*>(out);
    for (int g = 0; g < kGroups; ++g) {
      const uint8_t scale = keys.scales[key][g];
      const bytes16 packed = load<bytes16>(keys.data[key] + g * 16);
      const bytes16 even = look_up(table, packed & 15), odd = look_up(table, packed >> 4);
      store(elements + g * 32,
            __builtin_shufflevector(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
      store(elements + g * 32 + 16,
            __builtin_shufflevector(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31));
      out[kIndexDim / 4 + g] = scale == 255 ? 0.0f : scale_value(UE8M0{}, scale);
    }
  }
}

template <int kVectors>
struct IntegerReluSum {
  const float* panel;
  const float* packed;
  float* sums;

  template <int R>
  void tile(int key) const {
    constexpr int kWidth = kVectors * kLanes;
    const float* keys = panel + key * kIntegerKeyFloats;
    const float* shares = packed + kIndexDim / 4 * kWidth;
    const float* scales = shares + kGroups * kWidth;
    vf products[R][kVectors]{};
    for (int g = 0; g < kGroups; ++g) {
      vshorts acc[R][kVectors]{};
      for (int quad = g * kQuads; quad < (g + 1) * kQuads; ++quad) {
        vbytes q[kVectors];
  #pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) q[v] = load<vbytes>(packed + (quad * kVectors + v) * kLanes);
  #pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const vu four = splat(as_bits(keys[r * kIntegerKeyFloats + quad]));
  #pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) acc[r][v] += multiply_bytes(four, q[v]);
        }
      }
  #pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const float key_scale = keys[r * kIntegerKeyFloats + kIndexDim / 4 + g];
        for (int v = 0; v < kVectors; ++v) {
          const int at = g * kWidth + v * kLanes;
          const vf sum = __builtin_convertvector(add_pairs(acc[r][v]) - load<vi>(shares + at), vf);
          products[r][v] += sum * key_scale * loadf(scales + at);
        }
      }
    }
    add_relu(products, scales + kGroups * kWidth, sums + key * kLanes);
  }
};

struct IntegerLogitsBody {
  const float* panel;
  const float* packed;
  int keys;
  float* sums;

  template <int kVectors>
  void group(int group) const {
    for_each_tile(keys, IntegerReluSum<kVectors>{panel, packed + group * integer_group_floats(), sums});
  }
};

inline void integer_logits(const float* panel, int keys, const float* packed, int heads, uint16_t* out) {
  score_keys(keys, heads, out, [&](float* sums) { return IntegerLogitsBody{panel, packed, keys, sums}; });
}

constexpr LogitsKernels kIntegerLogits = {pack_integer_query, decode_integer_keys, integer_logits};
#else
// No byte multiply-add here: everything runs in fp32.
inline bool integer_query(const LogitsQuery&) { return false; }
inline int integer_keys(const LogitsKeys&) { return 0; }
constexpr LogitsKernels kIntegerLogits = {};
#endif
