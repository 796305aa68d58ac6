"""The contents of nki.language: tensors, buffers, dtypes, device loops and the operators."""

from functools import partial

import numpy as np

from . import dtypes, isa_dma, isa_vector
from .enums import HBM, PARTITIONS, SBUF, MemoryRegion, TileSize
from .machine import current
from .memory import Storage
from .ops import OPS
from .registers import VirtualRegister
from .tensor import NkiTensor
from .views import DynamicSlice

sbuf, psum = MemoryRegion.sbuf, MemoryRegion.psum
private_hbm, shared_hbm = MemoryRegion.private_hbm, MemoryRegion.shared_hbm
hbm = private_hbm
tile_size = TileSize()


class NKIObject:
    """Base of kernel configuration classes."""

    def __init__(self, **kwargs):
        for key, value in kwargs.items():
            setattr(self, key, value)


def ds(start, size):
    return DynamicSlice(start, size)


def _begin(name):
    machine = current()
    machine.instruction = f"nl.{name}"
    return machine


def ndarray(shape, dtype, buffer=sbuf, name="", address=None):
    """A new tensor without contents: NaN in floats and 4 in integers, and an error for whoever reads it on chip.

    On chip it takes bytes of every partition (whole 2 KiB banks in PSUM) while Python references it.
    """
    machine = _begin("ndarray")
    return _allocate(machine, shape, dtype, buffer, name, address)


def _allocate(machine, shape, dtype, buffer, name, address=None):
    if not isinstance(buffer, MemoryRegion):
        machine.fail(f"buffer: expected nl.sbuf, nl.psum, nl.hbm, nl.shared_hbm or nl.private_hbm, got {buffer!r}")
    shape = tuple(shape)
    if not shape or any(isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1 for n in shape):
        machine.fail(f"shape: expected positive integers, got {shape}")
    dtype = dtypes.name_of(dtype, f"{machine.instruction}: dtype")
    name = name or f"{buffer.value}{list(shape)}"
    if address is not None:
        machine.fail(f"{name}: manual addresses are not modelled; let the allocator place the tile")
    if buffer not in HBM:
        if len(shape) < 2 or len(shape) > 5:
            machine.fail(f"{name}: an on-chip tensor has 2 to 5 dimensions, got {len(shape)}")
        if shape[0] > PARTITIONS:
            machine.fail(f"{name}: {shape[0]} partitions exceed {PARTITIONS} (tile_size.pmax)")
    return NkiTensor(shape, dtype, Storage(machine, shape, dtype, buffer, name))


def _initialised(name, shape, dtype, buffer, tensor_name, value):
    """A tensor filled by a memset (nl.zeros, nl.ones, nl.full)."""
    machine = _begin(name)
    if buffer in HBM:
        machine.fail("buffer: an initialised HBM tensor needs a DMA; fill an sbuf tile and copy it")
    tensor = _allocate(machine, shape, dtype, buffer, tensor_name)
    isa_vector.memset(tensor, int(value) if tensor.dtype in dtypes.INTEGERS else float(value))
    return tensor


def zeros(shape, dtype, buffer=sbuf, name=""):
    return _initialised("zeros", shape, dtype, buffer, name, 0)


def ones(shape, dtype, buffer=sbuf, name=""):
    return _initialised("ones", shape, dtype, buffer, name, 1)


def full(shape, fill_value, dtype, buffer=sbuf, name=""):
    return _initialised("full", shape, dtype, buffer, name, fill_value)


def empty_like(x, dtype=None, buffer=None, name=""):
    return ndarray(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def zeros_like(x, dtype=None, buffer=None, name=""):
    return zeros(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def shared_constant(constant):
    """A numpy array as constant of the program, in shared HBM; the load of the program brings it, not the kernel."""
    machine = _begin("shared_constant")
    array = np.array(constant)
    dtype = dtypes.name_of(array.dtype, "nl.shared_constant: dtype")
    data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    return NkiTensor(array.shape, dtype, Storage(machine, array.shape, dtype, shared_hbm, "constant", data))


def shared_identity_matrix(n, dtype="uint8", dst=None):
    """An identity in SBUF; one copy for each size and dtype of a kernel (its load is not part of the kernel)."""
    machine = _begin("shared_identity_matrix")
    dtype = dtypes.name_of(dtype)
    if n > PARTITIONS:
        machine.fail(f"n: {n} exceeds {PARTITIONS} partitions")
    if dst is not None and dst.shape != (n, n):
        machine.fail(f"dst: shape {dst.shape}, expected ({n}, {n})")
    tensor = dst if dst is not None else machine.identities.get((n, dtype))
    if tensor is None:
        loops, machine.loops = machine.loops, []  # it belongs to the program, not to a trip of a loop
        tensor = machine.identities[n, dtype] = _allocate(machine, (n, n), dtype, SBUF, f"identity{n}")
        machine.loops = loops
    tensor.write(np.eye(n).astype(dtypes.NUMPY[tensor.dtype]))
    return tensor


def _unrolled(start, stop=None, step=1):
    """The three deprecated range forms all mean range(): unrolled when the kernel is specialised."""
    return range(start) if stop is None else range(start, stop, step)


affine_range = sequential_range = static_range = _unrolled


def dynamic_range(*_):
    _begin("dynamic_range").fail("deprecated: write nl.fori_loop(lower, upper, body)")


def _bound(value):
    """A loop bound: an integer, or a register's value now."""
    return value.peek() if isinstance(value, VirtualRegister) else value


def fori_loop(lower, upper, body_fun, step=1):
    """Device loop over a counter that exists at run time only.

    The body is compiled once, so every trip must issue the same instructions on the same static operands, tiles made
    in it die with their trip, and only run-time offsets may depend on the counter. Bounds may be registers.
    """
    machine = _begin("fori_loop")
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        machine.fail(f"step: expected a positive compile-time integer, got {step!r}")
    counters = (VirtualRegister(i, frozen=True) for i in range(_bound(lower), _bound(upper), step))
    _device_loop(machine, "fori_loop", (partial(body_fun, counter) for counter in counters))


def while_loop(init, body_fun):
    """Device loop while the condition register is nonzero; the body returns the next condition."""
    machine = _begin("while_loop")
    state = [init]

    def trip():
        state[0] = body_fun(VirtualRegister(state[0].peek()))
        if not isinstance(state[0], VirtualRegister):
            machine.fail("while_loop: the body must return the next condition register")

    def trips():
        while _bound(state[0]) != 0:
            yield trip

    _device_loop(machine, "while_loop", trips(), returns=True)


def _device_loop(machine, name, trips, returns=False):
    """Run all trips; the first counts as program, and every later one must repeat its instructions."""
    if machine.ordered:
        machine.fail("a device loop cannot sit inside nl.no_reorder()")
    outer_program, outer_script, first_script = machine.program, machine.script, None
    try:
        for number, trip in enumerate(trips):
            machine.loops.append(object())
            machine.program = outer_program and number == 0
            machine.script = []
            result = trip()
            machine.loops.pop()
            if result is not None and not returns:
                machine.fail(f"nl.{name}: the body must return None, got {result!r}")
            if first_script is None:
                first_script = machine.script
            elif not _same_instructions(machine.script, first_script):
                machine.fail(f"nl.{name}: trip {number} issues other instructions than trip 0; the body compiles once")
    finally:
        machine.program, machine.script = outer_program, outer_script
    if outer_script is not None:
        outer_script.append((_LOOP, first_script))


_LOOP = "device loop"  # entry of an enclosing loop's script: the inner body's instructions, None if it had no trip


def _same_instructions(script, other):
    if len(script) != len(other):
        return False
    for mine, theirs in zip(script, other, strict=True):
        if mine[0] == theirs[0] == _LOOP:
            # A run-time bound may be 0 in one trip: nothing is known of the body then.
            known = mine[1] is not None and theirs[1] is not None
            if known and not _same_instructions(mine[1], theirs[1]):
                return False
        elif mine != theirs:
            return False
    return True


class _NoReorder:
    """Program order is the order here anyway; a device loop inside is refused, as by the compiler."""

    def __enter__(self):
        self.machine = current()
        self.machine.ordered += 1

    def __exit__(self, *exc):
        self.machine.ordered -= 1
        return False


def no_reorder():
    return _NoReorder()


def program_id(axis=0):
    _begin("program_id")
    return 0


def num_programs(axes=0):
    _begin("num_programs")
    return 1


# One core is simulated: program 0 of 1.


def program_ndim():
    return 1


def device_print(print_prefix, tensor):
    print(print_prefix, tensor.read())


def load(src, dtype=None):
    """A new SBUF tile with the contents of an HBM tensor (an experimental helper of nl; kernels use dma_copy)."""
    tile = ndarray(src.shape, dtype or src.dtype)
    isa_dma.dma_copy(dst=tile, src=src)
    return tile


def store(dst, value):
    isa_dma.dma_copy(dst=dst, src=value)


def is_hbm(buffer):
    return buffer in HBM


def is_on_chip(buffer):
    return buffer not in HBM


def is_psum(buffer):
    return buffer is psum


def is_sbuf(buffer):
    return buffer is sbuf


globals().update({name if name != "bool" else "bool_": name for name in dtypes.NUMPY})
globals().update(OPS)
max, min = OPS["maximum"], OPS["minimum"]  # the reductions' older names


def __getattr__(name):
    raise AttributeError(f"nl.{name}: not part of this simulator (documented names it lacks: see nki_sim)")
