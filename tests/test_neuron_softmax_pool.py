"""``softmax_pool`` on the simulated device equals the CPU kernel."""

from __future__ import annotations

import hypothesis
import neuron_sim
import numpy as np
import pytest
from compare import assert_matches, assert_same_bits
from hypothesis import given
from neuron_problems import run_watched
from oracle import Exact
from strategies import examples
from strategies_pool import PoolProblem, build, pool_problems

from deepinfer_ops import neuron


def assert_pools_like_cpu(got, on_cpu):
    __tracebackhide__ = True
    want = on_cpu.run()
    assert (got.dtype, got.stride()) == (want.dtype, want.stride())
    tolerance = 2 * on_cpu.exact().tolerance
    assert_matches(got, Exact(want.double().numpy(), np.nan_to_num(tolerance, posinf=0.0)))


@given(pool_problems())
@examples(quick=30, ci=100)
def test_it_equals_the_cpu_kernel(problem):
    # The kernel sums before it divides: a sum beyond fp32 is a limit of its own.
    hypothesis.assume("huge" not in problem.latents)
    inputs = build(problem, "neuron")
    plan = neuron.explain("softmax_pool", **inputs._asdict())
    got, seen = run_watched(inputs.run, nan=True)
    assert [call.name for call in seen.kernels] == [plan.kernel] * plan.kernel_calls
    assert_pools_like_cpu(got, build(problem))


@pytest.mark.parametrize("r", [1, 2, 8])
def test_compiled_equals_eager_and_is_one_kernel_call_and_a_cast(r):
    inputs = build(PoolProblem(n=3, r=r, d=64, masked_rows=r // 2), "neuron")
    compiled = neuron_sim.compile_fullgraph(type(inputs).run)
    assert_same_bits(compiled(inputs), inputs.run())
    assert neuron_sim.graph_rules.check(compiled.graph) == []
    if r > 1:
        assert compiled.targets() == ["nki_kernel_wrapper", "aten._to_copy.default"]


@pytest.mark.parametrize("shape", [(0, 4, 8), (3, 1, 8), (1, 2, 1), (127, 2, 3), (129, 2, 3), (2, 3, 0)], ids=str)
def test_edges_of_sizes(shape):
    n, r, d = shape
    inputs = build(PoolProblem(n=n, r=r, d=d), "neuron")
    got, _ = run_watched(inputs.run)
    assert_pools_like_cpu(got, build(PoolProblem(n=n, r=r, d=d)))
