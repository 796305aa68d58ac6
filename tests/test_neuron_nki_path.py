"""The whole path: operator -> route -> gathers and decode -> the NKI kernel itself, run by the NKI simulator."""

from __future__ import annotations

import hypothesis
import neuron_sim
import numpy as np
import pytest
from compare import assert_matches
from hypothesis import given
from hypothesis import strategies as st
from neuron_problems import CAP, assert_decodes_like_cpu
from oracle import Exact
from strategies import examples
from strategies_decode import build, decode_problems
from strategies_logits import build as build_logits
from strategies_logits import logits_problems
from strategies_pool import build as build_pool
from strategies_pool import pool_problems
from test_neuron_flash_mla_decode import KERNELS, ROUTES
from test_neuron_flash_mla_decode import plan_of as decode_plan
from test_neuron_paged_mqa_logits import plan_of as logits_plan
from test_neuron_softmax_pool import assert_pools_like_cpu

from deepinfer_ops import config


def run_on_kernels(run):
    """The result, and the names of the kernels that ran for it."""
    with neuron_sim.use_runner(neuron_sim.SimulatorRunner()), neuron_sim.record() as seen:
        result = run()
    return result, [call.name for call in seen.kernels]


# NaN and infinity in queries and weights follow the engines on Neuron: a goal, not a promise (SPEC section 1).


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "exact"])
@pytest.mark.parametrize("route", ["per row", "table"])
@given(st.data())
@examples(quick=5, ci=15)
def test_decode_equals_the_cpu_kernel_on(route, fast, data):
    problem = data.draw(decode_problems(cap=CAP))
    hypothesis.assume(problem.h_q <= 128 and problem.poison == "none")
    inputs = build(problem, "neuron")
    with config.override(fast_e4m3=fast, **ROUTES[route]):
        hypothesis.assume(decode_plan(inputs).route == route)
        got, ran = run_on_kernels(inputs.run)
    assert ran == KERNELS[route]
    assert_decodes_like_cpu(got, build(problem))


@given(logits_problems(cap=CAP))
@examples(quick=8, ci=25)
def test_logits_equal_the_cpu_kernel(problem):
    hypothesis.assume(problem.poison == "none")
    inputs, on_cpu = build_logits(problem, "neuron"), build_logits(problem)
    plan = logits_plan(inputs)
    got, ran = run_on_kernels(inputs.run)
    assert ran == [plan.kernel] * plan.kernel_calls
    # The kernel rounds relu(q . k) and the weights to bf16 before it sums heads: 2^-7 of the sum of magnitudes.
    magnitudes = on_cpu._replace(weights=on_cpu.weights.abs()).run().double().numpy()
    tolerance = np.nan_to_num(2 * on_cpu.exact().tolerance + 2.0**-7 * magnitudes, neginf=0.0, posinf=0.0)
    assert_matches(got, Exact(on_cpu.run().double().numpy(), tolerance))


@given(pool_problems())
@examples(quick=8, ci=25)
def test_pooling_equals_the_cpu_kernel(problem):
    hypothesis.assume("huge" not in problem.latents)
    inputs = build_pool(problem, "neuron")
    got, ran = run_on_kernels(inputs.run)
    assert ran in ([], ["softmax_pool"])
    assert_pools_like_cpu(got, build_pool(problem))
