"""GpSimd: affine patterns, per-partition gathers, reductions across partitions."""

from math import prod

import numpy as np

from . import checks, cost, dtypes, ops
from .checks import instruction
from .enums import SBUF
from .machine import current


def affine(dst, pattern, offset, channel_multiplier):
    """int32 [P, N]: offset + partition * channel_multiplier + the pattern's steps."""
    machine = current()
    if not 1 <= len(pattern) <= 4 or any(len(entry) != 2 for entry in pattern):
        machine.fail(f"pattern: expected 1 to 4 entries [step, count], got {pattern}")
    count = prod(n for _, n in pattern)
    if count != checks.free_size(dst):
        machine.fail(f"pattern: {count} elements, but dst has {checks.free_size(dst)} per partition")
    values = np.array([offset], np.int64)
    for step, n in pattern:
        values = (values[:, None] + step * np.arange(n, dtype=np.int64)).reshape(-1)
    lanes = channel_multiplier * np.arange(dst.shape[0], dtype=np.int64)[:, None]
    return (lanes + values).astype(np.int32)


@instruction
def iota(dst, pattern, offset=0, channel_multiplier=0):
    """dst = the affine int32 values, cast to dst's type."""
    machine = current()
    checks.tensor(dst, "dst", (SBUF,))
    values = affine(dst, pattern, offset, channel_multiplier)
    if dst.itemsize == 4 and dst.dtype in dtypes.INTEGERS:
        dst.write(values.view(dtypes.NUMPY[dst.dtype]))
    else:
        dst.write_fp32(values.astype(np.float32))
    cost.gpsimd_engine(machine, dst)


@instruction
def affine_select(dst, pattern, channel_multiplier, on_true_tile, on_false_value, cmp_op=ops.OPS["equal"], offset=0):
    """dst = on_true_tile where the affine value compares true with 0, else on_false_value."""
    machine = current()
    checks.tensor(dst, "dst", (SBUF,))
    checks.tensor(on_true_tile, "on_true_tile", (SBUF,))
    checks.same_lanes(("dst", dst), ("on_true_tile", on_true_tile))
    if not isinstance(cmp_op, ops.Op) or cmp_op.name not in ops.COMPARISONS | {"not_equal"}:
        machine.fail(f"cmp_op: expected a comparison, got {cmp_op!r}")
    if isinstance(on_false_value, bool) or not isinstance(on_false_value, int | float):
        machine.fail(f"on_false_value: expected an fp32 constant, got {on_false_value!r}")
    chosen = cmp_op.compute(affine(dst, pattern, offset, channel_multiplier), 0) != 0
    kept = on_true_tile.read().reshape(dst.shape[0], -1)
    if on_true_tile.dtype != dst.dtype:
        kept = dtypes.from_fp32(on_true_tile.read_fp32(), dst.dtype)
    other = dtypes.from_fp32(np.float32([on_false_value]), dst.dtype)
    dst.write(np.where(chosen, kept, other))
    cost.gpsimd_engine(machine, dst, on_true_tile)


@instruction
def nc_n_gather(dst, data, indices):
    """Per partition, dst[i] = data.flat[indices[i]]: the gather that needs no DMA, within a partition only."""
    machine = current()
    checks.tensor(data, "data", (SBUF,))
    checks.tensor(indices, "indices", (SBUF,), ("uint32",))
    checks.tensor(dst, "dst", (SBUF,), (data.dtype,))
    checks.same_lanes(("indices", indices), ("dst", dst))
    if data.shape[0] != dst.shape[0]:
        machine.fail(f"data: {data.shape[0]} partitions, dst {dst.shape[0]}")
    index = indices.read().reshape(dst.shape[0], -1).astype(np.int64)
    count = checks.free_size(data)
    if index.max() >= count:
        machine.fail(f"indices: {index.max()} is out of bounds, data has {count} elements per partition")
    dst.write(np.take_along_axis(data.read().reshape(data.shape[0], -1), index, axis=1))
    cost.gpsimd_engine(machine, dst, data)


@instruction
def tensor_partition_reduce(dst, op, data):
    """Reduce over partitions: dst[0, ...] = op over p of data[p, ...]."""
    machine = current()
    checks.tensor(data, "data", (SBUF,))
    checks.tensor(dst, "dst", (SBUF,))
    legal = ("add", "maximum", "bitwise_or", "bitwise_and", "average")
    if not isinstance(op, ops.Op) or op.name not in legal:
        machine.fail(f"op: expected one of {', '.join(legal)}, got {op!r}")
    if dst.shape[0] != 1 or checks.free_size(dst) != checks.free_size(data):
        machine.fail(f"dst: shape {dst.shape}, expected one partition of {checks.free_size(data)} elements")
    if op.kind == "bitvec":
        bits = op.compute.reduce(checks.integer_bits(data, "data"), axis=0)
        dst.write(bits.view(dtypes.NUMPY[dst.dtype]))
    else:
        values = data.read_fp32()
        dst.write_fp32(values.mean(axis=0) if op.name == "average" else op.compute.reduce(values, axis=0))
    cost.gpsimd_engine(machine, dst, data)
