"""TensorE: nc_matmul and nc_transpose (and the Vector engine's 32 x 32 transpose)."""

import numpy as np

from . import checks, cost, dtypes
from .checks import instruction
from .enums import MOVING_MAX, PARTITIONS, PSUM, PSUM_BANK_BYTES, SBUF, STATIONARY_MAX, engine, matmul_perf_mode, member
from .machine import current

_TENSOR, _VECTOR = engine.tensor, engine.vector  # parameters named `engine` hide the enumeration


def _one_bank(dst):
    """A TensorE write stays inside one 2 KiB bank of PSUM (a tile starts on a bank boundary)."""
    first = dst.offset % dst.free_elements * dst.itemsize
    last = first + sum((n - 1) * s for n, s in zip(dst.shape[1:], dst.strides[1:], strict=True)) * dst.itemsize
    if first // PSUM_BANK_BYTES != (last + dst.itemsize - 1) // PSUM_BANK_BYTES:
        current().fail(f"dst: bytes {first}..{last + dst.itemsize} cross a psum bank of {PSUM_BANK_BYTES} bytes")


def _tiling(machine, tile_position, tile_size, rows, columns, double_row):
    """Row and column tiling: sizes 32, 64 or 128, positions multiples of the size, operands within the tile."""
    if bool(tile_position) != bool(tile_size):
        machine.fail("tile_position and tile_size must both be given")
    position, size = tuple(tile_position) or (0, 0), tuple(tile_size) or (PARTITIONS, PARTITIONS)
    for what, start, extent, used in zip(("row", "column"), position, size, (rows, columns), strict=True):
        if extent not in (32, 64, 128):
            machine.fail(f"tile_size: {what} size {extent} is not 32, 64 or 128")
        if start % extent or start + extent > PARTITIONS:
            machine.fail(f"tile_position: {what} {start} is no multiple of {extent} inside {PARTITIONS}")
        if used > extent:
            machine.fail(f"{what} tile of {extent}: the stationary operand uses {used}")
    if double_row and size[1] != PARTITIONS:
        machine.fail("perf_mode: double_row cannot be combined with column tiling")


def _operands(machine, stationary, moving, double_row):
    """[K, M] and [K, N] fp32; a double-row contraction of 2 x 128 is unfolded to K = 256."""
    arrays = []
    for what, value, limit in (("stationary", stationary, STATIONARY_MAX), ("moving", moving, MOVING_MAX)):
        free = checks.free_size(value)
        if double_row:
            if value.shape[1] != 2 or value.dtype not in dtypes.FP8:
                machine.fail(f"{what}: double_row takes fp8 tiles [K, 2, free], got {value.dtype}{list(value.shape)}")
            free //= 2
        if free > limit:
            name = "gemm_stationary_fmax" if what == "stationary" else "gemm_moving_fmax"
            machine.fail(f"{what}: free size {free} exceeds {limit} ({name})")
        array = value.read_fp32()
        arrays.append(array.reshape(-1, free) if double_row else array)
    if stationary.shape[0] != moving.shape[0]:
        machine.fail(f"contraction: stationary has {stationary.shape[0]} partitions, moving {moving.shape[0]}")
    fp32 = [v.dtype in dtypes.FP32_LIKE for v in (stationary, moving)]
    if fp32[0] != fp32[1]:
        machine.fail(f"dtypes {stationary.dtype} and {moving.dtype}: float32 pairs only with float32 or tfloat32")
    return arrays


# OpenBLAS starts threads above this many multiply-adds; on a busy machine their start-up costs ten times the product.
_SINGLE_THREAD = 262144


def product(a, b):
    """a.T @ b in fp32, by column blocks that BLAS computes in the calling thread."""
    (k, m), n = a.shape, b.shape[1]
    width = min(n, max(1, _SINGLE_THREAD // (k * m)))
    blocks = -(-n // width)
    padded = b if n == blocks * width else np.pad(b, ((0, 0), (0, blocks * width - n)))
    result = np.matmul(a.T, padded.reshape(k, blocks, width).transpose(1, 0, 2))
    return result.transpose(1, 0, 2).reshape(m, blocks * width)[:, :n]


@instruction
def nc_matmul(
    dst,
    stationary,
    moving,
    is_stationary_onezero=False,
    is_moving_onezero=False,
    is_transpose=False,
    accumulate=None,
    tile_position=(),
    tile_size=(),
    perf_mode=matmul_perf_mode.none,
):
    """dst[M, N] (+)= stationary[K, M].T @ moving[K, N], products and sums in fp32.

    K is on the partitions of both operands, M becomes dst's partitions; free dimensions are flattened. Column tiling
    is allowed: the text and a published example have it, although the parameter list says column_size is 128.
    """
    machine = current()
    checks.tensor(stationary, "stationary", (SBUF,), dtypes.MATMUL)
    checks.tensor(moving, "moving", (SBUF,), dtypes.MATMUL)
    checks.tensor(dst, "dst", (PSUM,), (stationary.dtype,) if is_transpose else ("float32",))
    member(perf_mode, matmul_perf_mode, "nisa.nc_matmul: perf_mode")
    double_row = perf_mode is matmul_perf_mode.double_row
    a, b = _operands(machine, stationary, moving, double_row)
    _tiling(machine, tile_position, tile_size, stationary.shape[0], a.shape[1], double_row)
    if (dst.shape[0], checks.free_size(dst)) != (a.shape[1], b.shape[1]):
        machine.fail(f"dst: shape {dst.shape}, but stationary and moving give ({a.shape[1]}, {b.shape[1]})")
    _one_bank(dst)
    if is_transpose:
        if accumulate or double_row or a.shape[0] != b.shape[1] or not (b == np.eye(len(b), dtype=np.float32)).all():
            machine.fail("is_transpose: moving must be the identity, without accumulate and double_row")
        _write_transposed(dst, stationary)
        cost.tensor_engine(machine, b.shape[1], 2 if stationary.dtype in dtypes.FP32_LIKE else 1)
        return
    total = product(a, b).reshape(dst.shape)
    before = _accumulated(machine, dst, accumulate)
    if before is not None:
        started, old = before
        total = np.where(started, old + total, total) if not started.all() else old + total
    dst.write(total)
    dst.storage.set_matmul_marks(dst, dst.offset, True)
    fp32 = stationary.dtype in dtypes.FP32_LIKE
    cost.tensor_engine(machine, b.shape[1], (2 if is_stationary_onezero or is_moving_onezero else 4) if fp32 else 1)
    machine.trace.matmul_flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]


def _accumulated(machine, dst, accumulate):
    """(where to add, previous values) for an accumulating matmul, None for one that overwrites.

    True needs locations a matmul wrote; None overwrites a location at its first write and adds later, which the
    compiler decides once for the program, so it has no meaning for a tile that outlives a trip of a device loop.
    """
    if accumulate is False:
        return None
    if accumulate is not None and accumulate is not True:
        machine.fail(f"accumulate: expected True, False or None, got {accumulate!r}")
    started = dst.storage.matmul_marks(dst, dst.offset)
    if started.all() and accumulate:
        return started, dst.storage.array(dst, dst.offset)
    defined = dst.storage.defined(dst, dst.offset)
    anything = True if defined is None else defined.any()
    if accumulate:
        state = "memset, copies or transposes initialised" if anything else "nothing has written"
        machine.fail(f"accumulate=True on {dst.name}: {state} part of this psum location; start with accumulate=False")
    if not anything:
        return None
    if len(dst.storage.loops) < len(machine.loops):
        machine.fail(f"accumulate=None on {dst.name}, made outside this device loop: pass accumulate explicitly")
    foreign = ~started if defined is None else defined & ~started
    if foreign.any():
        machine.fail(f"accumulate=None on {dst.name}: the location was written by another instruction than a matmul")
    return started, dst.storage.array(dst, dst.offset)


def _write_transposed(dst, data):
    """Bit-exact 2-D transpose of [P, free]."""
    dst.write(np.ascontiguousarray(data.read().reshape(data.shape[0], -1).T))


@instruction
def nc_transpose(dst, data, engine=engine.unknown):
    """dst[F, P] = data[P, F], bit for bit: SBUF to PSUM on TensorE up to 128 x 128, anywhere on VectorE up to 32 x 32.

    Without `engine` the memories decide: VectorE only where TensorE cannot (the documents name shape or buffer).
    """
    machine = current()
    checks.tensor(data, "data")
    checks.tensor(dst, "dst")
    checks.require_same_dtype(("data", data), ("dst", dst))
    rows, columns = data.shape[0], checks.free_size(data)
    if (dst.shape[0], checks.free_size(dst)) != (columns, rows):
        machine.fail(f"dst: shape {dst.shape}, expected ({columns}, {rows})")
    small = rows <= 32 and columns <= 32
    fits_tensor = data.buffer is SBUF and dst.buffer is PSUM
    chosen = checks.pick_engine(engine, (_TENSOR, _VECTOR), _TENSOR if fits_tensor or not small else _VECTOR)
    if chosen is _VECTOR:
        if not small:
            machine.fail(f"data: {rows} x {columns} exceeds the Vector engine's 32 x 32 transpose")
        cost.vector_engine(machine, dst, data)
    else:
        checks.tensor(data, "data", (SBUF,))
        checks.tensor(dst, "dst", (PSUM,))
        if data.dtype in dtypes.FP8:
            machine.fail("data: the documents disagree on fp8 transposes on TensorE; view pairs as bfloat16")
        if columns > STATIONARY_MAX:
            machine.fail(f"data: free size {columns} exceeds {STATIONARY_MAX} of a TensorE transpose")
        _one_bank(dst)
        cost.tensor_engine(machine, rows, 2 if data.itemsize == 4 else 1)
    _write_transposed(dst, data)
