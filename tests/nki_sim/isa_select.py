"""VectorE: selections, reductions fused into an elementwise pass, and scans along the free dimension.

tensor_scalar_reduce, select_reduce, range_select and tensor_scalar_cumulative share one accumulator per lane, which
`reduce_cmd` resets, loads or continues. An instruction that may disturb it leaves it undefined here.
"""

import numpy as np

from . import checks, cost, dtypes, ops
from .checks import instruction
from .enums import member, reduce_cmd
from .isa_vector import combine, reduced, scalar_operation
from .machine import current
from .tensor import NkiTensor

_Command = reduce_cmd  # the parameters of that name hide the enumeration
FP32_MIN = float(np.finfo(np.float32).min)
_REDUCTIONS = ("add", "subtract", "multiply", "maximum", "minimum")


def _start(machine, command, operator, lanes, initial=None, allowed=tuple(_Command)):
    """The accumulator's value [P, 1] before this instruction."""
    member(command, _Command, f"{machine.instruction}: reduce_cmd")
    if command not in allowed:
        machine.fail(f"reduce_cmd: {command.name} is not supported here")
    if (initial is not None) != (command is _Command.load_reduce):
        machine.fail("an initial value must be given with reduce_cmd.load_reduce, and only with it")
    if command is _Command.load_reduce:
        value = np.asarray(checks.per_partition(initial, "initial value", lanes), np.float32)
        return np.broadcast_to(value, (lanes, 1))
    if command is _Command.reset_reduce:
        return np.full((lanes, 1), operator.identity, np.float32)
    if machine.vector_accumulator is None:
        machine.fail("reduce_cmd.reduce: the Vector engine's accumulator is undefined; start with reset_reduce")
    return machine.vector_accumulator[:lanes]


def _finish(machine, value, reduce_res, lanes, negate=False):
    machine.vector_accumulator = machine.partitions_of(value)
    if reduce_res is None:
        return
    checks.tensor(reduce_res, "reduce_res")
    if reduce_res.shape[0] != lanes or checks.free_size(reduce_res) != 1:
        machine.fail(f"reduce_res: expected shape ({lanes}, 1), got {reduce_res.shape}")
    reduce_res.write_fp32(-value if negate else value)


def _reduction(machine, value, what, allowed):
    checks.op(value, what, ("arithmetic",))
    if value.name not in allowed:
        machine.fail(f"{what}: {value!r} is not supported, only {', '.join(allowed)}")
    return value


def _maximum_only(machine, value):
    return _reduction(machine, value, "reduce_op", ("maximum",))


_CHAIN = (_Command.reset_reduce, _Command.reduce, _Command.load_reduce)


@instruction
def tensor_scalar_reduce(
    dst,
    data,
    op0,
    operand0,
    reduce_op,
    reduce_res=None,
    reverse0=False,
    reduce_cmd=reduce_cmd.reset_reduce,
    reduce_init=None,
    reduce_res_negate=False,
):
    """dst = data op0 operand0, and the reduction of all its free elements into the accumulator."""
    machine = current()
    checks.tensor(data, "data")
    checks.tensor(dst, "dst")
    checks.same_lanes(("data", data), ("dst", dst))
    checks.op(op0, "op0", ("arithmetic", "unary"))
    _reduction(machine, reduce_op, "reduce_op", ("add", "multiply", "maximum", "minimum"))
    if reverse0 is not False:
        machine.fail("reverse0: not supported yet")
    lanes = data.shape[0]
    start = _start(machine, reduce_cmd, reduce_op, lanes, reduce_init, _CHAIN)
    values = scalar_operation(data.read_fp32(), op0, operand0, "operand0", lanes, False)
    total = reduce_op.compute(start, reduced(reduce_op, values)[:, None])
    dst.write_fp32(values)
    _finish(machine, total, reduce_res, lanes, checks.flag(reduce_res_negate, "reduce_res_negate"))
    cost.vector_engine(machine, dst, data)


@instruction
def tensor_scalar_cumulative(dst, src, op0, op1, imm0, imm1=None, reduce_cmd=reduce_cmd.reset_reduce):
    """dst[i] = reg = (src[i] op0 imm0) op1 reg."""
    machine = current()
    allowed = frozenset(dtypes.NUMPY) - {"int32", "uint32", "bool", "tfloat32"}
    checks.tensor(src, "src", dtype_names=allowed)
    checks.tensor(dst, "dst", dtype_names=allowed)
    checks.same_lanes(("src", src), ("dst", dst))
    checks.op(op0, "op0", ("arithmetic",))
    _reduction(machine, op1, "op1", _REDUCTIONS)
    lanes = src.shape[0]
    start = _start(machine, reduce_cmd, op1, lanes, imm1, _CHAIN)
    values = scalar_operation(src.read_fp32(), op0, imm0, "imm0", lanes, False)
    if op1.name == "subtract":
        result = _scan(start, values, lambda x, reg: x - reg)
    else:
        result = op1.compute.accumulate(np.concatenate([start, values], axis=1), axis=1)[:, 1:]
    dst.write_fp32(result)
    _finish(machine, result[:, -1:], None, lanes)
    cost.vector_engine(machine, dst, src)


def _scan(start, values, step):
    result, reg = np.empty_like(values), start[:, 0]
    for i in range(values.shape[1]):
        reg = result[:, i] = step(values[:, i], reg)
    return result


@instruction
def tensor_tensor_scan(dst, data0, data1, initial, op0, op1, reverse0=False, reverse1=False):
    """dst[i] = (data0[i] op0 dst[i-1]) op1 data1[i], in fp32, from `initial`."""
    machine = current()
    for what, value in (("dst", dst), ("data0", data0), ("data1", data1)):
        checks.tensor(value, what)
    checks.same_lanes(("data0", data0), ("data1", data1), ("dst", dst))
    checks.not_both_psum(("data0", data0), ("data1", data1))
    checks.op(op0, "op0", ("arithmetic",))
    checks.op(op1, "op1", ("arithmetic",))
    lanes = data0.shape[0]
    first = np.asarray(checks.per_partition(initial, "initial", lanes, dtypes.FLOATS), np.float32)
    a, b = data0.read_fp32(), data1.read_fp32()
    result, reg = np.empty_like(a), np.broadcast_to(first, (lanes, 1))[:, 0]
    for i in range(a.shape[1]):
        reg = result[:, i] = combine(op1, combine(op0, a[:, i], reg, reverse0), b[:, i], reverse1)
    dst.write_fp32(result)
    cost.vector_engine(machine, dst, data0, data1)


def _predicate(predicate, allowed, reverse):
    checks.tensor(predicate, "predicate", dtype_names=allowed)
    chosen = predicate.read().reshape(predicate.shape[0], -1) != 0
    return ~chosen if checks.flag(reverse, "reverse_pred") else chosen


@instruction
def tensor_copy_predicated(dst, src, predicate, reverse_pred=False):
    """Where predicate != 0, dst = src; elsewhere dst keeps its value (and stays undefined if it was)."""
    machine = current()
    checks.tensor(dst, "dst")
    chosen = _predicate(predicate, ("uint8", "uint16", "uint32"), reverse_pred)
    checks.same_lanes(("dst", dst), ("predicate", predicate))
    if isinstance(src, NkiTensor):
        checks.tensor(src, "src", dtype_names=(dst.dtype,))
        checks.same_lanes(("dst", dst), ("src", src))
        checks.not_both_psum(("src", src), ("predicate", predicate))
        dst.write(src.read().reshape(dst.shape[0], -1), chosen)
        cost.vector_engine(machine, dst, src, predicate)
    else:
        value = np.float32(checks.per_partition(src, "src", dst.shape[0]))
        dst.write_fp32(np.broadcast_to(value, chosen.shape), chosen)
        cost.vector_engine(machine, dst, predicate)


@instruction
def select_reduce(
    dst,
    predicate,
    on_true,
    on_false,
    reduce_res=None,
    reduce_cmd=reduce_cmd.idle,
    reduce_op=ops.OPS["maximum"],
    reverse_pred=False,
):
    """dst = predicate ? on_true : on_false, and its maximum over the free dimensions."""
    machine = current()
    checks.tensor(dst, "dst")
    checks.tensor(on_true, "on_true", dtype_names=frozenset(dtypes.NUMPY) - {"tfloat32", "int32", "uint32"})
    chosen = _predicate(predicate, ("int8", "uint8", "int16", "uint16"), reverse_pred)
    checks.same_lanes(("on_true", on_true), ("predicate", predicate), ("dst", dst))
    checks.not_both_psum(("on_true", on_true), ("predicate", predicate))
    _maximum_only(machine, reduce_op)
    lanes = dst.shape[0]
    other = np.asarray(checks.per_partition(on_false, "on_false", lanes, dtypes.FLOATS), np.float32)
    values = np.where(chosen, on_true.read_fp32(), other)
    member(reduce_cmd, _Command, "nisa.select_reduce: reduce_cmd")
    if reduce_cmd is _Command.idle:
        if reduce_res is not None:
            machine.fail("reduce_res: nothing is reduced with reduce_cmd.idle")
        machine.vector_accumulator = None  # the documents say idle may disturb it
        dst.write_fp32(values)
    else:
        start = _start(machine, reduce_cmd, reduce_op, lanes, None, (_Command.reset_reduce, _Command.reduce))
        dst.write_fp32(values)
        _finish(machine, np.maximum(start, values.max(axis=1, keepdims=True)), reduce_res, lanes)
    if reduce_res is not None and reduce_res.dtype not in dtypes.FLOATS:
        machine.fail(f"reduce_res: expected a float type, got {reduce_res.dtype}")
    cost.vector_engine(machine, dst, on_true, predicate)


@instruction
def range_select(
    dst,
    on_true_tile,
    comp_op0,
    comp_op1,
    bound0,
    bound1,
    reduce_cmd=reduce_cmd.reset_reduce,
    reduce_res=None,
    reduce_op=ops.OPS["maximum"],
    range_start=0,
    on_false_value=FP32_MIN,
):
    """Keep element i where range_start + i satisfies both comparisons, else FP32_MIN; reduce the maximum."""
    machine = current()
    checks.tensor(dst, "dst")
    checks.tensor(on_true_tile, "on_true_tile", dtype_names=dtypes.FLOATS)
    checks.same_lanes(("on_true_tile", on_true_tile), ("dst", dst))
    _maximum_only(machine, reduce_op)
    lanes, count = dst.shape[0], checks.free_size(dst)
    for what, operator in (("comp_op0", comp_op0), ("comp_op1", comp_op1)):
        if not isinstance(operator, ops.Op) or operator.name not in ops.COMPARISONS:
            machine.fail(f"{what}: expected equal, less, less_equal, greater or greater_equal, got {operator!r}")
    for what, bound in (("bound0", bound0), ("bound1", bound1)):
        if not isinstance(bound, NkiTensor):
            machine.fail(f"{what}: expected an fp32 [P, 1] tile, got {bound!r}")
    if np.float32(on_false_value) != np.float32(FP32_MIN):
        machine.fail(f"on_false_value: the hardware supports only FP32_MIN ({FP32_MIN!r}), got {on_false_value!r}")
    if isinstance(range_start, bool) or not isinstance(range_start, int) or not 0 <= range_start + count <= 2**24:
        machine.fail(f"range_start: {range_start!r} must be a compile-time integer with indices below 2^24")
    index = np.arange(range_start, range_start + count, dtype=np.float32)
    low, high = checks.per_partition(bound0, "bound0", lanes), checks.per_partition(bound1, "bound1", lanes)
    chosen = (comp_op0.compute(index, low) != 0) & (comp_op1.compute(index, high) != 0)
    values = np.where(chosen, on_true_tile.read_fp32(), np.float32(FP32_MIN))
    start = _start(machine, reduce_cmd, reduce_op, lanes, None, (_Command.reset_reduce, _Command.reduce))
    dst.write_fp32(values)
    _finish(machine, np.maximum(start, values.max(axis=1, keepdims=True)), reduce_res, lanes)
    cost.vector_engine(machine, dst, on_true_tile)
