"""Views with addresses known only at run time: select, vector_select and the access pattern `.ap`."""

from math import prod

from . import dtypes, layout
from .enums import HBM, SBUF
from .registers import VirtualRegister


class Dynamic:
    """A run-time address: `index` (register, 1x1 tile or [P, 1] tile) times `stride` elements is added.

    `limit` is the number of valid index values, `dim` the view's dimension that must not be sliced (or None). Kind
    "scalar" moves the whole access; "vector" replaces dimension 0: row r of the view starts at index[r] * stride.
    """

    def __init__(self, kind, index, stride, limit, dim):
        self.kind, self.index, self.stride, self.limit, self.dim = kind, index, stride, limit, dim


class DynamicViews:
    def _moved_dynamic(self, keys):
        """The indirection after indexing: integer indices before its dimension shift it down."""
        old = self.dynamic
        if old is None or old.dim is None:
            return old
        gone = sum(isinstance(k, int) and not (d == 0 and self.on_chip) for d, k in enumerate(keys[: old.dim]))
        return Dynamic(old.kind, old.index, old.stride, old.limit, old.dim - gone)

    def _index(self, index, kind):
        """Check a run-time index operand: a register or integer 1x1 tile, or for vectors an SBUF tile."""
        if kind == "scalar" and isinstance(index, VirtualRegister):
            return index
        if not isinstance(index, DynamicViews):
            self._fail(f"{kind}_offset: expected a tensor{' or register' * (kind == 'scalar')}, got {index!r}")
        if index.buffer is not SBUF or index.dtype not in ("int32", "uint32"):
            self._fail(f"{kind}_offset: expected an int32 or uint32 tile in sbuf, got {index!r}")
        if kind == "scalar" and index.size != 1:
            self._fail(f"scalar_offset: expected a 1x1 tile, got shape {index.shape}")
        if index.is_indirect():
            self._fail(f"{kind}_offset: the index tile must be a static view")
        return index

    def _dynamic(self, kind, index, stride, limit, dim):
        if self.dynamic is not None:
            self._fail("an indirect view cannot be made indirect again")
        return Dynamic(kind, self._index(index, kind), stride, limit, dim)

    def select(self, dim, index):
        """One element of a dimension, which is dropped: by a constant, or at run time by a register or 1x1 tile."""
        dim = self._dim(dim, movable=False)
        if isinstance(index, int):
            keys = [slice(None)] * self.ndim
            keys[dim] = index
            return self[tuple(keys)]
        if self.on_chip and dim == 0:
            self._fail("select: a run-time index cannot select the partition dimension")
        dynamic = self._dynamic("scalar", index, self.strides[dim], self.shape[dim], None)
        return self._with(
            self.shape[:dim] + self.shape[dim + 1 :], self.strides[:dim] + self.strides[dim + 1 :], dynamic=dynamic
        )

    def vector_select(self, dim, vector_offset):
        """[P, ...]: row vector_offset[p] of an HBM tensor for every partition p, a gather (or scatter) by DMA."""
        if dim != 0:
            self._fail(f"vector_select: only dimension 0 is supported, got {dim}")
        if self.buffer not in HBM:
            self._fail("vector_select: the indexed tensor must be in HBM")
        dynamic = self._dynamic("vector", vector_offset, self.strides[0], self.shape[0], 0)
        if vector_offset.shape[1:] != (1,):
            self._fail(f"vector_offset: expected shape (P, 1), got {vector_offset.shape}")
        return self._with((vector_offset.shape[0], *self.shape[1:]), self.strides, dynamic=dynamic)

    def indirect(self, index, num_elem=None):
        self._fail("indirect: tensor indirection is available on trn3 (NeuronCore-v4) only")

    def ap(self, pattern, offset=None, scalar_offset=None, vector_offset=None, indirect_dim=0, dtype=None):
        """Address the storage by [[stride, count], ...]: the view's own shape and strides are ignored.

        The documents disagree on what an integer `offset` means on a view that already starts inside its storage
        (added, or from the beginning), so that combination is refused. Run-time offsets are scaled by the sizes of
        this tensor's dimensions after `indirect_dim`, never by the pattern's strides.
        """
        if any(len(entry) != 2 for entry in pattern):
            self._fail(f"ap: pattern entries are [stride, count], got {pattern}")
        if scalar_offset is not None and vector_offset is not None:
            self._fail("ap: scalar_offset and vector_offset exclude each other")
        if offset is not None and self.offset:
            self._fail(f"ap: offset={offset} on a view that starts at element {self.offset}: the documents disagree")
        new = dtypes.name_of(dtype) if dtype is not None else self.dtype
        ratio = (self.itemsize, dtypes.itemsize(new))
        if offset is None and self.offset * ratio[0] % ratio[1]:
            self._fail(f"ap: the view's offset does not divide for dtype {new}")
        start = self.offset * ratio[0] // ratio[1] if offset is None else offset
        shape, strides = tuple(c for _, c in pattern), tuple(s for s, _ in pattern)
        dynamic = None
        if scalar_offset is not None or vector_offset is not None:
            dynamic = self._pattern_dynamic(scalar_offset, vector_offset, indirect_dim, shape, ratio)
        result = type(self)(shape, new, self.storage, strides, start, dynamic)
        self._check_pattern(result)
        return result

    def _pattern_dynamic(self, scalar_offset, vector_offset, dim, shape, ratio):
        """The indirection of `ap`: its stride is what one step of `dim` is worth in the base tensor's shape."""
        if not layout.is_row_major(self.shape, self.strides):
            self._fail("ap: a run-time offset needs a row-major base tensor (its shape gives the stride)")
        stride = prod(self.shape[dim + 1 :]) * ratio[0] // ratio[1]
        if scalar_offset is not None:
            if self.on_chip and dim == 0:
                self._fail("ap: scalar_offset cannot move an on-chip access over partitions (indirect_dim 0)")
            return self._dynamic("scalar", scalar_offset, stride, self.shape[dim], dim)
        if dim != 0:
            self._fail(f"ap: vector_offset supports only indirect_dim=0, got {dim}")
        if self.buffer not in HBM:
            self._fail("ap: a tensor indexed by vector_offset must be in HBM")
        dynamic = self._dynamic("vector", vector_offset, stride, self.shape[0], 0)
        if vector_offset.size < shape[0]:
            self._fail(f"ap: vector_offset has {vector_offset.size} indices, the pattern {shape[0]} rows")
        return dynamic

    def _check_pattern(self, view):
        """The pattern stays inside the storage and, on chip, inside contiguous partitions."""
        bad = [entry for entry in view.get_pattern() if entry[0] < 0 or entry[1] < 1]
        if bad:
            self._fail(f"ap: pattern entry {bad[0]}: strides are >= 0 and counts >= 1")
        strides = (0, *view.strides[1:]) if view.is_vector else view.strides
        last = view.offset + layout.span(view.shape, strides)
        if view.offset < 0 or (last + 1) * view.itemsize > self.storage.data.size:
            self._fail(f"ap: pattern ends at element {last}, beyond the tensor's storage")
        if not self.on_chip:
            return
        if view.ndim < 2 or view.ndim > 5:
            self._fail(f"ap: an on-chip pattern has 2 to 5 dimensions, got {view.ndim}")
        if view.strides[0] != view.free_elements:
            self._fail(f"ap: the first stride must be {view.free_elements} (partition step 1), got {view.strides[0]}")
        if view.offset % view.free_elements + layout.span(view.shape[1:], view.strides[1:]) >= view.free_elements:
            self._fail("ap: the free pattern runs past the end of a partition")
