"""Sparse MQA decode attention over latents that are key and value at once: one query row, its own k keys.

`gathered_attn` reads each row's keys from a dense [rows * k, 512] buffer, `gathered_attn_idx` gathers them from a
table shared by all rows. Everything after the load is the same code.

Layout: heads on partitions (S = q @ K^T as [heads, k]). The row maximum is then a reduction along the free dimension,
and exp takes scale, -max and the row sum in one ScalarE pass. The other layout, keys on partitions, needs no P^T and
gets the mask for free, but its maximum crosses partitions and subtracting it costs VectorE two passes.
"""

import nki.isa as nisa
import nki.language as nl

import nki

from . import _attention as stages
from ._attention import CHUNK, LATENT
from ._tiles import position

BLOCK_TILES = 16  # key tiles scored at once: 2048 fp32 scores are 4 PSUM banks; K^T, P^T and output take the rest
ROWS_PER_TRIP = 4  # rows in one body of the device loop: independent work to overlap, and small DMAs are shared
FAR = 1e30  # sinks are clamped to +-FAR. bf16(-1e30) is -1.0003e30: a masked logit is below every sink


@nki.jit
def gathered_attn(q, kv, mask_bias, sink, softmax_scale):
    """Attention of each query row over its own, already gathered keys.

    Dimensions:
        rows: query rows (requests x positions); heads: query heads, 1..128; k: keys of a row, a multiple of 128.

    Args:
        q [rows * heads, 512] bf16: queries, the heads of a row adjacent.
        kv [rows * k, 512] bf16: keys, which are also the values. No NaN or infinity, dead lanes included.
        mask_bias [rows, k] fp32: 0 for a live key, -1e30 for a dead lane.
        sink [heads, 1] fp32: a logit that takes part in the denominator only; clamped to +-1e30 (so +-inf is fine).
        softmax_scale: compile-time float, any finite value.

    Returns:
        [rows * heads, 512] bf16: sum_i w_i kv_i / (sum_i w_i + exp(sink - m)), w_i = exp(scale * q.kv_i + mask_i - m).

    Notes:
        - m = max(sink, largest logit), so the denominator is at least 1 and the result finite.
        - A dead lane weighs exactly 0, whether the row has a live key or not, while its own |scale * q.kv| < 1e25:
          its logit is at most -1.0003e30 + that, and m >= -1e30. A row of dead lanes is 0 for every sink.
        - Logits and sums are fp32, weights are rounded to bf16 for the value product, and the row sum is taken
          before that rounding.
        - More than 2048 keys stream through an online softmax; PSUM and SBUF use does not depend on k.
        - The program does not grow with rows, nor with k above 2048.

    Pseudocode:
        for row:                                   # device loop, four rows a trip
            K = kv[row]                            # [128 keys, k / 128, 512], contiguous for each partition
            K^T = transpose(K)                     # TensorE, evicted by VectorE and ScalarE
            S = mask + (q * 2^e) @ K^T             # TensorE, the mask as one more contraction
            P, sum = exp(f * S - m)                # ScalarE; softmax_scale = 2^e * f
            out = (P^T)^T @ K / (sum + exp(sink - m))
    """
    return _attend(_Source(kv, None, False), q, mask_bias, sink, softmax_scale)


@nki.jit
def gathered_attn_idx(q, table, idx, mask_bias, sink, softmax_scale):
    """Attention of each query row over keys it gathers from a table.

    Dimensions:
        rows, heads, k: as in gathered_attn; T: rows of the table.

    Args:
        q, mask_bias, sink, softmax_scale: as in gathered_attn.
        table [T, 512] bf16: decoded keys. T < 2^24.
        idx [rows, k] int32: table rows, 0 <= idx < T, repeated and in any order. Dead lanes name a valid row too.

    Returns:
        [rows * heads, 512] bf16, as gathered_attn(q, table[idx], ...).

    Notes:
        - Indirect DMA takes one index for each partition from one column, so a row costs k / 128 gathers of 128 rows.
        - The documented cost of a gathered row is that of its descriptor (1 KiB is below the 2.4 KiB where bytes
          count), so the DMA engines bind and TensorE hides behind them.
    """
    return _attend(_Source(table, idx, True), q, mask_bias, sink, softmax_scale)


class _Source(nl.NKIObject):
    """Where the keys come from: `keys` holds latents, `idx` (gathers only) names the rows."""

    def __init__(self, keys, idx, gathers):
        self.keys = keys
        self.idx = idx
        self.gathers = gathers


class _Plan(nl.NKIObject):
    """What every row shares: sizes, the split scale, -sink and the one-hot selectors of mask rows."""

    def __init__(self, rows, heads, tiles, power, factor, neg_sink, selector):
        self.rows = rows
        self.heads = heads
        self.tiles = tiles
        self.power = power
        self.factor = factor
        self.neg_sink = neg_sink
        self.selector = selector


def _attend(source, q, mask_bias, sink, softmax_scale):
    rows, k = mask_bias.shape
    heads = q.shape[0] // rows
    tiles = k // CHUNK
    power, factor = _split(softmax_scale)
    out = nl.ndarray((rows * heads, LATENT), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    neg_sink = _negated_sink(sink, heads)

    if tiles > BLOCK_TILES:
        plan = _Plan(rows, heads, tiles, power, factor, neg_sink, _selector(1, heads))

        def stream(row):
            _streamed_row(plan, source, q, mask_bias, out, row)

        nl.fori_loop(0, rows, stream)
        return out

    plan = _Plan(rows, heads, tiles, power, factor, neg_sink, _selector(min(rows, ROWS_PER_TRIP), heads))
    together = rows // ROWS_PER_TRIP * ROWS_PER_TRIP

    def four(row):
        _rows(plan, source, q, mask_bias, out, row, ROWS_PER_TRIP)

    def one(row):
        _rows(plan, source, q, mask_bias, out, row, 1)

    if together > 0:
        nl.fori_loop(0, together, four, step=ROWS_PER_TRIP)
    if rows > together:
        nl.fori_loop(together, rows, one)
    return out


def _split(scale):
    """scale = power * factor with |power| a power of two (or 0) and 1 <= factor < 2.

    power scales q exactly in bf16 and may be negative or 0; factor is the positive scale that activation() applies
    to the masked scores, so the mask keeps its sign and never needs a division by the scale.
    """
    if scale == 0.0:
        return 0.0, 1.0
    power, factor = 1.0, scale
    if factor < 0.0:
        power, factor = -1.0, -factor
    while factor >= 2.0:
        power, factor = power * 2.0, factor * 0.5
    while factor < 1.0:
        power, factor = power * 0.5, factor * 2.0
    return power, factor


def _negated_sink(sink, heads):
    """-clamp(sink) as [heads, 1]: the running -max before the first key."""
    raw = nl.ndarray((heads, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=raw, src=sink)
    capped = nl.ndarray((heads, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=capped, data=raw, op0=nl.minimum, operand0=FAR, op1=nl.maximum, operand1=-FAR)
    negated = nl.ndarray((heads, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=negated, data=capped, op0=nl.multiply, operand0=-1.0)
    return negated


def _selector(rows, heads):
    """[rows, rows, heads] bf16, 1 where the first two agree: as stationary operand, slice g picks mask row g."""
    identity = nl.shared_identity_matrix(rows, dtype=nl.bfloat16)
    selector = nl.ndarray((rows, rows, heads), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_copy(dst=selector, src=identity.expand_dim(2).broadcast(2, heads))
    return selector


def _rows(plan, source, q, mask_bias, out, row, count):
    """`count` rows from `row` (a register) on, each with all its keys in one block."""
    heads, tiles = plan.heads, plan.tiles
    k = tiles * CHUNK
    mask = stages.mask_rows(mask_bias, row, count, tiles, source.gathers)
    columns = stages.index_columns(source.idx, row, count, tiles) if source.gathers else None
    # Rows share the partitions of a query tile, which a DMA fills in one piece of 128 descriptors at best.
    pack = min(count, CHUNK // heads)
    # Engines write only at partitions 0, 32, 64, 96, so results share a tile when the heads allow it.
    together = pack if heads % 32 == 0 else 1
    for first in range(0, count, pack):
        members = min(pack, count - first)
        q_t = stages.query_transposed(plan, q, row, first, members)
        for member in range(members):
            g = first + member
            if source.gathers:
                keys = stages.gathered_keys(source.keys, columns, g, tiles)
            else:
                base = source.keys.reshape((plan.rows, k * LATENT))
                keys = stages.contiguous_keys(base, row, g * k * LATENT, tiles)
            scores = stages.masked_scores(plan, q_t[:, :, member * heads : (member + 1) * heads], keys, mask, g, tiles)
            weights, _, decay, total = stages.softmax_block(plan, scores, plan.neg_sink, tiles)
            product = stages.value_product(weights, keys, heads, tiles)
            # The running state starts as (max = sink, sum = 1): after one block the sum is total + decay.
            denominator = nl.ndarray((heads, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_tensor(dst=denominator, data1=total, data2=decay, op=nl.add)
            slot = member % together
            if slot == 0:
                result = nl.ndarray((together * heads, LATENT), dtype=nl.bfloat16, buffer=nl.sbuf)
            stages.normalise(result[slot * heads : (slot + 1) * heads], product, denominator)
            if slot == together - 1 or member == members - 1:
                stages.store(plan, out, result, row, g - slot, slot + 1)


def _streamed_row(plan, source, q, mask_bias, out, row):
    """One row whose keys come in blocks: an online softmax, its state in SBUF."""
    heads, tiles = plan.heads, plan.tiles
    q_t = stages.query_transposed(plan, q, row, 0, 1)
    neg_max = nl.ndarray((heads, 1), dtype=nl.float32, buffer=nl.sbuf)
    total = nl.ndarray((heads, 1), dtype=nl.float32, buffer=nl.sbuf)
    acc = nl.ndarray((heads, LATENT), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=neg_max, src=plan.neg_sink)
    nisa.memset(dst=total, value=1.0)
    nisa.memset(dst=acc, value=0.0)

    def block(tile, count):
        where = position(row, tile, tiles)
        mask = stages.mask_rows(mask_bias.reshape((plan.rows * tiles, CHUNK)), where, 1, count, source.gathers)
        if source.gathers:
            columns = stages.index_columns(source.idx.reshape((plan.rows * tiles, CHUNK)), where, 1, count)
            keys = stages.gathered_keys(source.keys, columns, 0, count)
        else:
            keys = stages.contiguous_keys(source.keys.reshape((plan.rows * tiles, CHUNK * LATENT)), where, 0, count)
        scores = stages.masked_scores(plan, q_t, keys, mask, 0, count)
        weights, new_neg_max, decay, block_total = stages.softmax_block(plan, scores, neg_max, count)
        product = stages.value_product(weights, keys, heads, count)
        nisa.scalar_tensor_tensor(
            dst=total, data=total, op0=nl.multiply, operand0=decay, op1=nl.add, operand1=block_total
        )
        nisa.scalar_tensor_tensor(dst=acc, data=acc, op0=nl.multiply, operand0=decay, op1=nl.add, operand1=product)
        nisa.tensor_copy(dst=neg_max, src=new_neg_max)

    def full(tile):
        block(tile, BLOCK_TILES)

    def rest(tile):
        block(tile, tiles % BLOCK_TILES)

    whole = tiles // BLOCK_TILES * BLOCK_TILES
    nl.fori_loop(0, whole, full, step=BLOCK_TILES)
    if tiles > whole:
        nl.fori_loop(whole, tiles, rest, step=BLOCK_TILES)
    result = nl.ndarray((heads, LATENT), dtype=nl.bfloat16, buffer=nl.sbuf)
    stages.normalise(result, acc, total)
    stages.store(plan, out, result, row, 0, 1)
