"""Data types by their documented names, their numpy storage, and the two conversions every engine uses.

Vector, Scalar and DMA engines convert each input to fp32 and cast once on write: `to_fp32` and `from_fp32`.
float8_e4m3 is Trn2's IEEE-like form (infinities, largest finite value 240), not the OCP float8_e4m3fn.
"""

import ml_dtypes
import numpy as np

from .errors import NkiValidationError

NUMPY = {
    "bool": np.dtype(np.uint8),
    "int8": np.dtype(np.int8),
    "int16": np.dtype(np.int16),
    "int32": np.dtype(np.int32),
    "uint8": np.dtype(np.uint8),
    "uint16": np.dtype(np.uint16),
    "uint32": np.dtype(np.uint32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "tfloat32": np.dtype(np.float32),
    "float32": np.dtype(np.float32),
    "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "float8_e8m0fnu": np.dtype(ml_dtypes.float8_e8m0fnu),
}
INTEGERS = frozenset(n for n in NUMPY if n.startswith(("int", "uint")) or n == "bool")
FLOATS = frozenset(NUMPY) - INTEGERS
HALVES = frozenset({"bfloat16", "float16"})
FP8 = frozenset({"float8_e4m3", "float8_e5m2"})
FP32_LIKE = frozenset({"float32", "tfloat32"})
MATMUL = frozenset({"float32", "tfloat32"}) | HALVES | FP8

# What a fresh tensor holds: NaN where the type has one, else the integer 4 (AWS's simulator does the same).
INTEGER_FILL = 4


def name_of(dtype, what="dtype"):
    """The documented name of `dtype` (a name or anything numpy understands); an error for anything else."""
    if isinstance(dtype, str) and dtype in NUMPY:
        return dtype
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found == np.bool_:
        return "bool"
    for name, stored in NUMPY.items():
        if found is not None and stored == found and name not in ("bool", "tfloat32"):
            return name
    known = ", ".join(sorted(NUMPY))
    raise NkiValidationError(f"{what}: {dtype!r} is no dtype of Trn2; known: {known}")


def itemsize(name):
    return NUMPY[name].itemsize


def filled(name, count):
    """`count` elements as a fresh tensor holds them, as flat bytes."""
    fill = INTEGER_FILL if name in INTEGERS else np.nan
    return np.full(count, fill, NUMPY[name]).view(np.uint8)


def to_fp32(array, name):
    if name == "bfloat16":  # a shift is about three times faster than the cast of ml_dtypes, and exact
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def from_fp32(values, name):
    """Round fp32 to nearest even into `name`; integers saturate, and NaN becomes integer 0."""
    if name in ("float32", "int32") and values.dtype == NUMPY[name]:
        return values
    if name == "bool":
        return (values != 0).astype(np.uint8)
    if name in INTEGERS:
        limits = np.iinfo(NUMPY[name])
        rounded = np.nan_to_num(np.rint(values.astype(np.float64)), nan=0.0, posinf=np.inf, neginf=-np.inf)
        return np.clip(rounded, limits.min, limits.max).astype(NUMPY[name])
    if name == "tfloat32":
        return round_tfloat32(values)
    return values.astype(NUMPY[name])


def round_tfloat32(values):
    """fp32 with 10 mantissa bits kept: the low 13 are rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x0FFF + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(values), rounded.view(np.float32), values)
