"""Storage: the bytes of one tensor, which of them were ever written, and which PSUM locations a matmul wrote.

Views never copy, and one storage can be read under several dtypes, so everything is kept per byte in row-major
order; on chip, row p is partition p. Reading a byte that was never written is an error: on the device it would be
whatever the previous kernel left there.
"""

import numpy as np

from . import dtypes
from .enums import HBM, PSUM

_WORD = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_ONES = {1: 0x01, 2: 0x0101, 4: 0x01010101}  # the mask of one fully written element


class Storage:
    def __init__(self, machine, shape, dtype, buffer, name, data=None):
        self.buffer = buffer
        self.name = name
        self.shape = tuple(shape)
        self.is_argument = data is not None
        self.modified = False  # by the kernel; decides whether an argument is written back to the caller
        self.loops = tuple(machine.loops)
        count = int(np.prod(self.shape, dtype=np.int64))
        if data is None:
            self.data = dtypes.filled(dtype, count)
            self.written = np.zeros(self.data.size, np.uint8)
        else:
            self.data = data
            self.written = None  # None: every byte is defined
        self.partition_bytes = 0
        if buffer not in HBM:
            self.partition_bytes = self.data.size // self.shape[0]
            machine.occupy(self)
        self.by_matmul = np.zeros(self.data.size, np.uint8) if buffer is PSUM else None

    def _lattice(self, source, view, dtype, offset):
        """`view`'s addresses over any per-byte array of this storage; numpy checks that they lie inside."""
        size = view.itemsize
        strides = tuple(s * size for s in view.strides)
        return np.ndarray(view.shape, dtype, buffer=source, offset=offset * size, strides=strides)

    def array(self, view, offset):
        """The elements of `view` as numpy sees them, without a copy. `offset` is in elements."""
        return self._lattice(self.data, view, dtypes.NUMPY[view.dtype], offset)

    def defined(self, view, offset):
        """None if every byte of the storage is defined, else a bool per element of `view`."""
        if self.written is None:
            return None
        return self._lattice(self.written, view, _WORD[view.itemsize], offset) == _ONES[view.itemsize]

    def mark(self, view, offset, where=None):
        """Record the elements of `view` (those with `where`) as written."""
        self.modified = True
        if self.written is None:
            return
        if where is None and view.covers_storage():
            self.written = None
            return
        words = self._lattice(self.written, view, _WORD[view.itemsize], offset)
        if where is None:
            words[...] = _ONES[view.itemsize]
        else:
            words[where] = _ONES[view.itemsize]

    def matmul_marks(self, view, offset):
        """A bool per element of PSUM: whether all its bytes were last written by an accumulating matmul."""
        words = self._lattice(self.by_matmul, view, _WORD[view.itemsize], offset)
        return words == _ONES[view.itemsize]

    def set_matmul_marks(self, view, offset, by_matmul):
        """Any other instruction that writes a location ends its accumulation."""
        words = self._lattice(self.by_matmul, view, _WORD[view.itemsize], offset)
        words[...] = _ONES[view.itemsize] if by_matmul else 0
