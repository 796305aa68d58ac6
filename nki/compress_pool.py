"""Softmax-weighted pooling of R rows, the compressor: a softmax over r for every (n, d) on its own.

Rows arrive as they lie in memory, 2 KiB pieces of [N * R, D], and TensorE turns them so that d is on partitions and
r is the innermost free dimension. All lanes are then busy however few rows there are to pool (8 requests of a decode
step as well as a prompt), reductions over r run at full rate, and D or R change no code path.
"""

import nki.isa as nisa
import nki.language as nl

import nki

LANES = 128  # partitions: d of one chunk, rows of one transposed piece
CHUNKS = 4  # chunks of d handled together: a piece's transposes fill one 2 KiB PSUM bank of fp32
ELEMENTS = 2048  # fp32 elements of a working tile in a partition, unless one R alone needs more
FP32_MIN = -3.4028235e38
TINY = 2.0**-126  # the smallest normal fp32 number


@nki.jit
def softmax_pool(latent, score):
    """out[n, d] = sum_r latent[n, r, d] * softmax_r(score[n, :, d]).

    Dimensions:
        N: pooled rows; R: rows pooled into one, R >= 2 and at most about 8000 (SBUF); D: width.

    Args:
        latent [N, R, D] fp32.
        score [N, R, D] fp32: -inf masks its entry, whose latent is then not used at all, NaN or infinite as it may be.

    Returns:
        [N, D] fp32. A column whose scores are all -inf gives 0.

    Notes:
        - The largest score is subtracted first, so no finite score overflows; it is clamped to the fp32 minimum, so a
          column of -inf has exp(-inf) = 0 everywhere, and scores at the fp32 minimum are ordinary ones.
        - The denominator is at least 1 as soon as one entry is live; the clamp at 1 only acts on all-masked columns.
        - A score of +inf or NaN, and a NaN or infinite latent under a live score, stay within their column.
        - Work on engines: VectorE the two sums, the maximum and the masking; GpSimd the two-input passes, which need
          SBUF operands; ScalarE the evictions, the mask and exp; TensorE only turns.
        - The program does not grow with N: trips of up to 512 rows are a device loop.

    Pseudocode:
        for n0 in steps of 512 / R:                      # device loop
            for 512 columns of D:
                S, L = transpose(score), transpose(latent)   # [128 d, 4, n, R]
                m = max(max_r(S), fp32 minimum)
                L = 0 where S = -inf
                E = exp(S - m)
                O = sum_r(E * L) / max(sum_r(E), 1)
                out = transpose(O)
    """
    count, r, d = score.shape
    out = nl.ndarray((count, d), dtype=nl.float32, buffer=nl.shared_hbm)
    step = max(1, min(LANES, LANES * CHUNKS // r))
    rest = count % step

    def several(n):
        _pool(latent, score, out, n, step)

    def remaining(n):
        _pool(latent, score, out, n, rest)

    if count >= step:
        nl.fori_loop(0, count // step * step, several, step=step)
    if rest > 0:
        nl.fori_loop(count // step * step, count, remaining, step=step)
    return out


def _pool(latent, score, out, n, count):
    """`count` pooled rows from `n` (a register) on: groups of whole 128-wide chunks of D, then what is left."""
    r, d = score.shape[1], score.shape[2]
    chunks = max(1, min(CHUNKS, ELEMENTS // (count * r)))
    first = 0
    while first < d:
        lanes = min(LANES, d - first)
        wide = min(chunks, (d - first) // lanes)
        _pool_columns(latent, score, out, n, count, first, lanes, wide)
        first = first + lanes * wide


def _pool_columns(latent, score, out, n, count, first, lanes, chunks):
    """Columns first ... first + lanes * chunks - 1."""
    r = score.shape[1]
    shape = (lanes, chunks, count, r)
    scores = _turned(score, n, count, first, lanes, chunks)
    latents = _turned(latent, n, count, first, lanes, chunks)

    # 0 for -inf, 1 to 9 for any finite score: score * TINY lies in [-4, 4]. NaN becomes 0 too, but its weight is NaN.
    live = nl.ndarray(shape, dtype=nl.uint8, buffer=nl.sbuf)
    nisa.activation(dst=live, op=nl.relu, data=scores, scale=TINY, bias=5.0)
    # A copy and not a product with the mask: 0 * NaN would let a masked latent through.
    nisa.tensor_copy_predicated(dst=latents, src=0.0, predicate=live, reverse_pred=True)

    top = nl.ndarray((lanes, chunks, count, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=top, op=nl.maximum, data=scores, axis=3, keepdims=True)
    finite = nl.ndarray((lanes, chunks, count, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=finite, data=top, op0=nl.maximum, operand0=FP32_MIN)
    shifted = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=shifted, data1=scores, data2=finite.broadcast(3, r), op=nl.subtract, engine=nisa.engine.gpsimd
    )
    weights = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=weights, op=nl.exp, data=shifted)
    products = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=products, data1=weights, data2=latents, op=nl.multiply, engine=nisa.engine.gpsimd)

    total = nl.ndarray((lanes, chunks, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=total, op=nl.add, data=weights, axis=3)
    denominator = nl.ndarray((lanes, chunks, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=denominator, data=total, op0=nl.maximum, operand0=1.0)
    # On ScalarE: VectorE's reciprocal takes 8 cycles an element, and 1 <= denominator <= R is far inside its table.
    inverse = nl.ndarray((lanes, chunks, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=inverse, op=nl.reciprocal, data=denominator)
    numerator = nl.ndarray((lanes, chunks, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=numerator, op=nl.add, data=products, axis=3)
    pooled = nl.ndarray((lanes, chunks, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=pooled, data1=numerator, data2=inverse, op=nl.multiply)
    _store(pooled, out, n, count, first, lanes, chunks)


def _turned(source, n, count, first, lanes, chunks):
    """[lanes of d, chunks, count, R] fp32 of the [N, R, D] source; pieces of 128 rows, whatever n they belong to."""
    r, d = source.shape[1], source.shape[2]
    base = source.reshape((source.shape[0], r * d))
    rows, width = count * r, lanes * chunks
    turned = nl.ndarray((lanes, chunks, rows), dtype=nl.float32, buffer=nl.sbuf)
    for row in range(0, rows, LANES):
        m = min(LANES, rows - row)
        piece = nl.ndarray((m, width), dtype=nl.float32, buffer=nl.sbuf)
        pattern = [[d, m], [1, width]]
        nisa.dma_copy(dst=piece, src=base.ap(pattern=pattern, offset=row * d + first, scalar_offset=n, indirect_dim=0))
        staged = nl.ndarray((lanes, chunks, m), dtype=nl.float32, buffer=nl.psum)
        for c in range(chunks):
            nisa.nc_transpose(dst=staged[:, c, :], data=piece[:, c * lanes : (c + 1) * lanes])
        nisa.tensor_copy(dst=turned[:, :, row : row + m], src=staged, engine=nisa.engine.scalar)
    return turned.reshape((lanes, chunks, count, r))


def _store(pooled, out, n, count, first, lanes, chunks):
    """Turn [lanes of d, chunks, count] back to rows of D and write them."""
    d = out.shape[1]
    width = lanes * chunks
    staged = nl.ndarray((count, chunks, lanes), dtype=nl.float32, buffer=nl.psum)
    for c in range(chunks):
        nisa.nc_transpose(dst=staged[:, c, :], data=pooled[:, c, :])
    rows = nl.ndarray((count, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=rows, src=staged)
    target = out.ap(pattern=[[d, count], [1, width]], offset=first, scalar_offset=n, indirect_dim=0)
    nisa.dma_copy(dst=target, src=rows)
