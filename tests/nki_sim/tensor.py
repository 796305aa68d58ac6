"""NkiTensor: shape, strides and offset over a storage. View methods are in views.py, run-time addresses here."""

from math import prod

import numpy as np

from . import dtypes, layout
from .enums import ON_CHIP, oob_mode
from .errors import NkiOutOfBounds
from .machine import current
from .views import Views


class NkiTensor(Views):
    __hash__ = None

    def __init__(self, shape, dtype, storage, strides=None, offset=0, dynamic=None):
        self.shape = tuple(shape)
        self.size = prod(self.shape)
        self.dtype = dtype
        self.storage = storage
        self.strides = layout.row_major(self.shape) if strides is None else tuple(strides)
        self.offset = offset
        self.dynamic = dynamic
        self.itemsize = dtypes.itemsize(dtype)

    buffer = property(lambda self: self.storage.buffer)
    name = property(lambda self: self.storage.name)
    ndim = property(lambda self: len(self.shape))
    on_chip = property(lambda self: self.storage.buffer in ON_CHIP)
    is_vector = property(lambda self: self.dynamic is not None and self.dynamic.kind == "vector")

    def __repr__(self):
        return f"<{self.name} {self.dtype}{list(self.shape)} in {self.buffer.value}>"

    def __eq__(self, other):
        if other is None:  # `x == None` is how kernels test for a missing tensor
            return False
        return self is other

    def __bool__(self):
        current().fail(f"{self.name}: a tensor's value is not known at specialisation: no `if` or `while` on it")

    def __setitem__(self, key, value):
        current().fail(f"{self.name}: assignment to a tensor; write with a nisa instruction instead")

    def covers_storage(self):
        contiguous = layout.is_row_major(self.shape, self.strides)
        return self.dynamic is None and contiguous and self.size * self.itemsize == self.storage.data.size

    @property
    def free_elements(self):
        """Elements of this view's dtype in one partition of the whole on-chip tensor."""
        return self.storage.partition_bytes // self.itemsize

    @property
    def start_partition(self):
        return self.offset // self.free_elements

    def check_alive(self):
        """Tensors made in the body of a device loop die with the trip that made them."""
        machine = current()
        if self.storage.loops != tuple(machine.loops[: len(self.storage.loops)]):
            machine.fail(f"{self.name}: made inside a device loop body, used after that trip ended")

    # ---- access: static and scalar views give a lattice, vector views gather rows --------------------------------

    def located(self, mode=oob_mode.error):
        """Element offset with the scalar index applied, or None if it is out of bounds and `mode` skips."""
        if self.dynamic is None or self.dynamic.kind == "vector":
            return self.offset
        value = int(scalar_value(self.dynamic.index))
        offset = self.offset + value * self.dynamic.stride
        last = offset + layout.span(self.shape, self.strides)
        inside = last * self.itemsize < self.storage.data.size
        if self.on_chip:  # the access must not run over into the next partition
            inside = offset % self.free_elements + layout.span(self.shape[1:], self.strides[1:]) < self.free_elements
        if 0 <= value < self.dynamic.limit and inside:
            return offset
        if mode is oob_mode.skip:
            return None
        raise NkiOutOfBounds(
            f"{current().instruction}: {self.name}: scalar_offset {value} is out of bounds "
            f"(valid below {self.dynamic.limit}; access ends at element {last})"
        )

    def rows(self, mode=oob_mode.error):
        """Row numbers of a vector view and, under skip, which of them are valid (None if all are)."""
        index = self.dynamic.index
        values = index.read().reshape(-1, order="F")[: self.shape[0]].astype(np.int64)
        per_row = layout.span(self.shape[1:], self.strides[1:])
        storage_elements = self.storage.data.size // self.itemsize
        fitting = (storage_elements - 1 - self.offset - per_row) // self.dynamic.stride + 1
        good = (values >= 0) & (values < min(self.dynamic.limit, fitting))
        if good.all():
            return values, None
        if mode is oob_mode.skip:
            return values, good
        first = int(np.argmin(good))
        raise NkiOutOfBounds(
            f"{current().instruction}: {self.name}: vector_offset[{first}] = {values[first]} is out of bounds "
            f"(rows 0..{self.dynamic.limit - 1})"
        )

    def table(self):
        """The whole indexed tensor as a view of rows: [limit, *row shape], static."""
        per_row = layout.span(self.shape[1:], self.strides[1:])
        elements = self.storage.data.size // self.itemsize
        rows = min(self.dynamic.limit, (elements - 1 - self.offset - per_row) // self.dynamic.stride + 1)
        strides = (self.dynamic.stride, *self.strides[1:])
        return NkiTensor((rows, *self.shape[1:]), self.dtype, self.storage, strides, self.offset)

    def read(self):
        """The elements (storage dtype, no copy); an element never written is an error."""
        self.check_alive()
        offset = self.located()
        defined = self.storage.defined(self, offset)
        if defined is not None:
            self.require_defined(defined)
            if self.covers_storage():
                self.storage.written = None  # filled piece by piece, complete now: later reads need no check
        return self.storage.array(self, offset)

    def require_defined(self, defined):
        if defined is None or defined.all():
            return
        first = tuple(int(i) for i in np.argwhere(~defined)[0])
        missing = int(defined.size - np.count_nonzero(defined))
        current().fail(f"{self.name}: reads {missing} undefined elements (never written), the first at {list(first)}")

    def read_fp32(self):
        """[P, N] fp32: the free dimensions flattened."""
        return dtypes.to_fp32(self.read(), self.dtype).reshape(self.shape[0], -1)

    def write(self, values, where=None):
        """Store `values` (already of this dtype, any shape with the same count); `where` limits the write."""
        self.check_alive()
        offset = self.located()
        target = self.storage.array(self, offset)
        values = values.reshape(self.shape)
        if where is None:
            target[...] = values
        else:
            where = where.reshape(self.shape)
            np.copyto(target, values, where=where)
        self.storage.mark(self, offset, where)
        if self.storage.by_matmul is not None:
            self.storage.set_matmul_marks(self, offset, False)

    def write_fp32(self, values, where=None):
        self.write(dtypes.from_fp32(values, self.dtype), where)


def scalar_value(index):
    """The integer in a register or in a 1x1 tile."""
    return index.read().reshape(()) if isinstance(index, NkiTensor) else index.peek()
