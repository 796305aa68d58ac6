"""VectorE: the eight largest values, where they are, and data movement between partitions of a quadrant."""

import numpy as np

from . import checks, cost, dtypes
from .checks import instruction
from .machine import current

QUADRANT = 32
KEEP = 255  # shuffle mask entry: leave the destination partition as it is


def _searched(machine, value, what):
    """fp32 [P, N] of a tile with 8 to 16384 elements per partition and at most two free dimensions."""
    checks.tensor(value, what)
    count = checks.free_size(value)
    if value.ndim > 3 or not 8 <= count <= 16384:
        machine.fail(f"{what}: {count} elements per partition of rank {value.ndim}; 8 to 16384, rank at most 3")
    return value.read_fp32()


def _eight(machine, value, what, lanes):
    if value.shape[0] != lanes or checks.free_size(value) != 8:
        machine.fail(f"{what}: expected {lanes} partitions of 8 elements, got {value.shape}")


@instruction
def max8(dst, src):
    """The 8 largest of each partition in descending order."""
    machine = current()
    values = _searched(machine, src, "src")
    checks.tensor(dst, "dst")
    _eight(machine, dst, "dst", src.shape[0])
    dst.write_fp32(np.sort(values, axis=1)[:, :-9:-1])
    cost.vector_engine(machine, dst, src)


def _write_positions(dst, found, position):
    """Positions as uint16 or uint32, all ones where nothing matched."""
    kind = dtypes.NUMPY[dst.dtype].type
    dst.write(np.where(found, position, np.iinfo(kind).max).astype(kind))


@instruction
def nc_find_index8(dst, data, vals):
    """First positions of 8 values; equal values are paired with their positions in ascending order."""
    machine = current()
    values = _searched(machine, data, "data")
    checks.tensor(vals, "vals")
    checks.tensor(dst, "dst", dtype_names=("uint16", "uint32"))
    for what, operand in (("vals", vals), ("dst", dst)):
        _eight(machine, operand, what, data.shape[0])
    wanted = vals.read_fp32()
    found, position = np.zeros(wanted.shape, bool), np.zeros(wanted.shape, np.int64)
    for j in range(8):
        earlier = (wanted[:, :j] == wanted[:, j : j + 1]).sum(axis=1, keepdims=True)
        equal = values == wanted[:, j : j + 1]
        hit = equal & (np.cumsum(equal, axis=1) == earlier + 1)
        found[:, j], position[:, j] = hit.any(axis=1), hit.argmax(axis=1)
    _write_positions(dst, found, position)
    cost.vector_engine(machine, dst, data)


@instruction
def nc_match_replace8(dst, data, vals, imm, dst_idx=None):
    """Replace the first occurrence of each of 8 values, from the last value to the first, by `imm`."""
    machine = current()
    values = _searched(machine, data, "data").copy()
    checks.tensor(vals, "vals")
    checks.tensor(dst, "dst")
    checks.same_lanes(("data", data), ("dst", dst))
    _eight(machine, vals, "vals", data.shape[0])
    if isinstance(imm, bool) or not isinstance(imm, int | float | np.floating):
        machine.fail(f"imm: expected a float constant, got {imm!r}")
    wanted = vals.read_fp32()
    open_ = np.ones(values.shape, bool)
    found, position = np.zeros(wanted.shape, bool), np.zeros(wanted.shape, np.int64)
    lanes = np.arange(len(values))
    for j in range(7, -1, -1):
        hit = (values == wanted[:, j : j + 1]) & open_
        found[:, j], position[:, j] = hit.any(axis=1), hit.argmax(axis=1)
        open_[lanes[found[:, j]], position[found[:, j], j]] = False
    values[~open_] = imm
    dst.write_fp32(values)
    if dst_idx is not None:
        checks.tensor(dst_idx, "dst_idx", dtype_names=("uint16", "uint32"))
        _eight(machine, dst_idx, "dst_idx", data.shape[0])
        _write_positions(dst_idx, found, position)
    cost.vector_engine(machine, dst, data)


@instruction
def nc_stream_shuffle(dst, src, shuffle_mask):
    """In every quadrant of 32 partitions, dst[i] = src[shuffle_mask[i]]; 255 leaves dst[i]."""
    machine = current()
    checks.tensor(src, "src")
    checks.tensor(dst, "dst")
    checks.require_same_dtype(("src", src), ("dst", dst))
    if checks.free_size(src) != checks.free_size(dst):
        machine.fail(f"dst: {checks.free_size(dst)} elements per partition, src has {checks.free_size(src)}")
    mask = list(shuffle_mask)
    if len(mask) != QUADRANT or any(m != KEEP and not 0 <= m < QUADRANT for m in mask):
        machine.fail(f"shuffle_mask: expected 32 entries 0..31 or {KEEP}, got {mask}")
    active = -(-max(src.shape[0], dst.shape[0]) // QUADRANT) * QUADRANT
    step = 128 if active > 64 else active
    for what, value in (("src", src), ("dst", dst)):
        if value.start_partition % step:
            machine.fail(f"{what}: with {active} active partitions the start must be a multiple of {step}")
    rows = np.arange(dst.shape[0])
    entry = np.array(mask)[rows % QUADRANT]
    source = rows // QUADRANT * QUADRANT + entry
    moved = entry != KEEP
    if (source[moved] >= src.shape[0]).any():
        machine.fail(f"shuffle_mask: reads partition {source[moved].max()}, but src has {src.shape[0]}")
    values = src.read().reshape(src.shape[0], -1)[np.where(moved, source, 0)]
    dst.write(values, np.broadcast_to(moved[:, None], values.shape))
    cost.vector_engine(machine, dst, src)
