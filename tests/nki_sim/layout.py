"""Stride arithmetic of views: pure functions on (shape, strides) tuples, in elements."""

from math import prod


def row_major(shape):
    """Strides of a tensor without gaps, the last dimension fastest."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def is_row_major(shape, strides):
    """Whether the view is one contiguous run in order; strides of unit dimensions do not matter."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def merged(shape, strides):
    """The same addresses with the fewest dimensions: unit dimensions dropped, contiguous neighbours joined."""
    out = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if out and out[-1][1] == size * stride:
            out[-1] = (out[-1][0] * size, stride)
        else:
            out.append((size, stride))
    return out


def reshaped(shape, strides, new_shape):
    """Strides of `new_shape` over the same addresses in the same order, or None if no strides can say it."""
    if prod(shape) == 0:
        return row_major(new_shape)
    runs = merged(shape, strides)
    out = []
    run = len(runs) - 1
    left, step = runs[run] if runs else (1, 1)
    for size in reversed(new_shape):
        if size == 1:
            out.append(step)
            continue
        if left == 1:
            run -= 1
            left, step = runs[run]
        if left % size:
            return None
        out.append(step)
        left //= size
        step *= size
    return tuple(reversed(out))


def span(shape, strides):
    """Distance between the first and the last address touched (strides are never negative)."""
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
