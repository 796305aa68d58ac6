// Bytes -> fp32: elements, scales, and whole groups of a record. Included after simd.h, in the same namespace.

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

inline float scale_value(UE8M0, uint8_t byte) {
  return byte == 255 ? __builtin_nanf("") : as_float(uint32_t{byte} << 23);
}
inline float scale_value(E4M3, uint8_t byte) { return element_value<E4M3>(splat(uint32_t{byte}))[0]; }

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

// One token: data and scales -> kDim fp32 values. A key's NaN or infinite product is 0: an unwritten slot holds garbage
// and must not poison a row. A query keeps both: NaN there is the model's own error (SPEC section 1).
enum class Side { kKey, kQuery };

template <class Format, Side kSide>
inline void decode_token(const uint8_t* data, const uint8_t* scales, float* out) {
  for (int group = 0; group < Format::kScaleBytes; ++group) {
    const vf scale = splat(scale_value(typename Format::Scale{}, scales[group]));
    for (int d = group * Format::kGroup; d < (group + 1) * Format::kGroup; d += kLanes) {
      const vf product =
          element_value<typename Format::Element>(load_codes(typename Format::Element{}, data, d)) * scale;
      store(out + d, kSide == Side::kKey ? is_finite_or_zero(product) : product);
    }
  }
}
