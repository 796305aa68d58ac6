"""The operators of nki.language as values for the `op` arguments: what each computes in fp32, and who takes it.

`kind` is "arithmetic", "bitvec" or "unary" for the Vector engine's operators and None for what it lacks;
`activation` is the Scalar engine's function. Both may exist (rsqrt). Comparisons and logical operators give 0 or 1.
"""

import math

import numpy as np

from .machine import current


class Op:
    """One operator. Calling it, as nl.add(x, y), would be nl's experimental computing helper: refused."""

    def __init__(self, name, kind=None, compute=None, activation=None, valid=None, identity=None):
        self.name, self.kind, self.compute, self.activation = name, kind, compute, activation
        self.valid = valid  # (low, high) magnitudes the Scalar engine's table accepts; None: all
        self.identity = identity  # start of a reduction; None: no legal reduction operator

    def __repr__(self):
        return f"nl.{self.name}"

    def __call__(self, *args, **kwargs):
        current().fail(f"nl.{self.name}(...): the computing helpers of nl are not modelled; write nisa instructions")


# Maximum and minimum pass NaN on, as numpy's do; no document says what the engines do.


def _truth(function):
    return lambda a, b: function(a, b).astype(np.float32)


def _logical(function):
    return lambda a, b: function(a != 0, b != 0).astype(np.float32)


def _erf(x):
    return np.vectorize(math.erf, otypes=[np.float32])(x)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)))


def _softplus(x):
    return np.logaddexp(x, np.float32(0))


def _arithmetic(name, function, identity=None):
    return Op(name, "arithmetic", function, identity=identity)


def _bitvec(name, function, identity=None):
    return Op(name, "bitvec", function, identity=identity)


_ALU = [
    _arithmetic("add", np.add, 0.0),
    _arithmetic("subtract", np.subtract, 0.0),
    _arithmetic("multiply", np.multiply, 1.0),
    _arithmetic("maximum", np.maximum, -np.inf),
    _arithmetic("minimum", np.minimum, np.inf),
    _arithmetic("equal", _truth(np.equal)),
    _arithmetic("not_equal", _truth(np.not_equal)),
    _arithmetic("greater", _truth(np.greater)),
    _arithmetic("greater_equal", _truth(np.greater_equal)),
    _arithmetic("less", _truth(np.less)),
    _arithmetic("less_equal", _truth(np.less_equal)),
    _arithmetic("logical_and", _logical(np.logical_and), 1.0),
    _arithmetic("logical_or", _logical(np.logical_or), 0.0),
    _arithmetic("logical_xor", _logical(np.logical_xor), 0.0),
    _arithmetic("power", np.power),
    _bitvec("bitwise_and", np.bitwise_and, -1),
    _bitvec("bitwise_or", np.bitwise_or, 0),
    _bitvec("bitwise_xor", np.bitwise_xor, 0),
    _bitvec("left_shift", np.left_shift),
    _bitvec("right_shift", np.right_shift),
    Op("invert", "bitvec", lambda a, _: np.invert(a)),
    Op("abs", "unary", np.abs, activation=np.abs),
    Op("rsqrt", "unary", lambda x: 1 / np.sqrt(x), lambda x: 1 / np.sqrt(x), (2.0**-87, 2.0**97)),
    Op("reciprocal", "unary", lambda x: 1 / x, lambda x: 1 / x, (2.0**-42, 2.0**42)),
    Op("bypass", "bypass", lambda a, _: a),
]

_ACTIVATIONS = [
    Op("copy", activation=lambda x: x),
    Op("square", activation=np.square),
    Op("sigmoid", activation=_sigmoid),
    Op("relu", activation=lambda x: np.maximum(x, 0)),
    Op("gelu", activation=lambda x: 0.5 * x * (1 + _erf(x * np.float32(math.sqrt(0.5))))),
    Op("gelu_apprx_tanh", activation=_gelu_tanh),
    Op("gelu_apprx_sigmoid", activation=lambda x: x * _sigmoid(np.float32(1.702) * x)),
    Op("silu", activation=lambda x: x * _sigmoid(x)),
    Op("tanh", activation=np.tanh),
    Op("softplus", activation=_softplus),
    Op("mish", activation=lambda x: x * np.tanh(_softplus(x))),
    Op("erf", activation=_erf),
    Op("exp", activation=np.exp),
    Op("log", activation=np.log, valid=(2.0**-64, 2.0**64)),
    Op("sin", activation=np.sin, valid=(0.0, math.pi)),
    Op("arctan", activation=np.arctan, valid=(0.0, math.pi / 2)),
    Op("sqrt", activation=np.sqrt, valid=(2.0**-116, 2.0**118)),
    Op("sign", activation=np.sign),
]

# Names that exist in nki.language but have no instruction on Trn2 (trn3 only, or no hardware at all).
_ABSENT = ["divide", "mod", "fmod", "abs_max", "abs_min", "prelu", "gelu_dx", "silu_dx", "erf_dx", "average"]

OPS = {op.name: op for op in [*_ALU, *_ACTIVATIONS, *(Op(name) for name in _ABSENT)]}
COMPARISONS = frozenset({"equal", "less", "less_equal", "greater", "greater_equal"})


def shifted(op, a, b):
    """A logical shift on unsigned bits; a count of the width or more gives 0 (numpy leaves that undefined)."""
    width = a.dtype.itemsize * 8
    return np.where(b < width, op.compute(a, np.minimum(b, width - 1)), a.dtype.type(0))
