"""Comparators that say where a result is wrong, by how much, and in how many places."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from oracle import Exact

BF16_OVERFLOW = 2.0**128 - 2.0**119
"""From here on the nearest bfloat16 is infinite."""


def assert_matches(got: torch.Tensor, exact: Exact, what: str = "out") -> None:
    """``got`` lies within the tolerance of the exact result; NaN and infinities stand where they belong."""
    __tracebackhide__ = True
    assert tuple(got.shape) == exact.value.shape, f"{what}: shape {tuple(got.shape)}, not {exact.value.shape}"
    actual = got.detach().cpu().double().numpy()
    with np.errstate(invalid="ignore"):
        error = np.abs(actual - exact.value)
        overflow = np.isinf(actual) & (np.abs(exact.value) + exact.tolerance >= BF16_OVERFLOW)
        right = (error <= exact.tolerance) | (actual == exact.value)
        right |= overflow & (np.sign(actual) == np.sign(exact.value))
        right |= np.isnan(actual) & np.isnan(exact.value)
        excess = np.where(right, 0.0, np.nan_to_num(error / exact.tolerance, nan=np.inf, posinf=np.inf))
    report(what, right, excess, actual, exact.value, lambda at: f"tolerance {exact.tolerance[at]:.6g}")


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, what: str = "out") -> None:
    """Bit for bit the same, whatever the strides; any NaN equals any NaN (IEEE promises no sign or payload)."""
    __tracebackhide__ = True
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, not {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    bits = {2: torch.int16, 4: torch.int32}[got.element_size()]
    a, b = (t.detach().cpu().clone(memory_format=torch.contiguous_format).view(bits).numpy() for t in (got, want))
    actual, wanted = got.detach().cpu().double().numpy(), want.detach().cpu().double().numpy()
    right = (a == b) | (np.isnan(actual) & np.isnan(wanted))
    with np.errstate(invalid="ignore"):
        excess = np.where(right, 0.0, np.nan_to_num(np.abs(actual - wanted), nan=np.inf))
    report(what, right, excess, actual, wanted, lambda at: f"bits {a[at]:#x}, not {b[at]:#x}")


def assert_equal(got: torch.Tensor, want: object, what: str = "out") -> None:
    """Every element equals ``want`` (broadcast), NaN where ``want`` is NaN: for results with exact numbers."""
    __tracebackhide__ = True
    actual = got.detach().cpu().double().numpy()
    wanted = np.broadcast_to(np.asarray(want, dtype=np.float64), actual.shape)
    right = (actual == wanted) | (np.isnan(actual) & np.isnan(wanted))
    with np.errstate(invalid="ignore"):
        excess = np.where(right, 0.0, np.nan_to_num(np.abs(actual - wanted), nan=np.inf))
    report(what, right, excess, actual, wanted, lambda at: f"difference {actual[at] - wanted[at]:.6g}")


def report(
    what: str,
    right: np.ndarray,
    excess: np.ndarray,
    actual: np.ndarray,
    wanted: np.ndarray,
    detail: Callable[[tuple[int, ...]], str],
) -> None:
    """Raise unless all are ``right``; names the first wrong element and the one of the largest ``excess``."""
    __tracebackhide__ = True
    if right.all():
        return
    wrong = np.argwhere(~right)
    first = tuple(int(i) for i in wrong[0])
    worst = tuple(int(i) for i in np.unravel_index(np.argmax(np.where(right, -1.0, excess)), right.shape))
    lines = [f"{what}: {len(wrong)} of {right.size} elements are wrong"]
    axes = [f"{len(np.unique(wrong[:, axis]))} of {size}" for axis, size in enumerate(right.shape)]
    lines.append(f"  indices hit, axis by axis: {', '.join(axes)}")
    for label, at in (("first", first), ("worst", worst)):
        lines.append(
            f"  {label} at {list(at)}: got {float(actual[at])!r}, expected {float(wanted[at])!r}, {detail(at)}"
        )
    raise AssertionError("\n".join(lines))
