"""View methods of NkiTensor: each returns a new tensor over the same storage and copies nothing.

On chip, dimension 0 is the partition: it cannot be permuted, split, merged, broadcast or dropped, and a view keeps
at least two dimensions. HBM tensors have none of these limits.
"""

from math import prod

from . import dtypes, layout
from .dynamic_views import DynamicViews
from .errors import NkiValidationError

MAX_RANK = 5


class DynamicSlice:
    """nl.ds(start, size)."""

    def __init__(self, start, size):
        self.start, self.size = start, size


class Views(DynamicViews):
    def _fail(self, message):
        """Views have no instruction to name: the tensor starts the message."""
        raise NkiValidationError(f"{self.name}: {message}")

    def _with(self, shape, strides, offset=None, dtype=None, dynamic=None):
        shape = tuple(shape)
        if self.on_chip and len(shape) > MAX_RANK:
            self._fail(f"view of rank {len(shape)}: an on-chip view has at most {MAX_RANK} dimensions")
        offset = self.offset if offset is None else offset
        dynamic = self.dynamic if dynamic is None else dynamic
        return type(self)(shape, dtype or self.dtype, self.storage, strides, offset, dynamic)

    def _dim(self, dim, movable=True):
        """`dim` counted from 0; `movable`: the view would change the dimension, which the partition forbids."""
        if not isinstance(dim, int) or not -self.ndim <= dim < self.ndim:
            self._fail(f"dimension {dim!r} of a rank-{self.ndim} tensor")
        dim %= self.ndim
        if movable and dim == 0 and (self.on_chip or self.is_vector):
            self._fail("dimension 0 is the partition (or indirect) dimension: it cannot be changed by this view")
        return dim

    def __getitem__(self, key):
        """Integers drop a dimension, except the partition and where fewer than 2 (HBM: 1) would remain."""
        keys = key if isinstance(key, tuple) else (key,)
        if any(k is Ellipsis for k in keys):
            at = next(i for i, k in enumerate(keys) if k is Ellipsis)
            keys = (*keys[:at], *[slice(None)] * (self.ndim - len(keys) + 1), *keys[at + 1 :])
        if len(keys) > self.ndim:
            self._fail(f"{len(keys)} indices for a rank-{self.ndim} tensor")
        keys = (*keys, *[slice(None)] * (self.ndim - len(keys)))
        shape, strides, offset, dropped = [], [], self.offset, []
        for dim, k in enumerate(keys):
            start, count, step = self._range(dim, k)
            offset += start * self.strides[dim]
            if isinstance(k, int) and not (dim == 0 and self.on_chip):
                dropped.append(len(shape))
            shape.append(count)
            strides.append(self.strides[dim] * step)
        least = 2 if self.on_chip else 1
        while dropped and len(shape) > least:
            at = dropped.pop()
            del shape[at], strides[at]
        return self._with(shape, strides, offset, dynamic=self._moved_dynamic(keys))

    def _range(self, dim, key):
        """(start, count, step) of one index expression on dimension `dim`."""
        size = self.shape[dim]
        fixed = self.dynamic is not None and self.dynamic.dim == dim
        whole = isinstance(key, slice) and key == slice(None)
        if fixed and not whole:
            self._fail(f"dimension {dim} takes part in the indirection and cannot be sliced")
        if isinstance(key, DynamicSlice):
            key = slice(key.start, key.start + key.size)
            if not isinstance(key.start, int):
                self._fail("nl.ds needs a compile-time start; use scalar_offset for a register")
        if isinstance(key, bool) or not isinstance(key, int | slice):
            self._fail(f"index {key!r}: expected an integer, a slice, `...` or nl.ds (tensors: select, vector_select)")
        if isinstance(key, int):
            if not -size <= key < size:
                self._fail(f"index {key} is out of bounds for dimension {dim} of size {size}")
            return key % size, 1, 1
        start = 0 if key.start is None else key.start
        stop = size if key.stop is None else key.stop
        step = 1 if key.step is None else key.step
        start, stop = (v + size if v < 0 else v for v in (start, stop))
        if not (0 <= start < stop <= size and step >= 1):
            self._fail(f"slice {key.start}:{key.stop}:{key.step} is empty or out of bounds 0..{size} (dimension {dim})")
        if step != 1 and dim == 0 and self.on_chip:
            self._fail("partition step must be 1: partitions of one access are contiguous")
        return start, -(-(stop - start) // step), step

    def slice(self, dim, start, end, step=1):
        keys = [slice(None)] * self.ndim
        keys[self._dim(dim, movable=False)] = slice(start, end, step)
        return self[tuple(keys)]

    def permute(self, dims):
        dims = tuple(dims)
        if sorted(dims) != list(range(self.ndim)):
            self._fail(f"permute: {dims} is no permutation of {self.ndim} dimensions")
        if dims[0] != 0 and (self.on_chip or self.is_vector):
            self._fail(f"permute: dims[0] must be 0 (the partition dimension stays outermost), got {dims}")
        return self._with([self.shape[d] for d in dims], [self.strides[d] for d in dims])

    def broadcast(self, dim, size):
        """A dimension of size 1 repeated by a stride of 0. Over partitions this takes an instruction or a DMA."""
        dim = self._dim(dim)
        if self.shape[dim] != 1:
            self._fail(f"broadcast: dimension {dim} has size {self.shape[dim]}, expected 1")
        return self._with(
            (*self.shape[:dim], size, *self.shape[dim + 1 :]), (*self.strides[:dim], 0, *self.strides[dim + 1 :])
        )

    def expand_dim(self, dim):
        if dim == 0 and (self.on_chip or self.is_vector):
            self._fail("expand_dim: no dimension can precede the partition dimension")
        if not 0 <= dim <= self.ndim:
            self._fail(f"expand_dim: position {dim} of a rank-{self.ndim} tensor")
        stride = self.strides[dim] * self.shape[dim] if dim < self.ndim else 1
        return self._with((*self.shape[:dim], 1, *self.shape[dim:]), (*self.strides[:dim], stride, *self.strides[dim:]))

    def squeeze_dim(self, dim):
        dim = self._dim(dim)
        if self.shape[dim] != 1:
            self._fail(f"squeeze_dim: dimension {dim} has size {self.shape[dim]}, expected 1")
        if self.on_chip and self.ndim == 2:
            self._fail("squeeze_dim: an on-chip tensor keeps at least two dimensions")
        return self._with(self.shape[:dim] + self.shape[dim + 1 :], self.strides[:dim] + self.strides[dim + 1 :])

    def reshape_dim(self, dim, shape):
        """Split one dimension; one of the sizes may be -1."""
        dim = self._dim(dim, movable=len(tuple(shape)) > 1)
        sizes = self._inferred(tuple(shape), self.shape[dim])
        return self.reshape((*self.shape[:dim], *sizes, *self.shape[dim + 1 :]))

    def _inferred(self, sizes, total):
        if sizes.count(-1) == 1:
            known = prod(s for s in sizes if s != -1)
            sizes = tuple(total // known if s == -1 else s for s in sizes)
        if prod(sizes) != total:
            self._fail(f"reshape: sizes {sizes} do not multiply to {total}")
        return sizes

    def flatten_dims(self, start_dim, end_dim):
        """Merge start_dim..end_dim (inclusive), which must be adjacent in memory."""
        start, end = self._dim(start_dim), self._dim(end_dim)
        merged = prod(self.shape[start : end + 1])
        return self.reshape((*self.shape[:start], merged, *self.shape[end + 1 :]))

    def reshape(self, shape):
        """Other sizes over the same addresses in the same order; an error where only a copy could do it."""
        shape = self._inferred(tuple(shape), self.size)
        if (self.on_chip or self.is_vector) and shape[0] != self.shape[0]:
            self._fail(f"reshape: the partition dimension stays {self.shape[0]}, got {shape[0]}")
        if self.on_chip or self.is_vector:
            free = layout.reshaped(self.shape[1:], self.strides[1:], shape[1:])
            strides = None if free is None else (self.strides[0], *free)
        else:
            strides = layout.reshaped(self.shape, self.strides, shape)
        if strides is None:
            self._fail(f"reshape: strides {self.strides} of shape {self.shape} cannot become {shape} without a copy")
        return self._with(shape, strides)

    def rearrange(self, src_pattern, dst_pattern, fixed_sizes=None):
        """Split, permute and merge by names, e.g. (("b", ("h", "w")), ("b", "w", "h"), {"h": 4})."""
        sizes = dict(fixed_sizes or {})
        groups = [(n,) if isinstance(n, str) else tuple(n) for n in src_pattern]
        if len(groups) != self.ndim:
            self._fail(f"rearrange: pattern {src_pattern} names {len(groups)} of {self.ndim} dimensions")
        split = []
        for group, total in zip(groups, self.shape, strict=True):
            open_sizes = tuple(sizes.get(n, -1) for n in group)
            split += list(self._inferred(open_sizes, total))
        names = [n for group in groups for n in group]
        targets = [(n,) if isinstance(n, str) else tuple(n) for n in dst_pattern]
        order = [names.index(n) for group in targets for n in group]
        view = self.reshape(tuple(split)).permute(tuple(order))
        final, at = [], 0
        for group in targets:
            final.append(prod(view.shape[at : at + len(group)]))
            at += len(group)
        return view.reshape(tuple(final))

    def view(self, dtype):
        """The same bits as another dtype: the last dimension scales by the ratio of the sizes."""
        dtype = dtypes.name_of(dtype)
        old, new = self.itemsize, dtypes.itemsize(dtype)
        if self.dynamic is not None:
            self._fail("view(dtype): not after an indirect view")
        if self.strides[-1] != 1 and self.shape[-1] != 1 and old != new:
            self._fail("view(dtype): the last dimension must be contiguous")
        last, outer = self.shape[-1] * old, [s * old for s in self.strides[:-1]]
        if last % new or any(s % new for s in outer) or self.offset * old % new:
            self._fail(f"view({dtype}): {last} bytes, or a stride or offset, do not divide by {new}")
        strides = (*[s // new for s in outer], self.strides[-1] if old == new else 1)
        return self._with((*self.shape[:-1], last // new), strides, self.offset * old // new, dtype)

    reinterpret_cast = view

    def get_pattern(self):
        """[[stride, count], ...], the form `ap` takes."""
        return [[stride, size] for stride, size in zip(self.strides, self.shape, strict=True)]

    def is_contiguous(self):
        """Row-major without gaps; on chip within each partition."""
        skip = 1 if self.on_chip else 0
        return layout.is_row_major(self.shape[skip:], self.strides[skip:])

    def is_indirect(self):
        return self.dynamic is not None
