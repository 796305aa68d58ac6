"""The register instructions of the sequencers."""

import numpy as np

from . import checks, dtypes
from .checks import instruction
from .enums import HBM, SBUF
from .machine import current
from .registers import VirtualRegister


def _register(value, what):
    if not isinstance(value, VirtualRegister):
        current().fail(f"{what}: expected a register of register_alloc, got {value!r}")
    return value


def register_alloc(x=None):
    """A new register, empty or with a constant. Virtual: the 64 physical ones of a sequencer are not counted."""
    machine = current()
    machine.instruction = "nisa.register_alloc"
    if x is not None and (isinstance(x, bool) or not isinstance(x, int)):
        machine.fail(f"x: expected an integer or None, got {x!r}")
    return VirtualRegister(x)


@instruction
def register_move(dst, src):
    """Register from a constant or from another register (the migration guide allows only the latter)."""
    value = src if isinstance(src, int) else _register(src, "src").peek()
    _register(dst, "dst").put(value)


@instruction
def register_load(dst, src):
    """Register from a tensor of one integer in SBUF or HBM."""
    checks.tensor(src, "src", (SBUF, *HBM), ("int32", "uint32", "int16", "uint16", "int8", "uint8"), dma=True)
    if src.size != 1:
        current().fail(f"src: expected one element, got shape {src.shape}")
    _register(dst, "dst").put(src.read().reshape(()))


@instruction
def register_store(dst, src):
    """The register's 32 bits into a tensor of one integer."""
    checks.tensor(dst, "dst", (SBUF, *HBM), ("int32", "uint32"), dma=True)
    if dst.size != 1:
        current().fail(f"dst: expected one element, got shape {dst.shape}")
    word = np.array([_register(src, "src").peek() & 0xFFFFFFFF], np.uint32)
    dst.write(word.view(dtypes.NUMPY[dst.dtype]))
