// The quantized record formats: sizes, and where a token's elements and scales are. deepinfer_ops/record_format.py
// holds the same table for Python; tests/test_record_format.py compares the two. A new format is one line here and one
// there.
#pragma once

#include <cstdint>

namespace deepinfer {

// A minifloat without infinities: 1 sign bit, then exponent and mantissa fields (SPEC section 1).
template <int kExponentBits_, int kMantissaBits_, int kBias_, bool kHasNan_>
struct Minifloat {
  static constexpr int kMantissaBits = kMantissaBits_;
  static constexpr int kBias = kBias_;
  static constexpr int kBits = 1 + kExponentBits_ + kMantissaBits_;
  static constexpr uint32_t kMagnitudeMask = (1u << (kBits - 1)) - 1;
  // Only the all-ones magnitude is NaN (OCP e4m3 "fn"); e2m1 has no NaN at all.
  static constexpr bool kHasNan = kHasNan_;
};
using E4M3 = Minifloat<4, 3, 7, true>;
using E2M1 = Minifloat<2, 1, 1, false>;
struct UE8M0 {};  // byte b means 2^(b - 127); 0 means 0, 255 means NaN

template <class Element_, class Scale_, int kDim_, int kGroup_>
struct RecordFormat {
  using Element = Element_;
  using Scale = Scale_;
  static constexpr int kDim = kDim_;
  static constexpr int kGroup = kGroup_;  // elements that share one scale byte
  static constexpr int kPerByte = 8 / Element::kBits;
  static constexpr int kDataBytes = kDim / kPerByte;
  static constexpr int kScaleBytes = kDim / kGroup;
  static constexpr int kBytes = kDataBytes + kScaleBytes;
};

constexpr int kLatentDim = 512;
constexpr int kIndexDim = 128;

// Main caches: a record is its elements, then its scales.
using KvFp8 = RecordFormat<E4M3, UE8M0, kLatentDim, 32>;
using KvFp4 = RecordFormat<E2M1, E4M3, kLatentDim, 16>;

// Index caches and queries. A page is planar: the elements of all its tokens, then the scales of all its tokens.
using IndexFp8 = RecordFormat<E4M3, UE8M0, kIndexDim, 32>;
using IndexFp4 = RecordFormat<E2M1, UE8M0, kIndexDim, 32>;

enum class Format : int { kFp8, kFp4 };

// Calls visit(RecordFormat{}) for a format known only at run time.
template <class Fp8, class Fp4, class Visitor>
inline void with_format(Format format, const Visitor& visit) {
  if (format == Format::kFp8) {
    visit(Fp8{});
  } else {
    visit(Fp4{});
  }
}

}  // namespace deepinfer
