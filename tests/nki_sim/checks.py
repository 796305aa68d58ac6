"""Operand rules shared by the instructions: what an engine may read and write, and how large an access may be."""

import functools
import inspect
import numbers
from enum import Enum

from . import dtypes, layout
from .enums import HBM, ON_CHIP, PARTITIONS, PSUM, SBUF, engine, member
from .machine import current
from .ops import Op
from .tensor import NkiTensor

# Elements one Vector or Scalar instruction may address per partition (16-bit size fields).
FREE_MAX = {SBUF: 65536, PSUM: 4096}


class NkiInstruction:
    """The opaque handle an instruction returns; order is program order here, so edges change nothing."""

    def depends_on(self, *producers):
        if not all(isinstance(p, NkiInstruction) for p in producers):
            current().fail("depends_on: expected instruction handles")
        return self


def instruction(function):
    """Wrap an instruction: refuse unknown keywords, name it in errors, record it for the device loop's comparison."""
    signature = inspect.signature(function)
    names = list(signature.parameters)
    needed = [n for n, p in signature.parameters.items() if p.default is inspect.Parameter.empty]
    public = [*names, "name"]

    @functools.wraps(function)
    def issue(*args, name=None, **kwargs):
        machine = current()
        machine.instruction = f"nisa.{function.__name__}"
        unknown = [k for k in kwargs if k not in names]
        if unknown or len(args) > len(names):
            machine.fail(f"unknown argument {unknown or 'position'}; it takes {', '.join(public)}")
        given = dict(zip(names, args, strict=False))
        if set(given) & set(kwargs):
            machine.fail(f"argument {(set(given) & set(kwargs)).pop()} given twice")
        given.update(kwargs)
        missing = [n for n in needed if n not in given]
        if missing:
            machine.fail(f"missing argument {missing[0]}")
        if machine.script is not None:
            machine.script.append((function.__name__, *(_described(v) for v in given.values())))
        for value in given.values():
            if isinstance(value, NkiTensor):
                value.check_alive()
        function(**given)
        return NkiInstruction()

    issue.__signature__ = signature
    return issue


def _described(value):
    """What must be the same in every trip of a device loop."""
    if isinstance(value, NkiTensor):
        indirect = value.dynamic and (value.dynamic.kind, value.dynamic.stride)
        return value.shape, value.strides, value.offset, value.dtype, value.buffer, indirect
    if isinstance(value, list | tuple):
        return tuple(_described(v) for v in value)
    return value if isinstance(value, numbers.Number | str | Op | Enum) else type(value).__name__


def tensor(value, what, regions=ON_CHIP, dtype_names=None, dynamic=False, dma=False):
    """`value` if it is a tensor in one of `regions` with one of `dtype_names`; static unless `dynamic`.

    DMA reaches any partition and any size; the engines do not.
    """
    machine = current()
    if not isinstance(value, NkiTensor):
        machine.fail(f"{what}: expected a tensor, got {value!r}")
    if value.buffer not in regions:
        wanted = " or ".join(dict.fromkeys("hbm" if r in HBM else r.value for r in regions))
        machine.fail(f"{what}: expected a tensor in {wanted}, got {value!r}")
    if dtype_names is not None and value.dtype not in dtype_names:
        machine.fail(f"{what}: dtype {value.dtype} is not accepted, only {', '.join(sorted(dtype_names))}")
    if value.dynamic is not None and not dynamic:
        machine.fail(f"{what}: run-time addresses are documented for dma_copy, dma_transpose and tensor_copy only")
    if value.on_chip and not dma:
        _partitions(value, what)
    return value


def _partitions(value, what):
    """Engines address partitions in quadrants of 32: more than 64 start at 0, more than 32 at 0 or 64.

    Sizes and strides of an access are 16-bit fields, the strides signed, in elements.
    """
    count, start = value.shape[0], value.start_partition
    step = 128 if count > 64 else 64 if count > 32 else 32
    if start % step:
        allowed = list(range(0, PARTITIONS, step))
        current().fail(f"{what}: {count} partitions may start at partition {allowed}, not at {start}")
    free = FREE_MAX[value.buffer]
    if value.size // count > free:
        current().fail(f"{what}: {value.size // count} elements per partition exceed {free} in {value.buffer.value}")
    if (
        any(stride > 32767 for stride in value.strides[1:])
        and len(layout.merged(value.shape[1:], value.strides[1:])) > 1
    ):
        current().fail(f"{what}: a stride of {max(value.strides[1:])} elements exceeds the 16-bit limit 32767")


def free_size(value):
    """Elements per partition."""
    return value.size // value.shape[0]


def same_lanes(first, *others):
    """All operands have the partitions and the elements per partition of the first; arguments are (name, tensor)."""
    want = (first[1].shape[0], free_size(first[1]))
    for what, value in others:
        got = (value.shape[0], free_size(value))
        if got != want:
            current().fail(f"{what}: {got[0]} partitions x {got[1]} elements, but {first[0]} has {want[0]} x {want[1]}")


def not_both_psum(*operands):
    """VectorE reads one operand of a two-input instruction from PSUM at most."""
    inside = [what for what, value in operands if isinstance(value, NkiTensor) and value.buffer is PSUM]
    if len(inside) > 1:
        current().fail(f"{' and '.join(inside)}: the two inputs cannot both be in psum")


def per_partition(value, what, lanes, dtype_names=frozenset({"float32"})):
    """A scalar operand: a Python number, or one value per partition ([P, 1]) as fp32 [P, 1]."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real | NkiTensor):
        current().fail(f"{what}: expected a number or a [P, 1] tile, got {value!r}")
    if isinstance(value, numbers.Real):
        return value
    tensor(value, what, dtype_names=dtype_names)
    if value.shape[0] != lanes or free_size(value) != 1:
        current().fail(f"{what}: expected shape ({lanes}, 1), got {value.shape}")
    return value.read_fp32()


def op(value, what, kinds):
    """An operator VectorE (or GpSimd) has: square, relu and abs_max are trn3's, division is nobody's."""
    if not isinstance(value, Op):
        current().fail(f"{what}: expected an operator of nki.language, got {value!r}")
    if value.kind not in kinds:
        allowed = " or ".join(kinds)
        current().fail(f"{what}: {value!r} is no {allowed} operator of this instruction on trn2")
    return value


def pick_engine(value, allowed, default):
    """The engine an instruction runs on; `unknown` picks `default`."""
    member(value, engine, f"{current().instruction}: engine")
    if value is engine.unknown:
        return default
    if value not in allowed:
        names = ", ".join(e.name for e in allowed)
        current().fail(f"engine: {value.name} cannot run this instruction, only {names}")
    return value


def gpsimd_needs_sbuf(chosen, *operands):
    """GpSimd has no path to PSUM."""
    for what, value in operands:
        if chosen is engine.gpsimd and isinstance(value, NkiTensor) and value.buffer is PSUM:
            current().fail(f"{what}: GpSimd cannot access psum")


def flag(value, what):
    """Exactly True or False: a truthy tensor or number is a mistake."""
    if not isinstance(value, bool):
        current().fail(f"{what}: expected True or False, got {value!r}")
    return value


def require_same_dtype(first, *others):
    for what, value in others:
        if value.dtype != first[1].dtype:
            current().fail(f"{what}: dtype {value.dtype} differs from {first[0]}'s {first[1].dtype}")


def integer_bits(value, what):
    """A bitvec operand: its elements as unsigned bits of the same width, [P, N]."""
    if value.dtype not in dtypes.INTEGERS:
        current().fail(f"{what}: bitvec operators take integer tiles, got {value.dtype}")
    return value.read().reshape(value.shape[0], -1).view(f"u{value.itemsize}")
