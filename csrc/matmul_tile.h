// The one matrix microkernel: a tile of R x (kVectors * kLanes) products kept in registers. Included after simd.h.
//
//   acc[i][j] = sum over k of a[i * kRow + k * kStep] * b[k][j]
//
// a is broadcast element by element, b is contiguous: [n, kVectors * kLanes]. Both products of attention have this form
// with heads along the vector: keys x heads (k runs over the latent), and latent x heads (k runs over the keys). So the
// softmax between them works on whole vectors of heads, and no key panel is ever transposed.

constexpr int kTileRows = DEEPINFER_TILE_ROWS;  // kTileRows * 2 accumulators + 3 operands fit the register file

template <int R, int kVectors>
struct Tile {
  vf acc[R][kVectors];
};

template <int R, int kVectors, int64_t kRow, int64_t kStep>
inline __attribute__((always_inline)) Tile<R, kVectors> multiply(const float* a, const float* b, int64_t n) {
  Tile<R, kVectors> tile{};
  for (int64_t k = 0; k < n; ++k) {
    vf right[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) right[v] = loadf(b + (k * kVectors + v) * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const vf left = splat(a[r * kRow + k * kStep]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) tile.acc[r][v] += left * right[v];
    }
  }
  return tile;
}

// Covers rows [0, count): calls body.template tile<R>(row) with R == kTileRows, and once with the rest.
template <int R, class Body>
inline void tile_tail(int count, int row, const Body& body) {
  if constexpr (R > 0) {
    if (count - row == R) {
      body.template tile<R>(row);
    } else {
      tile_tail<R - 1>(count, row, body);
    }
  }
}
template <class Body>
inline void for_each_tile(int count, const Body& body) {
  int row = 0;
  for (; row + kTileRows <= count; row += kTileRows) body.template tile<kTileRows>(row);
  tile_tail<kTileRows - 1>(count, row, body);
}
