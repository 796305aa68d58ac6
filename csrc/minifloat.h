// Bytes -> fp32: elements, scales, and whole tokens. Included after simd.h, in the same namespace.

// Value of a lane-wide minifloat code. A subnormal (exponent field 0) is built as a normal number one binade up minus
// that binade's lower end: exact, and free of fp32 subnormals, which some CPUs handle slowly or flush.
template <class F>
inline vf element_value(vu code) {
  constexpr uint32_t kShift = 23 - F::kMantissaBits;
  constexpr uint32_t kRebias = uint32_t{127 - F::kBias} << 23;
  constexpr uint32_t kOneBinade = 1u << 23;
  const vu magnitude = code & F::kMagnitudeMask;
  const vu subnormal = vu(magnitude < (1u << F::kMantissaBits));
  const vf lower_end = as_float(subnormal & (kRebias + kOneBinade));
  const vf value = as_float((magnitude << kShift) + kRebias + (subnormal & kOneBinade)) - lower_end;
  const vu sign = (code >> (F::kBits - 1)) << 31;
  vu bits = as_bits(value) | sign;
  if (F::kHasNan) bits |= vu(magnitude == F::kMagnitudeMask) & 0x7fc00000u;
  return as_float(bits);
}

// e4m3 scales stand one per 16 elements, so they come from a table.
struct E4M3Table {
  float value[256];
  constexpr E4M3Table() : value() {
    for (int code = 0; code < 256; ++code) {
      const int exponent = code >> 3 & 15, mantissa = code & 7;
      float x = exponent == 0 ? mantissa : 8 + mantissa;
      for (int e = exponent == 0 ? 1 : exponent; e < 10; ++e) x *= 0.5f;
      for (int e = 10; e < exponent; ++e) x *= 2.0f;
      if ((code & 127) == 127) x = __builtin_nanf("");
      value[code] = code < 128 ? x : -x;
    }
  }
};
constexpr E4M3Table kE4M3;

inline float scale_value(UE8M0, uint8_t byte) {
  return byte == 255 ? __builtin_nanf("") : as_float(uint32_t{byte} << 23);
}
inline float scale_value(E4M3, uint8_t byte) { return kE4M3.value[byte]; }

// kLanes consecutive codes, starting at element d (a multiple of kLanes) of a token's element bytes.
inline vu load_codes(E4M3, const uint8_t* data, int d) { return __builtin_convertvector(load<vu8>(data + d), vu); }
inline vu load_codes(E2M1, const uint8_t* data, int d) {
  typedef uint8_t half __attribute__((vector_size(kLanes / 2)));
  typedef uint32_t wide_half __attribute__((vector_size(2 * kLanes)));
  const wide_half bytes = __builtin_convertvector(load<half>(data + d / 2), wide_half);
  // On this little-endian layout a 64-bit lane holds (even, odd): put each byte's nibbles into its two 32-bit halves.
  typedef uint64_t vu64 __attribute__((vector_size(4 * kLanes)));
  const vu64 pairs = __builtin_convertvector(bytes, vu64);
  return (vu)((pairs & 0xfu) | ((pairs & 0xf0u) << 28));
}

// A key's NaN or infinite product is 0: an unwritten slot holds garbage and must not poison a row. A query keeps both:
// NaN there is the model's own error (SPEC section 1).
enum class Side { kKey, kQuery };

template <class Element, Side kSide>
inline void decode_run(const uint8_t* data, float scale, int begin, int end, float* out) {
  for (int d = begin; d < end; d += kLanes) {
    const vf product = element_value<Element>(load_codes(Element{}, data, d)) * scale;
    store(out + d, kSide == Side::kKey ? is_finite_or_zero(product) : product);
  }
}

#if defined(DEEPINFER_BYTE_INTRINSICS)
// 16 codes x a scale of at most 2^119, so that the product is finite unless the code is NaN (which counts as 0). An
// e4m3 code shifted into place is a half of 2^-8 times its value, subnormals included, and the conversion is exact.
inline void decode_16(E4M3, const uint8_t* data, float scale, float* out) {
  const __m256i code = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)data));
  const __m256i magnitude = _mm256_and_si256(code, _mm256_set1_epi16(0x7f));
  const __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(code, 7), _mm256_set1_epi16(int16_t(0xbf80)));
  const __m256i kept = _mm256_andnot_si256(nan, half);
  const __m256 factor = _mm256_set1_ps(scale * 256.0f);
  _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm256_castsi256_si128(kept)) * factor);
  _mm256_storeu_ps(out + 8, _mm256_cvtph_ps(_mm256_extracti128_si256(kept, 1)) * factor);
}

// e2m1: the two bytes of an element's bf16 come from two 16-entry tables.
inline void decode_16(E2M1, const uint8_t* data, float scale, float* out) {
  const __m128i high =
      _mm_setr_epi8(0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, -128, -65, -65, -65, -64, -64, -64, -64);
  const __m128i low = _mm_setr_epi8(0, 0, -128, -64, 0, 64, -128, -64, 0, 0, -128, -64, 0, 64, -128, -64);
  const __m128i bytes = _mm_loadl_epi64((const __m128i*)data);
  const __m128i nibble = _mm_set1_epi8(15);
  const __m128i even = _mm_and_si128(bytes, nibble), odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble);
  const __m128i codes = _mm_unpacklo_epi8(even, odd);
  const __m128i h = _mm_shuffle_epi8(high, codes), l = _mm_shuffle_epi8(low, codes);
  const __m256 factor = _mm256_set1_ps(scale);
  const auto widen = [](__m128i bf16) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bf16), 16));
  };
  _mm256_storeu_ps(out, widen(_mm_unpacklo_epi8(l, h)) * factor);
  _mm256_storeu_ps(out + 8, widen(_mm_unpackhi_epi8(l, h)) * factor);
}
#endif

// One token: data and scales -> kDim fp32 values.
template <class Format, Side kSide>
inline void decode_token(const uint8_t* data, const uint8_t* scales, float* out) {
  using Element = typename Format::Element;
  for (int group = 0; group < Format::kScaleBytes; ++group) {
    const int begin = group * Format::kGroup, end = begin + Format::kGroup;
    const float scale = scale_value(typename Format::Scale{}, scales[group]);
#if defined(DEEPINFER_BYTE_INTRINSICS)
    if (kSide == Side::kKey && __builtin_fabsf(scale) <= 0x1p119f) {  // not a NaN either
      for (int d = begin; d < end; d += 16) decode_16(Element{}, data + d / Format::kPerByte, scale, out + d);
      continue;
    }
#endif
    decode_run<Element, kSide>(data, scale, begin, end, out);
  }
}
