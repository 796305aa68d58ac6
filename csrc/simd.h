// The thin vector layer: compiler vector types of DEEPINFER_LANES floats, so one source serves every instruction set.
// Included only by isa/*.cpp, inside namespace deepinfer::DEEPINFER_ISA, with that file's compiler flags.
//
// Rules for everything included there: no torch, no C++ standard header with inline functions. The linker keeps one
// copy of a shared inline function, and if that is the AVX-512 copy, older CPUs crash in code that is not ours.

constexpr int kLanes = DEEPINFER_LANES;

typedef float vf __attribute__((vector_size(4 * kLanes)));
typedef int32_t vi __attribute__((vector_size(4 * kLanes)));
typedef uint32_t vu __attribute__((vector_size(4 * kLanes)));
typedef uint16_t vu16 __attribute__((vector_size(2 * kLanes)));
typedef uint8_t vu8 __attribute__((vector_size(kLanes)));

template <class V, class T>
inline V load(const T* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}
template <class V, class T>
inline void store(T* p, V v) {
  __builtin_memcpy(p, &v, sizeof(V));
}
inline vf loadf(const float* p) { return load<vf>(p); }
inline vf splat(float x) { return x - vf{}; }  // minus zero: the identity that compilers may fold away
inline vu splat(uint32_t x) { return vu{} + x; }
inline vf as_float(vu x) { return (vf)x; }  // a cast between vector types keeps the bits
inline vu as_bits(vf x) { return (vu)x; }
inline uint32_t as_bits(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, sizeof u);
  return u;
}
inline float as_float(uint32_t x) {
  float f;
  __builtin_memcpy(&f, &x, sizeof f);
  return f;
}

// The larger one; a NaN in b is ignored, so a running maximum stays usable.
inline vf larger(vf a, vf b) { return b > a ? b : a; }
inline vf is_finite_or_zero(vf x) {
  const vu bits = as_bits(x);
  return as_float(vu((bits & 0x7f800000u) != 0x7f800000u) & bits);
}

inline vf from_bf16(const uint16_t* p) { return as_float(__builtin_convertvector(load<vu16>(p), vu) << 16); }
inline float from_bf16(uint16_t x) { return as_float(uint32_t{x} << 16); }

// Round to nearest even; a NaN stays a NaN.
inline vu16 to_bf16(vf x) {
  const vu bits = as_bits(x);
  const vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const vu quiet_nan = (bits >> 16) | 0x40u;
  return __builtin_convertvector(x == x ? rounded : quiet_nan, vu16);
}

// body(0) .. body(N - 1), unrolled
template <int N, class Body>
inline __attribute__((always_inline)) void each(const Body& body) {
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) body(i);
}

// 2^x for x <= 127, to 2^-22 relative (2^r = 1 + r q(r) on [-1/2, 1/2], q fitted for the least relative error). Below
// -126, where the result would be subnormal, it is 0; NaN stays NaN. One value is a chain of 12 dependent instructions:
// N of them side by side fill the pipeline.
template <int N>
inline void exp2(vf (&x)[N]) {
  constexpr float kLowest = -126.0f, kRound = 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  constexpr float kFit[] = {9.6715130e-3f, 5.5507336e-2f, 0.24022242f, 0.69314700f, 1.0f};
  vf shifted[N], r[N], p[N];
  each<N>([&](int i) { r[i] = x[i] < kLowest ? splat(kLowest) : x[i]; });
  each<N>([&](int i) { shifted[i] = r[i] + kRound; });
  each<N>([&](int i) { r[i] -= shifted[i] - kRound; });
  each<N>([&](int i) { p[i] = splat(1.3264727e-3f); });
#pragma GCC unroll 8
  for (const float c : kFit) each<N>([&](int i) { p[i] = p[i] * r[i] + c; });
  each<N>([&](int i) { p[i] *= as_float((as_bits(shifted[i]) << 23) + 0x3f800000u); });
  each<N>([&](int i) { x[i] = x[i] < kLowest ? vf{} : p[i]; });
}
constexpr float kLog2E = 1.44269504f;
inline vf exp2(vf x) {
  vf one[1] = {x};
  exp2(one);
  return one[0];
}
inline vf exp(vf x) { return exp2(x * kLog2E); }

inline float sum(vf x) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    vf upper{};
    for (int i = 0; i < width; ++i) upper[i] = x[i + width];
    x += upper;
  }
  return x[0];
}

template <int... i>
struct Lanes {};
template <int n, int... i>
struct FirstLanes : FirstLanes<n - 1, n - 1, i...> {};
template <int... i>
struct FirstLanes<0, i...> {
  using type = Lanes<i...>;
};
template <int... i>
inline void zip(vf a, vf b, vf& low, vf& high, Lanes<i...>) {
  low = __builtin_shufflevector(a, b, (i / 2 + (i % 2) * kLanes)...);
  high = __builtin_shufflevector(a, b, ((i + kLanes) / 2 + (i % 2) * kLanes)...);
}
// In-place transpose of a kLanes x kLanes block: log2(kLanes) rounds of zipping rows i and i + kLanes / 2.
inline void transpose(vf (&rows)[kLanes]) {
  for (int round = 1; round < kLanes; round *= 2) {
    vf next[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes / 2; ++i) {
      zip(rows[i], rows[i + kLanes / 2], next[2 * i], next[2 * i + 1], typename FirstLanes<kLanes>::type{});
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
  }
}
