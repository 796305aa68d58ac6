// softmax_pool for columns [begin, end) of one row: one pass over memory, rescaled once per block of R. After simd.h.

constexpr int64_t kPoolBlock = 8;  // rows between two rescalings: the compressor's usual R, which then needs none

struct PoolColumns {
  const PoolRow& row;
  int64_t dim;
  int count;  // live lanes; fewer than kLanes only at the right edge

  vf read(const float* base, int64_t row_stride, int64_t dim_stride, int64_t r) const {
    const float* p = base + r * row_stride + dim * dim_stride;
    if (dim_stride == 1 && count == kLanes) return loadf(p);
    vf x{};
    for (int i = 0; i < count; ++i) x[i] = p[i * dim_stride];
    return x;
  }
  vf score(int64_t r) const { return read(row.score, row.score_row_stride, row.score_dim_stride, r); }
  vf latent(int64_t r) const { return read(row.latent, row.latent_row_stride, row.latent_dim_stride, r); }
};

inline void pool_columns(const PoolColumns& columns, float shrink, uint16_t* out) {
  const vf masked = splat(-__builtin_inff());
  vf max = masked, weight{}, total{};
  const int64_t rows = columns.row.rows;
  for (int64_t begin = 0; begin < rows; begin += kPoolBlock) {
    const int64_t end = begin + kPoolBlock < rows ? begin + kPoolBlock : rows;
    const vf previous = max;
    for (int64_t r = begin; r < end; ++r) max = larger(max, columns.score(r));
    if (begin > 0) {
      const vf rescale = max == previous ? splat(1.0f) : exp(previous - max);
      weight *= rescale;
      total *= rescale;
    }
    for (int64_t r = begin; r < end; ++r) {
      const vf score = columns.score(r);
      const vf p = score == masked ? vf{} : exp(score - max) * shrink;
      weight += p;
      total += score == masked ? vf{} : p * columns.latent(r);
    }
  }
  const vf mean = weight == 0.0f ? vf{} : total / weight;
  const vu16 rounded = to_bf16(mean);
  for (int i = 0; i < columns.count; ++i) out[i] = rounded[i];
}

inline void pool(const PoolRow& row, int64_t dim_begin, int64_t dim_end) {
  // Weights are scaled by a power of two <= 1/R, so that the sum of R weighted latents cannot overflow.
  float shrink = 1.0f;
  for (int64_t reach = 1; reach < row.rows; reach *= 2) shrink *= 0.5f;
  for (int64_t d = dim_begin; d < dim_end; d += kLanes) {
    const int64_t left = dim_end - d;
    pool_columns(PoolColumns{row, d, left < kLanes ? static_cast<int>(left) : kLanes}, shrink, row.out + d);
  }
}
