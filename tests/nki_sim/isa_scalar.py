"""ScalarE: activation with its fused scale, bias and row sum."""

import numpy as np

from . import checks, cost, dtypes, ops
from .checks import instruction
from .enums import member, reduce_cmd
from .machine import current

_Command = reduce_cmd  # the parameters of that name hide the enumeration
BIAS_DTYPES = frozenset(dtypes.NUMPY) - {"tfloat32"}


def _in_range(machine, op, x):
    """The Scalar engine's tables give invalid results outside their range: refuse it (NaN passes)."""
    if op.valid is None:
        return
    low, high = op.valid
    magnitude = np.abs(x)
    signed = op.name in ("reciprocal", "sin", "arctan")
    bad = (magnitude < low) | (magnitude > high) | ((x < 0) & (not signed))
    if bad.any():
        machine.fail(f"{op!r}: input {x[bad][0]} is outside the valid range [{low:g}, {high:g}]")


def activated(machine, op, data, bias, scale):
    """op(data * scale + bias) as fp32 [P, N]."""
    if not isinstance(op, ops.Op) or op.activation is None:
        machine.fail(f"op: {op!r} is no activation function")
    lanes = data.shape[0]
    x = data.read_fp32()
    scale = checks.per_partition(scale, "scale", lanes)
    if not (isinstance(scale, int | float) and scale == 1):
        x = x * np.float32(scale)
    if bias is not None:
        x = x + np.float32(checks.per_partition(bias, "bias", lanes, BIAS_DTYPES))
    _in_range(machine, op, x)
    return op.activation(x).astype(np.float32, copy=False)


@instruction
def activation(dst, op, data, bias=None, scale=1.0, reduce_op=None, reduce_res=None, reduce_cmd=reduce_cmd.idle):
    """dst = op(data * scale + bias); the registers take the row sums of the fp32 values, before the cast to dst.

    No document says which values are summed; the fp32 ones are in the datapath. The pseudo-code given for the
    registers would count a row twice; the prose around it, followed here, counts it once. scale and bias are constants
    or one value per partition: ScalarE has no operand per column.
    """
    machine = current()
    checks.tensor(data, "data")
    checks.tensor(dst, "dst")
    checks.same_lanes(("data", data), ("dst", dst))
    member(reduce_cmd, _Command, "nisa.activation: reduce_cmd")
    if reduce_cmd is _Command.load_reduce:
        machine.fail("reduce_cmd: load_reduce is not available on the Scalar engine")
    reduces = reduce_cmd in (_Command.reduce, _Command.reset_reduce)
    if reduce_op is not None and reduce_op is not ops.OPS["add"]:
        machine.fail(f"reduce_op: only nl.add, got {reduce_op!r}")
    if reduces and reduce_op is None:
        machine.fail(f"reduce_op: nl.add must be given with reduce_cmd.{reduce_cmd.name}")
    values = activated(machine, op, data, bias, scale)
    if reduce_cmd in (_Command.reset, _Command.reset_reduce):
        machine.scalar_sums = np.zeros((128, 1), np.float32)
    if reduces:
        if machine.scalar_sums is None:
            machine.fail("reduce_cmd.reduce: the reduce registers were never reset in this kernel")
        machine.scalar_sums[: len(values)] += values.sum(axis=1, keepdims=True, dtype=np.float32)
    dst.write_fp32(values)
    if reduce_res is not None:
        _read_out(machine, reduce_res, data)
    cost.scalar_engine(machine, dst, data, read_out=reduce_res is not None)


def _read_out(machine, reduce_res, data):
    checks.tensor(reduce_res, "reduce_res")
    if (reduce_res.shape[0], checks.free_size(reduce_res)) != (data.shape[0], 1):
        machine.fail(f"reduce_res: expected shape ({data.shape[0]}, 1), got {reduce_res.shape}")
    if machine.scalar_sums is None:
        machine.fail("reduce_res: the reduce registers were never reset in this kernel")
    reduce_res.write_fp32(machine.scalar_sums[: data.shape[0]])


@instruction
def activation_reduce(dst, op, data, reduce_op, reduce_res, bias=None, scale=1.0):
    """The older form: activation that resets the registers, sums the row and reads the sum out."""
    machine = current()
    checks.tensor(data, "data")
    checks.tensor(dst, "dst")
    checks.same_lanes(("data", data), ("dst", dst))
    if reduce_op is not ops.OPS["add"]:
        machine.fail(f"reduce_op: only nl.add, got {reduce_op!r}")
    values = activated(machine, op, data, bias, scale)
    machine.scalar_sums = machine.partitions_of(values.sum(axis=1, keepdims=True, dtype=np.float32))
    dst.write_fp32(values)
    if reduce_res is not None:
        _read_out(machine, reduce_res, data)
    cost.scalar_engine(machine, dst, data, read_out=reduce_res is not None)
