"""What tests on the simulated Neuron share: runs that watch the device, and the tolerance of a composition."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
import neuron_sim
import numpy as np
import oracle
import torch
from compare import assert_matches, assert_same_bits
from oracle import Exact
from strategies_decode import DecodeInputs

import deepinfer_ops.neuron  # noqa: F401  (registers the compositions)

PLATFORM = neuron_sim.install()

CAP = 224.0
"""Caches that Neuron reads are quantized below it: Trn2 has no finite e4m3 number above 240."""

BF16_UNIT = 2.0**-9
"""Half a unit in the last place of bfloat16: one rounding is off by at most this part of its result."""


def run_watched(call: Callable[[], torch.Tensor], *, nan: bool = False) -> tuple[torch.Tensor, neuron_sim.Recording]:
    """Run ``call`` twice, as it is and with every int64 result wrapped to 32 bits: the results are the same bits.

    No index left its table, no integer left 32 bits, and unless the caller's inputs hold a ``nan`` no kernel met one.
    """
    with neuron_sim.record() as seen:
        result = call()
    assert not seen.out_of_range()
    assert not seen.overflows()
    assert nan or not seen.nan_kernels()
    with neuron_sim.int32_only():
        assert_same_bits(call(), result, "with 32-bit integers")
    return result, seen


def assert_decodes_like_cpu(got: torch.Tensor, on_cpu: DecodeInputs) -> None:
    """``got`` equals what the CPU kernel makes of the same problem, within 2^-6 of the row's largest magnitude."""
    __tracebackhide__ = True
    want = on_cpu.run()
    assert (got.dtype, got.stride()) == (want.dtype, want.stride())
    assert_matches(got, decode_expectation(on_cpu, want))


def decode_expectation(inputs: DecodeInputs, want: torch.Tensor) -> Exact:
    """``want`` with a tolerance.

    Where values cancel, the bf16 rounding of probabilities is large beside what is left of them, so its bound, 2^-9 of
    the mean magnitude of the keys, is added.
    """
    value = want.double().numpy()
    tolerance = np.zeros(value.shape)
    q = inputs.q.double().numpy()
    row_keys = oracle.live_keys(*inputs[1:4], *inputs[5:8])
    for b, s in np.ndindex(*value.shape[:2]):
        keys = row_keys(b, s)
        # The kernels sum before they divide: a sum beyond fp32 is a limit of theirs, not of the composition.
        if np.abs(keys).sum() >= 2.0**126:
            hypothesis.reject()
        if not len(keys):
            continue
        logits = inputs.softmax_scale * (q[b, s] @ keys.T)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        spread = weights @ np.abs(keys) / weights.sum(axis=1, keepdims=True)
        largest = np.max(np.abs(value[b, s]), initial=0.0, where=~np.isnan(value[b, s]))
        tolerance[b, s] = 2.0**-6 * largest + BF16_UNIT * np.nan_to_num(spread) + 2 * oracle.SMALLEST_NORMAL
    return Exact(value, tolerance)
