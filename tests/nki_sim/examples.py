"""What the simulator's test files share: lists of named cases, drawn inputs and the comparison."""

import numpy as np
import pytest


class Examples:
    """Functions that return [(result, expected, relative tolerance), ...], each named by its source file."""

    def __init__(self):
        self.cases = []

    def case(self, source, name):
        def register(function):
            self.cases.append(pytest.param(function, id=f"{source}:{name}"))
            return function

        return register


class Refusals:
    """Kernels that must fail: (kernel, arguments, pattern of the message)."""

    def __init__(self):
        self.cases = []

    def refused(self, match, *args):
        def register(kernel):
            self.cases.append(pytest.param(kernel, args, match, id=kernel.__name__))
            return kernel

        return register


def drawn(*shape, scale=100.0, seed=0):
    """fp32 in [0, scale), as the published cases draw it."""
    return (np.random.default_rng(seed).random(shape) * scale).astype(np.float32)


def check(example):
    for result, expected, rtol in example():
        assert result.shape == expected.shape
        np.testing.assert_allclose(result.astype(np.float64), expected.astype(np.float64), rtol=rtol, atol=0)
