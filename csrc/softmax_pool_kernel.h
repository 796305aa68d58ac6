// softmax_pool for columns [begin, end) of one row: one pass over memory, rescaled once per block of R. After simd.h.

constexpr int64_t kPoolBlock = 8;  // rows between two rescalings: the compressor's usual R, which then needs none

constexpr int kPoolVectors = 2;  // column vectors of a tile: whole cache lines of every row it visits

// kVectors vectors of columns of one row n; kWhole where they are contiguous and complete. Everything is held by value:
// a store to the bf16 output could alias a reference, and every stride would be read again.
template <int kVectors, bool kWhole>
struct PoolTile {
  const float* score;  // [R, columns], at this tile's first column
  const float* latent;
  int64_t score_row_stride, score_dim_stride, latent_row_stride, latent_dim_stride;
  int64_t rows;
  int count;  // live lanes, if not kWhole (one vector then)
  float headroom;

  vf read(const float* p, int64_t dim_stride, int v) const {
    if constexpr (kWhole) return loadf(p + v * kLanes);
    vf x{};
    for (int i = 0; i < count; ++i) x[i] = p[i * dim_stride];
    return x;
  }

  // `headroom` >= log2 R is taken from every exponent: the R weights then sum to at most 1, and the weighted latents
  // cannot overflow. It is a common factor of numerator and denominator.
  void run(uint16_t* out) const {
    const vf masked = splat(-__builtin_inff());
    vf max[kVectors], reference[kVectors]{}, weight[kVectors]{}, total[kVectors]{};
    for (vf& m : max) m = masked;
    const float *s = score, *l = latent;
    for (int64_t begin = 0; begin < rows; begin += kPoolBlock) {
      const int64_t size = rows - begin < kPoolBlock ? rows - begin : kPoolBlock;
      vf before[kVectors];
      for (int v = 0; v < kVectors; ++v) before[v] = max[v];
      for (int64_t r = 0; r < size; ++r) {
        for (int v = 0; v < kVectors; ++v) max[v] = larger(max[v], read(s + r * score_row_stride, score_dim_stride, v));
      }
      for (int v = 0; v < kVectors; ++v) {
        const vf moved = max[v] == masked ? vf{} : max[v];
        if (begin > 0) {
          const vf rescale = before[v] == masked ? splat(1.0f) : exp(reference[v] - moved);
          weight[v] *= rescale;
          total[v] *= rescale;
        }
        reference[v] = moved;
      }
      for (int64_t r = 0; r < size; ++r, s += score_row_stride, l += latent_row_stride) {
        vf p[kVectors];
        for (int v = 0; v < kVectors; ++v) p[v] = (read(s, score_dim_stride, v) - reference[v]) * kLog2E - headroom;
        exp2(p);
        for (int v = 0; v < kVectors; ++v) {
          weight[v] += p[v];
          total[v] += read(s, score_dim_stride, v) == masked ? vf{} : p[v] * read(l, latent_dim_stride, v);
        }
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      const vu16 mean = to_bf16(weight[v] == 0.0f ? vf{} : total[v] / weight[v]);
      if constexpr (kWhole) {
        store(out + v * kLanes, mean);
      } else {
        for (int i = 0; i < count; ++i) out[i] = mean[i];
      }
    }
  }
};

template <int kVectors, bool kWhole>
inline void pool_tile(const PoolRow& row, int64_t d, int count, float headroom) {
  PoolTile<kVectors, kWhole>{row.score + d * row.score_dim_stride,
                             row.latent + d * row.latent_dim_stride,
                             row.score_row_stride,
                             row.score_dim_stride,
                             row.latent_row_stride,
                             row.latent_dim_stride,
                             row.rows,
                             count,
                             headroom}
      .run(row.out + d);
}

inline void pool(const PoolRow& row, int64_t dim_begin, int64_t dim_end) {
  float headroom = 0.0f;
  for (int64_t reach = 1; reach < row.rows; reach *= 2) headroom += 1.0f;
  int64_t d = dim_begin;
  if (row.score_dim_stride == 1 && row.latent_dim_stride == 1) {
    constexpr int kTile = kPoolVectors * kLanes;
    for (; d + kTile <= dim_end; d += kTile) pool_tile<kPoolVectors, true>(row, d, kTile, headroom);
    for (; d + kLanes <= dim_end; d += kLanes) pool_tile<1, true>(row, d, kLanes, headroom);
  }
  for (; d < dim_end; d += kLanes) {
    const int64_t left = dim_end - d;
    pool_tile<1, false>(row, d, left < kLanes ? static_cast<int>(left) : kLanes, headroom);
  }
}
