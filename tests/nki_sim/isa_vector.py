"""VectorE: elementwise instructions, reductions and copies (some of them also run on GpSimd or ScalarE)."""

import numpy as np

from . import checks, cost, dtypes, ops
from .checks import instruction
from .enums import PSUM, engine
from .machine import current
from .tensor import NkiTensor

_Engine = engine  # parameters named `engine` hide the enumeration
_BINARY = ("arithmetic", "bitvec")
_WORDS = ("int32", "uint32")


def combine(operator, a, b, reverse=False):
    """a <op> b in fp32; `reverse` swaps the inputs."""
    return operator.compute(b, a) if reverse else operator.compute(a, b)


def bit_combine(operator, a, b, reverse=False):
    """a <op> b on unsigned words of one width; shifts are logical."""
    a, b = (b, a) if reverse else (a, b)
    if operator.name.endswith("shift"):
        a, b = np.broadcast_arrays(a, b)
        return ops.shifted(operator, a, b)
    return operator.compute(a, b)


def write_bits(dst, bits):
    """Store words without a cast. A width change is documented nowhere, so it is refused."""
    if dst.dtype not in dtypes.INTEGERS or dst.itemsize != bits.dtype.itemsize:
        current().fail(f"dst: bitvec operators write integers of the input's width, got {dst.dtype}")
    dst.write(bits.view(dtypes.NUMPY[dst.dtype]))


@instruction
def tensor_tensor(dst, data1, data2, op, engine=engine.unknown):
    """dst = data1 op data2, elementwise; shapes may differ in the split of the free dimensions.

    Floats: fp32 on VectorE. int32 and uint32 only: exact on GpSimd by default, unless an operand is in PSUM, where
    VectorE takes over and is inexact above 2^24. Broadcasting needs an explicit view of stride 0.
    """
    machine = current()
    for what, value in (("dst", dst), ("data1", data1), ("data2", data2)):
        checks.tensor(value, what)
    checks.same_lanes(("data1", data1), ("data2", data2), ("dst", dst))
    checks.not_both_psum(("data1", data1), ("data2", data2))
    checks.op(op, "op", _BINARY)
    operands = (dst, data1, data2)
    exact = all(t.dtype in _WORDS for t in operands) and op.kind == "arithmetic"
    in_psum = any(t.buffer is PSUM for t in operands)
    power = op.name == "power"
    default = _Engine.gpsimd if power or (exact and not in_psum) else _Engine.vector
    chosen = checks.pick_engine(engine, (_Engine.vector, _Engine.gpsimd), default)
    checks.gpsimd_needs_sbuf(chosen, ("dst", dst), ("data1", data1), ("data2", data2))
    if op.kind == "bitvec":
        if chosen is _Engine.gpsimd:
            machine.fail("engine: bitvec operators run on the Vector engine")
        if data1.itemsize != data2.itemsize:
            machine.fail(f"data2: bitvec inputs have one width, got {data1.dtype} and {data2.dtype}")
        a, b = checks.integer_bits(data1, "data1"), checks.integer_bits(data2, "data2")
        write_bits(dst, bit_combine(op, a, b))
    elif exact and chosen is _Engine.gpsimd:
        _exact(dst, data1, data2, op)
    else:
        if power and chosen is not _Engine.gpsimd:
            machine.fail("op: nl.power runs on GpSimd")
        dst.write_fp32(combine(op, data1.read_fp32(), data2.read_fp32()))
    if chosen is _Engine.gpsimd:
        cost.gpsimd_engine(machine, *operands)
    else:
        cost.vector_engine(machine, *operands)


def _exact(dst, data1, data2, op):
    """Native 32-bit integer arithmetic of GpSimd: exact, and wrapping where 32 bits overflow."""
    a, b = (t.read().reshape(t.shape[0], -1).astype(np.int64) for t in (data1, data2))
    result = op.compute(a, b).astype(np.int64)
    dst.write((result & 0xFFFFFFFF).astype(np.uint32).view(dtypes.NUMPY[dst.dtype]))


def _bit_operand(value, what, data):
    """A bitvec scalar operand: an integer constant, or an integer [P, 1] tile of the data's width."""
    if isinstance(value, NkiTensor):
        checks.tensor(value, what)
        if value.shape[0] != data.shape[0] or checks.free_size(value) != 1 or value.itemsize != data.itemsize:
            current().fail(f"{what}: expected an integer ({data.shape[0]}, 1) tile of {data.itemsize} bytes")
        return checks.integer_bits(value, what)
    if isinstance(value, bool) or not isinstance(value, int):
        current().fail(f"{what}: bitvec operators take integer constants, got {value!r}")
    return np.array(value & (256**data.itemsize - 1), f"u{data.itemsize}")


def scalar_operation(data_values, operator, operand, what, lanes, reverse):
    """data <op> operand in fp32, where operand is a number or a [P, 1] tile (None or 0 for unary operators)."""
    if operator.kind in ("unary", "bypass"):
        if isinstance(operand, NkiTensor) or operand not in (None, 0, 0.0):
            current().fail(f"{what}: {operator!r} is unary, its operand must be None or 0")
        return operator.compute(data_values) if operator.kind == "unary" else data_values
    value = np.asarray(checks.per_partition(operand, what, lanes), np.float32)
    return combine(operator, data_values, value, reverse)


@instruction
def tensor_scalar(
    dst, data, op0, operand0, reverse0=False, op1=None, operand1=None, reverse1=False, engine=engine.unknown
):
    """dst = (data op0 operand0) op1 operand1, operands constants or one value per partition.

    Arithmetic is fp32, and tile operands must be fp32. Bitvec operators move words; their 32-bit constants are taken
    exactly (no document says whether the hardware does, above 2^24). Two operators cost the same as one.
    """
    machine = current()
    checks.tensor(data, "data")
    checks.tensor(dst, "dst")
    checks.same_lanes(("data", data), ("dst", dst))
    kinds = (*_BINARY, "unary", "bypass")
    steps = [(checks.op(op0, "op0", kinds), operand0, checks.flag(reverse0, "reverse0"), "operand0")]
    if op1 is not None:
        steps.append((checks.op(op1, "op1", kinds), operand1, checks.flag(reverse1, "reverse1"), "operand1"))
    elif operand1 is not None:
        machine.fail("operand1: given without op1")
    bitvec = {s[0].kind == "bitvec" for s in steps}
    if len(bitvec) == 2:
        machine.fail(f"op0 and op1: {op0!r} and {op1!r} mix bitvec and arithmetic operators")
    rsqrt = any(s[0].name == "rsqrt" for s in steps)
    allowed = (_Engine.vector, _Engine.scalar, *([_Engine.gpsimd] if rsqrt else []))
    chosen = checks.pick_engine(engine, allowed, _Engine.gpsimd if rsqrt else _Engine.vector)
    checks.gpsimd_needs_sbuf(chosen, ("dst", dst), ("data", data))
    names = tuple(s[0].name for s in steps)
    if chosen is _Engine.scalar and names not in (("multiply", "add"), ("multiply",), ("add",)):
        machine.fail(f"engine: scalar on trn2 supports only multiply+add, multiply or add, got {'+'.join(names)}")
    if bitvec == {True}:
        values = checks.integer_bits(data, "data")
        for operator, operand, reverse, what in steps:
            other = None if operator.name == "invert" else _bit_operand(operand, what, data)
            values = bit_combine(operator, values, other, reverse)
        write_bits(dst, values)
    else:
        values = data.read_fp32()
        for operator, operand, reverse, what in steps:
            values = scalar_operation(values, operator, operand, what, data.shape[0], reverse)
        dst.write_fp32(values)
    if chosen is _Engine.vector:
        cost.vector_engine(machine, dst, data, fast=True)
    elif chosen is _Engine.scalar:
        cost.scalar_engine(machine, dst, data)
    else:
        cost.gpsimd_engine(machine, dst, data)


@instruction
def scalar_tensor_tensor(dst, data, op0, operand0, op1, operand1, reverse0=False, reverse1=False):
    """dst = (data op0 operand0) op1 operand1 in fp32: operand0 one value per partition, operand1 a tile like data."""
    machine = current()
    for what, value in (("dst", dst), ("data", data), ("operand1", operand1)):
        checks.tensor(value, what)
    checks.same_lanes(("data", data), ("operand1", operand1), ("dst", dst))
    checks.not_both_psum(("data", data), ("operand1", operand1))
    checks.op(op0, "op0", ("arithmetic", "unary"))
    checks.op(op1, "op1", ("arithmetic",))
    values = scalar_operation(data.read_fp32(), op0, operand0, "operand0", data.shape[0], reverse0)
    dst.write_fp32(combine(op1, values, operand1.read_fp32(), reverse1))
    cost.vector_engine(machine, dst, data, operand1)


@instruction
def tensor_reduce(dst, op, data, axis, negate=False, keepdims=False):
    """Reduce the last free dimensions in fp32 (bitvec: on words); `negate` multiplies the result by -1.

    Axes are those of `data`, 0 being the partition, which no VectorE instruction reduces.
    """
    machine = current()
    checks.tensor(data, "data")
    checks.tensor(dst, "dst")
    checks.op(op, "op", _BINARY)
    if op.identity is None:
        machine.fail(f"op: {op!r} is no legal reduction operator")
    axes = sorted({a % data.ndim for a in ((axis,) if isinstance(axis, int) else axis)})
    if not axes or axes[0] == 0 or axes != list(range(axes[0], data.ndim)):
        machine.fail(f"axis: {axis} must be the last free dimensions, never the partition (0), of rank {data.ndim}")
    kept = (*data.shape[: axes[0]], *([1] * len(axes) if keepdims else []))
    if dst.shape[0] != data.shape[0] or dst.size * int(np.prod(data.shape[axes[0] :])) != data.size:
        machine.fail(f"dst: shape {dst.shape}, expected {kept} for axis {axis} of {data.shape}")
    rows = (data.size // int(np.prod(data.shape[axes[0] :])), -1)
    if op.kind == "bitvec":
        if negate:
            machine.fail("negate: only for arithmetic operators")
        bits = checks.integer_bits(data, "data").reshape(rows)
        write_bits(dst, op.compute.reduce(bits, axis=1))
    else:
        dst.write_fp32(reduced(op, data.read_fp32().reshape(rows)) * np.float32(-1 if negate else 1))
    cost.vector_engine(machine, dst, data)


def reduced(operator, values):
    """Reduce the last axis of fp32 [rows, N]; comparison-like operators are 0/1 (logical)."""
    if operator.name.startswith("logical"):
        function = {"logical_and": np.logical_and, "logical_or": np.logical_or, "logical_xor": np.logical_xor}
        return function[operator.name].reduce(values != 0, axis=1).astype(np.float32)
    return operator.compute.reduce(values, axis=1)


@instruction
def tensor_copy(dst, src, engine=engine.unknown):
    """dst = src within SBUF and PSUM: bit-exact between equal dtypes (on all three engines), through fp32 otherwise."""
    machine = current()
    checks.tensor(src, "src", dynamic=True)
    checks.tensor(dst, "dst", dynamic=True)
    checks.same_lanes(("src", src), ("dst", dst))
    allowed = (_Engine.vector, _Engine.scalar, _Engine.gpsimd)
    chosen = checks.pick_engine(engine, allowed, _Engine.vector)
    checks.gpsimd_needs_sbuf(chosen, ("dst", dst), ("src", src))
    if dst.dtype == src.dtype:
        dst.write(src.read())  # numpy's assignment allows for overlap
    else:
        dst.write_fp32(src.read_fp32())
    if chosen is _Engine.vector:
        cost.vector_engine(machine, dst, src, fast=True)
    elif chosen is _Engine.scalar:
        cost.scalar_engine(machine, dst, src)
    else:
        cost.gpsimd_engine(machine, dst, src)


@instruction
def memset(dst, value, engine=engine.unknown):
    """Fill with a constant, whose Python type must match: an int for integers, a float (or 0) for floats."""
    machine = current()
    checks.tensor(dst, "dst")
    chosen = checks.pick_engine(engine, (_Engine.vector, _Engine.gpsimd), _Engine.vector)
    checks.gpsimd_needs_sbuf(chosen, ("dst", dst))
    integer = dst.dtype in dtypes.INTEGERS
    if isinstance(value, bool) or not isinstance(value, int if integer else (int, float)):
        machine.fail(f"value: {value!r} must be {'an int' if integer else 'a number'} for {dst.dtype}")
    if not integer and isinstance(value, int) and value != 0:
        machine.fail(f"value: {value!r} is an int, but {dst.dtype} takes a float")
    if integer:
        limits = np.iinfo(dtypes.NUMPY[dst.dtype])
        if not limits.min <= value <= limits.max:
            machine.fail(f"value: {value} does not fit {dst.dtype}")
        dst.write(np.full(dst.shape, value, dtypes.NUMPY[dst.dtype]))
    else:
        dst.write_fp32(np.full(dst.shape, value, np.float32))
    if chosen is _Engine.vector:
        cost.vector_engine(machine, dst, fast=True)
    else:
        cost.gpsimd_engine(machine, dst)


@instruction
def reciprocal(dst, data):
    """1 / data in fp32; 8 cycles per element, but without the narrow range of ScalarE's table."""
    machine = current()
    checks.tensor(data, "data")
    checks.tensor(dst, "dst")
    checks.same_lanes(("data", data), ("dst", dst))
    dst.write_fp32(np.float32(1) / data.read_fp32())
    cost.vector_engine(machine, dst, data, factor=cost.RECIPROCAL_FACTOR)
