"""The lightning indexer's score: one number for each token and key, from all heads of the token.

TensorE does both contractions. The first, q . k over d, needs keys^T, which is made once for a segment of keys and
serves every token. The second, over heads, takes relu(S) as the *stationary* operand: the moving one is then the
narrow weight matrix, 64 columns at most for usual head counts, where moving relu(S) itself would cost as much as the
first contraction. The result has keys on partitions and is turned back 128 columns at a time.
"""

import nki.isa as nisa
import nki.language as nl

import nki

from ._tiles import position

WIDTH = 128  # elements of an index key: the contraction fills the partitions exactly
TILE = 128  # keys of a tile
BLOCK = 4  # tiles of one first contraction: 512 fp32 scores, a PSUM bank
STAGE = 8  # bf16 128 x 128 transposes in a PSUM bank
SEGMENT = 32  # tiles whose keys^T stay in SBUF (8 KiB a partition) while all tokens pass; divides TILE


@nki.jit
def weighted_scores(q, k, weights):
    """out[t, j] = sum_h weights[h, t] * relu(q[t, h] . k[j]).

    Dimensions:
        T: tokens; H: heads, 1..128; n: keys, a multiple of 128.

    Args:
        q [T * H, 128] bf16: queries, the heads of a token adjacent.
        k [n, 128] bf16: keys, shared by all tokens.
        weights [H, T] fp32: any sign.

    Returns:
        [T, n] fp32.

    Notes:
        - Dot products and the sum over heads are fp32; relu(q . k) and the weights are rounded to bf16 between the
          two contractions, an error of 2^-7 of sum_h |weights| * relu(q . k) at most. bf16 weights stay exact.
        - relu is applied before the weight, so negative weights subtract.
        - The program grows neither with T nor with n: segments of 4096 keys and groups of tokens are device loops.

    Pseudocode:
        for segment of 4096 keys:                          # device loop
            K^T = transpose(k[segment])
            for group of tokens, 128 (token, heads) lanes: # device loop
                for 512 keys, for each fold f of heads:
                    A[f] = relu(q^T[f] . K^T)              # [lanes, 512], ScalarE and VectorE in turn
                Z[keys, token] = sum_f A[f]^T @ W[f]       # W[f]: a lane's weight in its token's column, else 0
                out[tokens, segment] = transpose(Z)
    """
    tokens = weights.shape[1]
    tiles = k.shape[0] // TILE
    out = nl.ndarray((tokens, k.shape[0]), dtype=nl.float32, buffer=nl.shared_hbm)
    heads = weights.shape[0]
    fold = _fold(tokens, heads)
    group = min(tokens, TILE // (heads // fold))
    full = _group(heads, fold, group)
    last = _group(heads, fold, tokens % group) if tokens % group > 0 else None

    def segment(tile, count):
        keys_t = _keys_transposed(k, tile, count)

        def several(token):
            _score(full, q, weights, keys_t, out, token, tile, count)

        def remaining(token):
            _score(last, q, weights, keys_t, out, token, tile, count)

        nl.fori_loop(0, tokens // group * group, several, step=group)
        if tokens % group > 0:
            nl.fori_loop(tokens // group * group, tokens, remaining, step=group)

    def whole(tile):
        segment(tile, SEGMENT)

    def rest(tile):
        segment(tile, tiles % SEGMENT)

    if tiles >= SEGMENT:
        nl.fori_loop(0, tiles // SEGMENT * SEGMENT, whole, step=SEGMENT)
    if tiles % SEGMENT > 0:
        nl.fori_loop(tiles // SEGMENT * SEGMENT, tiles, rest, step=SEGMENT)
    return out


def _fold(tokens, heads):
    """Heads of a token on one partition: f of them load f * 256 B a descriptor and f times as many tokens a trip.

    Only while there are tokens enough to fill the 128 partitions (otherwise it multiplies the TensorE passes), and
    up to 64 tokens, the columns that a narrow matmul costs anyway.
    """
    for fold in (16, 8, 4, 2):
        if heads % fold == 0 and tokens * heads >= TILE * fold and TILE * fold // heads <= 64:
            return fold
    return 1


class _Group(nl.NKIObject):
    """Tokens of a trip on partitions: lane t * (heads / fold) + u holds heads fold * u ... of token t.

    spread [heads, fold, lanes] bf16 is one-hot: spread[h, f, lane] = 1 if lane's head of fold f is h.
    own [lanes, count] bf16: 1 in the column of the lane's token.
    """

    def __init__(self, heads, fold, count, spread, own):
        self.heads = heads
        self.fold = fold
        self.count = count
        self.lanes = count * (heads // fold)
        self.spread = spread
        self.own = own


def _group(heads, fold, count):
    """A group and its two constants, which are views and sums of the identity."""
    per_token = heads // fold
    lanes = count * per_token
    identity = nl.shared_identity_matrix(heads, dtype=nl.bfloat16).reshape((heads, per_token, fold))
    spread = nl.ndarray((heads, fold, lanes), dtype=nl.bfloat16, buffer=nl.sbuf)
    for f in range(fold):
        nisa.tensor_copy(
            dst=spread[:, f, :].reshape((heads, count, per_token)),
            src=identity[:, :, f].expand_dim(1).broadcast(1, count),
            engine=nisa.engine.gpsimd,
        )
    own = nl.ndarray((lanes, count), dtype=nl.bfloat16, buffer=nl.sbuf)
    diagonal = nl.shared_identity_matrix(lanes, dtype=nl.bfloat16)
    nisa.tensor_reduce(dst=own, op=nl.add, data=diagonal.reshape((lanes, count, per_token)), axis=2)
    return _Group(heads, fold, count, spread, own)


def _keys_transposed(k, tile, count):
    """keys^T [128 d, count * 128] bf16, keys in their order, of `count` tiles from `tile` (a register) on.

    Partition p loads keys p * count ... in one descriptor of count / 4 KiB (a key alone is 256 B, a tenth of the
    bandwidth); the eviction puts them back in order, at half rate for its stride. ScalarE does it: VectorE and
    ScalarE share the relu passes, and VectorE has the other evictions.
    """
    keys = nl.ndarray((TILE, count, WIDTH), dtype=nl.bfloat16, buffer=nl.sbuf)
    pattern = [[count * WIDTH, TILE], [1, count * WIDTH]]
    base = k.reshape((k.shape[0] // TILE, TILE * WIDTH))
    nisa.dma_copy(dst=keys, src=base.ap(pattern=pattern, scalar_offset=tile, indirect_dim=0))
    keys_t = nl.ndarray((WIDTH, TILE, count), dtype=nl.bfloat16, buffer=nl.sbuf)
    for c in range(0, count, STAGE):
        m = min(STAGE, count - c)
        staged = nl.ndarray((WIDTH, m, TILE), dtype=nl.bfloat16, buffer=nl.psum)
        for j in range(m):
            nisa.nc_transpose(dst=staged[:, j, :], data=keys[:, c + j, :])
        nisa.tensor_copy(dst=keys_t[:, :, c : c + m], src=staged.permute((0, 2, 1)), engine=nisa.engine.scalar)
    return keys_t.reshape((WIDTH, TILE * count))


def _score(group, q, weights, keys_t, out, token, tile, count):
    """Scores of a group of tokens for one segment of keys."""
    q_t = _queries_transposed(group, q, token, out.shape[0])
    columns = _weight_columns(group, weights, token)
    by_key = nl.ndarray((TILE, group.count, count), dtype=nl.float32, buffer=nl.sbuf)
    for b in range(0, count, BLOCK):
        m = min(BLOCK, count - b)
        active = nl.ndarray((group.lanes, group.fold, m * TILE), dtype=nl.bfloat16, buffer=nl.sbuf)
        for f in range(group.fold):
            scores = nl.ndarray((group.lanes, m * TILE), dtype=nl.float32, buffer=nl.psum)
            nisa.nc_matmul(
                dst=scores, stationary=q_t[:, f, :], moving=keys_t[:, b * TILE : (b + m) * TILE], accumulate=False
            )
            if (b // BLOCK + f) % 2 == 0:
                nisa.tensor_scalar(dst=active[:, f, :], data=scores, op0=nl.maximum, operand0=0.0)
            else:
                nisa.activation(dst=active[:, f, :], op=nl.relu, data=scores)
        sums = nl.ndarray((TILE, m, group.count), dtype=nl.float32, buffer=nl.psum)
        for c in range(m):
            for f in range(group.fold):
                nisa.nc_matmul(
                    dst=sums[:, c, :], stationary=active[:, f, c * TILE : (c + 1) * TILE], moving=columns[:, f, :],
                    accumulate=f > 0,
                )  # fmt: skip
        nisa.tensor_copy(dst=by_key[:, :, b : b + m], src=sums.permute((0, 2, 1)))
    _store(group, by_key, out, position(token, tile, out.shape[1] // TILE), count)


def _queries_transposed(group, q, token, tokens):
    """q^T [128 d, fold, lanes] bf16 of the group starting at `token` (a register)."""
    row = group.fold * WIDTH
    tile = nl.ndarray((group.lanes, row), dtype=nl.bfloat16, buffer=nl.sbuf)
    base = q.reshape((tokens, group.heads * WIDTH))
    nisa.dma_copy(dst=tile, src=base.ap(pattern=[[row, group.lanes], [1, row]], scalar_offset=token, indirect_dim=0))
    q_t = nl.ndarray((WIDTH, group.fold, group.lanes), dtype=nl.bfloat16, buffer=nl.sbuf)
    for f in range(0, group.fold, STAGE):
        m = min(STAGE, group.fold - f)
        staged = nl.ndarray((WIDTH, m, group.lanes), dtype=nl.bfloat16, buffer=nl.psum)
        for j in range(m):
            nisa.nc_transpose(dst=staged[:, j, :], data=tile[:, (f + j) * WIDTH : (f + j + 1) * WIDTH])
        nisa.tensor_copy(dst=q_t[:, f : f + m], src=staged, engine=nisa.engine.scalar)
    return q_t


def _weight_columns(group, weights, token):
    """[lanes, fold, tokens] bf16: the weight of the lane's head in the column of the lane's token, 0 elsewhere.

    A one-hot matmul carries weights[h, t] from partition h to every lane of head h: exact for bf16 values, and no
    4-byte descriptors.
    """
    loaded = nl.ndarray((group.heads, group.count), dtype=nl.float32, buffer=nl.sbuf)
    pattern = [[weights.shape[1], group.heads], [1, group.count]]
    nisa.dma_copy(dst=loaded, src=weights.ap(pattern=pattern, scalar_offset=token, indirect_dim=1))
    rounded = nl.ndarray((group.heads, group.count), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_copy(dst=rounded, src=loaded)
    columns = nl.ndarray((group.lanes, group.fold, group.count), dtype=nl.bfloat16, buffer=nl.sbuf)
    for f in range(group.fold):
        carried = nl.ndarray((group.lanes, group.count), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=carried, stationary=group.spread[:, f, :], moving=rounded, accumulate=False)
        nisa.tensor_tensor(dst=columns[:, f, :], data1=carried, data2=group.own, op=nl.multiply)
    return columns


def _store(group, by_key, out, where, count):
    """Turn [128 keys, tokens, tiles] into rows of 128 keys and write them; whole tokens, at most 128 rows a time."""
    tokens, n = out.shape
    rows = out.reshape((tokens * (n // TILE), TILE))
    step = TILE // count
    for t in range(0, group.count, step):
        m = min(step, group.count - t)
        staged = nl.ndarray((m * count, TILE), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_transpose(dst=staged, data=by_key[:, t : t + m, :])
        lines = nl.ndarray((m * count, TILE), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=lines, src=staged)
        pattern = [[n, m], [TILE, count], [1, TILE]]
        nisa.dma_copy(dst=rows.ap(pattern=pattern, offset=t * n, scalar_offset=where, indirect_dim=0), src=lines)
