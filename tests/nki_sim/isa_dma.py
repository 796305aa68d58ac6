"""DMA: copies between HBM and SBUF, gathers and scatters by run-time addresses, and transposes."""

import numpy as np

from . import checks, cost, dtypes
from .checks import instruction
from .enums import HBM, SBUF, dge_mode, engine, member, oob_mode
from .machine import current
from .ops import OPS

_MEMORIES = (SBUF, *HBM)
_Oob, _Dge, _Engine = oob_mode, dge_mode, engine  # parameters of these names hide the enumerations


def _modes(machine, priority, mode, dge):
    member(mode, _Oob, f"{machine.instruction}: oob_mode")
    member(dge, _Dge, f"{machine.instruction}: dge_mode")
    if priority is not None:
        machine.fail("priority: available on trn3 (NeuronCore-v4) only")


def _no_psum(machine, **operands):
    for what, value in operands.items():
        checks.tensor(value, what, _MEMORIES, dynamic=True, dma=True)
    if all(v.is_vector for v in operands.values()):
        machine.fail("src and dst: only one side may use vector_offset")


def _vector_rules(machine, what, view, dge):
    """Rules of gather and scatter: one index per partition, one column of at most 128, software DGE."""
    index = view.dynamic.index
    if index.size != index.shape[0]:
        machine.fail(f"{what}: vector_offset must be one column (P, 1), got {index.shape}; pass one column at a time")
    if view.shape[0] != index.shape[0]:
        machine.fail(f"{what}: {view.shape[0]} rows, but vector_offset has {index.shape[0]} indices")
    if dge not in (_Dge.unknown, _Dge.swdge):
        machine.fail(f"dge_mode.{dge.name}: gather and scatter by vector_offset need swdge")


def gathered(view, mode):
    """Elements of any source view, and a bool per element (None: all) saying which were in bounds."""
    view.check_alive()
    if not view.is_vector:
        if view.located(mode) is None:
            return None, False
        return view.read(), None
    rows, good = view.rows(mode)
    table = view.table()
    safe = rows if good is None else np.where(good, rows, 0)
    defined = table.storage.defined(table, table.offset)
    if defined is not None:
        picked = defined[safe]
        view.require_defined(picked if good is None else picked[good])
    values = table.storage.array(table, table.offset)[safe]
    if good is None:
        return values, None
    return values, np.broadcast_to(good.reshape(-1, *[1] * (values.ndim - 1)), values.shape)


@instruction
def dma_copy(dst, src, priority=None, oob_mode=oob_mode.error, dge_mode=dge_mode.unknown, engine=engine.unknown):
    """dst = src, cast through fp32 if the dtypes differ; skipped (out of bounds) elements keep dst as it was."""
    machine = current()
    _modes(machine, priority, oob_mode, dge_mode)
    _no_psum(machine, src=src, dst=dst)
    member(engine, _Engine, "nisa.dma_copy: engine")
    if engine is not _Engine.unknown and (dge_mode is not _Dge.hwdge or engine not in (_Engine.scalar, _Engine.sync)):
        machine.fail(f"engine.{engine.name}: only scalar or sync, and only with dge_mode.hwdge")
    if dge_mode is _Dge.hwdge and src.dtype != dst.dtype:
        machine.fail(f"dge_mode.hwdge: no cast, but src is {src.dtype} and dst {dst.dtype}")
    for what, value in (("src", src), ("dst", dst)):
        if value.is_vector:
            _vector_rules(machine, what, value, dge_mode)
    if src.size != dst.size:
        machine.fail(f"src and dst: {src.size} and {dst.size} elements ({src.shape} and {dst.shape})")
    values, good = gathered(src, oob_mode)
    if values is not None:
        if src.dtype != dst.dtype:
            values = dtypes.from_fp32(dtypes.to_fp32(values, src.dtype), dst.dtype)
        _scatter(dst, values, good, oob_mode)
    cost.dma(machine, dst, src)


def _scatter(dst, values, good, mode):
    if not dst.is_vector:
        if dst.located(mode) is not None:
            dst.write(values, good)
        return
    dst.check_alive()
    rows, valid = dst.rows(mode)
    values = values.reshape(dst.shape)
    table = dst.table()
    if valid is not None:
        rows, values = rows[valid], values[valid]
    table.storage.array(table, table.offset)[rows] = values
    table.storage.mark(table, table.offset, rows)


_AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


@instruction
def dma_transpose(dst, src, axes=None, priority=None, dge_mode=dge_mode.unknown, oob_mode=oob_mode.error):
    """dst = src permuted: (1, 0), (2, 1, 0) or (3, 1, 2, 0); src may gather rows by a vector_offset."""
    machine = current()
    _modes(machine, priority, oob_mode, dge_mode)
    checks.tensor(dst, "dst", (SBUF,), dma=True)
    checks.tensor(src, "src", _MEMORIES, dynamic=True, dma=True)
    checks.require_same_dtype(("src", src), ("dst", dst))
    if src.ndim not in _AXES or (axes is not None and tuple(axes) != _AXES[src.ndim]):
        machine.fail(f"axes: {axes} of a rank-{src.ndim} source; supported: {list(_AXES.values())}")
    wanted = tuple(src.shape[a] for a in _AXES[src.ndim])
    if dst.shape != wanted:
        machine.fail(f"dst: shape {dst.shape}, expected {wanted}")
    if src.is_vector:
        _gather_transpose_rules(machine, src, dge_mode)
    elif oob_mode is _Oob.skip and not src.is_indirect():
        machine.fail("oob_mode.skip: only with an indirect source")
    else:
        _direct_rules(machine, src, dge_mode)
    values, good = gathered(src, oob_mode)
    if values is not None:
        where = None if good is None else good.transpose(_AXES[src.ndim])
        dst.write(np.ascontiguousarray(values.transpose(_AXES[src.ndim])), where)
    cost.dma(machine, dst, src, efficiency=0.9 if src.buffer in HBM else 0.5)


def _direct_rules(machine, src, dge):
    if dge not in (_Dge.unknown, _Dge.hwdge):
        machine.fail(f"dge_mode.{dge.name}: a direct transpose takes unknown or hwdge")
    if src.shape[-1] > 128:
        machine.fail(f"src: last dimension {src.shape[-1]} exceeds 128")
    if dge is _Dge.unknown:
        return
    if src.itemsize != 2:
        machine.fail(f"src: a hwdge transpose takes 2-byte types, got {src.dtype}")
    first = src.shape[0]
    if src.ndim == 2 and first != 16:
        machine.fail(f"src: a 2-D hwdge transpose needs 16 rows, got {first}")
    if src.ndim > 2 and (first not in (1, 2, 4, 8, 16) or first * src.shape[-2] % 16):
        machine.fail(f"src: hwdge needs shape[0] in 1, 2, 4, 8, 16 with shape[0]*shape[-2] % 16 == 0, got {src.shape}")


def _gather_transpose_rules(machine, src, dge):
    index = src.dynamic.index
    if dge not in (_Dge.unknown, _Dge.swdge):
        machine.fail(f"dge_mode.{dge.name}: a gathering transpose takes unknown or swdge")
    if src.buffer not in HBM or src.itemsize != 2 or src.shape[-1] > 128:
        machine.fail(f"src: needs a 2-byte HBM tensor with a last dimension <= 128, got {src!r}")
    if src.ndim == 4 and 1 not in src.shape[1:3]:
        machine.fail(f"src: dimension 1 or 2 of a 4-D source must be 1, got {src.shape}")
    if src.shape[0] % 16:
        machine.fail(f"src: {src.shape[0]} gathered rows are no multiple of 16")
    if index.dtype != "uint32":
        machine.fail(f"vector_offset: a gathering transpose takes uint32 indices, got {index.dtype}")
    rows, columns = index.shape[0], checks.free_size(index)
    if index.ndim != 2 or rows % 16 or not 16 <= rows <= 128 or (columns > 1 and rows != 128):
        machine.fail(f"vector_offset: expected [16..128 step 16, N] with 128 rows if N > 1, got {index.shape}")


@instruction
def dma_compute(dst, srcs, reduce_op, scales=None, unique_indices=True, oob_mode=oob_mode.error):
    """dst = sum of srcs in fp32; with a vector_offset, dst and one source are the same rows (read-modify-write)."""
    machine = current()
    member(oob_mode, _Oob, "nisa.dma_compute: oob_mode")
    checks.tensor(dst, "dst", _MEMORIES, dynamic=True, dma=True)
    if not 1 <= len(srcs) <= 16:
        machine.fail(f"srcs: {len(srcs)} sources, expected 1 to 16")
    if reduce_op is not OPS["add"] or (scales is not None and any(s != 1.0 for s in scales)):
        machine.fail("reduce_op and scales: only nl.add with scales of 1.0")
    for source in srcs:
        checks.tensor(source, "srcs", _MEMORIES, dynamic=True, dma=True)
        if source.size != dst.size:
            machine.fail(f"srcs: {source.size} elements, but dst has {dst.size}")
    if any(v.is_indirect() and not v.is_vector for v in (dst, *srcs)):
        machine.fail("scalar run-time offsets are not documented for dma_compute")
    vectors = [v for v in (dst, *srcs) if v.is_vector]
    if vectors and (len(srcs) != 2 or unique_indices is not True):
        machine.fail("vector_offset: read-modify-write takes exactly 2 sources and unique_indices=True")
    for value in vectors:
        _vector_rules(machine, "vector_offset", value, _Dge.swdge)
        rows, good = value.rows(oob_mode)
        valid = rows if good is None else rows[good]
        if value is dst and len(np.unique(valid)) != len(valid):
            machine.fail("vector_offset: repeated indices, but unique_indices is True")
    total, keep = np.zeros(dst.shape, np.float32), None
    for source in srcs:
        values, good = gathered(source, oob_mode)
        total = total + dtypes.to_fp32(values, source.dtype).reshape(dst.shape)
        keep = good if good is not None else keep
    _scatter(dst, dtypes.from_fp32(total, dst.dtype), None if dst.is_vector else keep, oob_mode)
    for source in srcs:
        cost.dma(machine, dst, source)
