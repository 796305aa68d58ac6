"""Stages of the attention kernels: loads in the kernels' layouts, scores, softmax, value product, store.

`plan` is the kernel's _Plan, `where` and `row` are run-time addresses (a loop register or a 1 x 1 tile).
"""

import nki.isa as nisa
import nki.language as nl

LATENT = 512  # width of key and value: one PSUM bank of fp32, so the output of a row is one matmul destination
CHUNK = 128  # partitions: contraction depth of a matmul, keys in a tile
CHUNKS = LATENT // CHUNK
STAGE = 1024  # bf16 elements of one 2 KiB PSUM bank


def query_transposed(plan, q, row, first, members):
    """(q * power)^T of `members` rows from row + first on: [128 d, 4, members * heads] bf16."""
    heads = plan.heads
    lanes = members * heads
    base = q.reshape((plan.rows, heads * LATENT))
    pattern = [[LATENT, lanes], [1, LATENT]]
    tile = nl.ndarray((lanes, LATENT), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.dma_copy(
        dst=tile, src=base.ap(pattern=pattern, offset=first * heads * LATENT, scalar_offset=row, indirect_dim=0)
    )
    staged = nl.ndarray((CHUNK, CHUNKS, lanes), dtype=nl.bfloat16, buffer=nl.psum)
    for d in range(CHUNKS):
        nisa.nc_transpose(dst=staged[:, d, :], data=tile[:, d * CHUNK : (d + 1) * CHUNK])
    q_t = nl.ndarray((CHUNK, CHUNKS, lanes), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=q_t, data=staged, op0=nl.multiply, operand0=plan.power)
    return q_t


def contiguous_keys(base, where, offset, tiles):
    """Keys [128, tiles, 512]: partition p holds keys p * tiles ... p * tiles + tiles - 1 of the block.

    Softmax does not care about the order of keys, and this one gives each partition tiles KiB in one descriptor;
    key c * 128 + p would need 1 KiB pieces, which reach 42 % of the bandwidth.
    """
    keys = nl.ndarray((CHUNK, tiles, LATENT), dtype=nl.bfloat16, buffer=nl.sbuf)
    pattern = [[tiles * LATENT, CHUNK], [1, tiles * LATENT]]
    nisa.dma_copy(dst=keys, src=base.ap(pattern=pattern, offset=offset, scalar_offset=where, indirect_dim=0))
    return keys


def gathered_keys(table, columns, g, tiles):
    """Keys [128, tiles, 512] of row g: key c * 128 + p on partition p, one gather for each tile c."""
    keys = nl.ndarray((CHUNK, tiles, LATENT), dtype=nl.bfloat16, buffer=nl.sbuf)
    for c in range(tiles):
        rows = table.ap(pattern=[[LATENT, CHUNK], [1, LATENT]], vector_offset=columns[:, c, g : g + 1], indirect_dim=0)
        nisa.dma_copy(dst=keys[:, c, :], src=rows)
    return keys


def index_columns(base, where, count, tiles):
    """Indices of `count` rows as columns, [128, tiles, count] int32.

    Rows arrive as long descriptors and TensorE turns them: loaded as columns, an index would be a 4-byte descriptor
    and as expensive as the 1 KiB row it names. They pass through fp32, exact below 2^24.
    """
    k = tiles * CHUNK
    rows = nl.ndarray((count, k), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=rows, src=base.ap(pattern=[[k, count], [1, k]], scalar_offset=where, indirect_dim=0))
    numbers = nl.ndarray((count, k), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=numbers, src=rows, engine=nisa.engine.scalar)
    staged = nl.ndarray((CHUNK, tiles, count), dtype=nl.float32, buffer=nl.psum)
    for c in range(tiles):
        nisa.nc_transpose(dst=staged[:, c, :], data=numbers[:, c * CHUNK : (c + 1) * CHUNK])
    columns = nl.ndarray((CHUNK, tiles, count), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=columns, src=staged)
    return columns


def mask_rows(base, where, count, tiles, gathers):
    """Mask rows [count, tiles, 128] bf16 in the order of the keys: tile by tile, partition by partition."""
    k = tiles * CHUNK
    rows = nl.ndarray((count, k), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=rows, src=base.ap(pattern=[[k, count], [1, k]], scalar_offset=where, indirect_dim=0))
    natural = rows.reshape((count, tiles, CHUNK))
    ordered = natural if gathers else rows.reshape((count, CHUNK, tiles)).permute((0, 2, 1))
    mask = nl.ndarray((count, tiles, CHUNK), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_copy(dst=mask, src=ordered, engine=nisa.engine.scalar)
    return mask


def masked_scores(plan, q_t, keys, mask, g, tiles):
    """Masked scores [heads, tiles * 128] fp32 in PSUM; 512 columns (one bank) are one accumulation group.

    The mask row enters as a fifth contraction: k TensorE columns instead of a two-input VectorE pass over [heads, k]
    and a broadcast of the row to every partition.
    """
    keys_t = keys_transposed(keys, tiles)
    scores = nl.ndarray((plan.heads, tiles * CHUNK), dtype=nl.float32, buffer=nl.psum)
    for c in range(0, tiles, 4):
        n = min(4, tiles - c)
        part = scores[:, c * CHUNK : (c + n) * CHUNK]
        nisa.nc_matmul(
            dst=part, stationary=plan.selector[: mask.shape[0], g, :], moving=mask[:, c : c + n, :], accumulate=False
        )
        for d in range(CHUNKS):
            nisa.nc_matmul(dst=part, stationary=q_t[:, d, :], moving=keys_t[:, c : c + n, d, :], accumulate=True)
    return scores


def keys_transposed(keys, tiles):
    """K^T [128 d, tiles, 4, 128 keys] bf16 by TensorE: two key tiles (eight transposes) fill a PSUM bank.

    VectorE evicts bf16 from PSUM at two elements a cycle, ScalarE at one; every third bank goes to ScalarE, which
    leaves both about equally busy next to the row maximum (VectorE) and exp and the output (ScalarE).
    """
    keys_t = nl.ndarray((CHUNK, tiles, CHUNKS, CHUNK), dtype=nl.bfloat16, buffer=nl.sbuf)
    for c in range(0, tiles, 2):
        n = min(2, tiles - c)
        staged = nl.ndarray((CHUNK, n, CHUNKS, CHUNK), dtype=nl.bfloat16, buffer=nl.psum)
        for j in range(n):
            for d in range(CHUNKS):
                nisa.nc_transpose(dst=staged[:, j, d, :], data=keys[:, c + j, d * CHUNK : (d + 1) * CHUNK])
        engine = nisa.engine.scalar if c % 6 == 2 else nisa.engine.vector
        nisa.tensor_copy(dst=keys_t[:, c : c + n], src=staged, engine=engine)
    return keys_t


def softmax_block(plan, scores, neg_before, tiles):
    """One block of the online softmax: weights [heads, k] bf16, new -max, decay of the old state, row sums (fp32)."""
    heads = plan.heads
    neg_block = nl.ndarray((heads, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=neg_block, op=nl.maximum, data=scores, axis=1, negate=True)
    neg_max = nl.ndarray((heads, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=neg_max, data=neg_block, op0=nl.multiply, operand0=plan.factor, op1=nl.minimum, operand1=neg_before
    )
    weights = nl.ndarray((heads, tiles * CHUNK), dtype=nl.bfloat16, buffer=nl.sbuf)
    total = nl.ndarray((heads, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(
        dst=weights, op=nl.exp, data=scores, scale=plan.factor, bias=neg_max,
        reduce_op=nl.add, reduce_res=total, reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )  # fmt: skip
    decay = nl.ndarray((heads, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=decay, op=nl.exp, data=neg_before, scale=-1.0, bias=neg_max)
    return weights, neg_max, decay, total


def value_product(weights, keys, heads, tiles):
    """weights @ K as [heads, 512] fp32 in one PSUM bank; P^T comes from TensorE, a bank of tiles at a time."""
    weights_t = nl.ndarray((CHUNK, tiles, heads), dtype=nl.bfloat16, buffer=nl.sbuf)
    group = STAGE // heads
    for c in range(0, tiles, group):
        n = min(group, tiles - c)
        staged = nl.ndarray((CHUNK, n, heads), dtype=nl.bfloat16, buffer=nl.psum)
        for j in range(n):
            nisa.nc_transpose(dst=staged[:, j, :], data=weights[:, (c + j) * CHUNK : (c + j + 1) * CHUNK])
        nisa.tensor_copy(dst=weights_t[:, c : c + n], src=staged)
    product = nl.ndarray((heads, LATENT), dtype=nl.float32, buffer=nl.psum)
    for c in range(tiles):
        nisa.nc_matmul(dst=product, stationary=weights_t[:, c, :], moving=keys[:, c, :], accumulate=c > 0)
    return product


def normalise(dst, product, denominator):
    """dst = product / denominator: the division rides on the eviction to bf16."""
    inverse = nl.ndarray(denominator.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=denominator)
    nisa.activation(dst=dst, op=nl.copy, data=product, scale=inverse)


def store(plan, out, result, row, first, members):
    """Write the results of `members` rows from row + first on."""
    lanes = members * plan.heads
    base = out.reshape((plan.rows, plan.heads * LATENT))
    pattern = [[LATENT, lanes], [1, LATENT]]
    target = base.ap(pattern=pattern, offset=first * plan.heads * LATENT, scalar_offset=row, indirect_dim=0)
    nisa.dma_copy(dst=target, src=result[:lanes])
