"""``paged_mqa_logits`` on the simulated device equals the CPU kernel on every route."""

from __future__ import annotations

import dataclasses

import neuron_sim
import numpy as np
import pytest
import torch
from cases import index_cache, logits
from compare import assert_matches, assert_same_bits
from hypothesis import given
from hypothesis import strategies as st
from neuron_problems import CAP, run_watched
from oracle import Exact
from strategies import examples
from strategies_logits import LogitsProblem, build, logits_problems

from deepinfer_ops import config, neuron


def plan_of(inputs):
    return neuron.explain("paged_mqa_logits", **inputs._asdict())


def assert_scores_like_cpu(got, on_cpu):
    """Within what two float32 sums in different orders may differ by, and a rounding to bf16 each."""
    __tracebackhide__ = True
    want = on_cpu.run()
    assert (got.dtype, got.stride()) == (want.dtype, want.stride())
    tolerance = 2 * on_cpu.exact().tolerance
    assert_matches(got, Exact(want.double().numpy(), np.nan_to_num(tolerance, posinf=0.0)))


def on_neuron(inputs):
    return inputs._replace(**{n: v.to("neuron") for n, v in inputs._asdict().items() if torch.is_tensor(v)})


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "exact"])
@pytest.mark.parametrize("one_sequence", [False, True], ids=["per token", "one sequence"])
@given(st.data())
@examples(quick=12, ci=50)
def test_it_equals_the_cpu_kernel(one_sequence, fast, data):
    problem = dataclasses.replace(data.draw(logits_problems(cap=CAP)), one_sequence=one_sequence)
    inputs = build(problem, "neuron")
    with config.override(fast_e4m3=fast):
        plan = plan_of(inputs)
        got, seen = run_watched(inputs.run, nan=problem.poison != "none")
    assert plan.route in ("empty", "one sequence" if one_sequence else "per token")
    assert [call.name for call in seen.kernels] == [plan.kernel] * plan.kernel_calls
    assert_scores_like_cpu(got, build(problem))


@pytest.mark.parametrize("one_sequence", [False, True], ids=["per token", "one sequence"])
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "exact"])
@pytest.mark.parametrize(("query", "keys"), [("fp8", "fp8"), ("fp4", "fp4"), ("fp8", "fp4")])
def test_compiled_equals_eager_and_its_graph_keeps_the_rules(query, keys, fast, one_sequence):
    problem = LogitsProblem(
        contexts=(9, 300, 0),
        heads=5,
        query=query,
        keys=keys,
        page_kv=64,
        pages=8,
        width=5,
        max_context_len=310,
        one_sequence=one_sequence,
        packed_scales=True,
        cap=CAP,
    )
    inputs = build(problem, "neuron")
    with config.override(fast_e4m3=fast):
        compiled = neuron_sim.compile_fullgraph(type(inputs).run)
        got = compiled(inputs)
        assert_same_bits(got, inputs.run())
    assert neuron_sim.graph_rules.check(compiled.graph) == []
    kernels = neuron_sim.graph_rules.kernel_nodes(compiled.graph)
    assert len(kernels) == (1 if one_sequence else 3)
    assert_scores_like_cpu(got, build(problem))


@pytest.mark.parametrize(
    "problem",
    [
        LogitsProblem(contexts=()),
        LogitsProblem(contexts=(3, 0), max_context_len=0, width=2, pages=2),
        LogitsProblem(contexts=(2,), width=0, max_context_len=5),
        LogitsProblem(contexts=(0, 0), width=2, pages=2, max_context_len=7),
        LogitsProblem(contexts=(1,), page_kv=1, pages=1, width=1, max_context_len=1),
        LogitsProblem(contexts=(5, 9), heads=129, page_kv=4, pages=4, width=3, max_context_len=12),
        LogitsProblem(contexts=(5, 9, 2), heads=129, pages=4, width=3, max_context_len=12, one_sequence=True),
        LogitsProblem(contexts=(9, 4), pages=4, width=3, max_context_len=5),
        LogitsProblem(contexts=(12, 30), pages=4, width=3, max_context_len=300),
    ],
    ids=str,
)
def test_edges_of_sizes(problem):
    problem = dataclasses.replace(problem, cap=CAP)
    inputs = build(problem, "neuron")
    got, seen = run_watched(inputs.run)
    plan = plan_of(inputs)
    assert [call.name for call in seen.kernels] == [plan.kernel] * plan.kernel_calls
    assert_scores_like_cpu(got, build(problem))


@pytest.mark.parametrize("one_sequence", [False, True])
def test_pages_outside_the_cache_and_stale_entries_are_never_followed(one_sequence):
    """A live entry outside the cache is an error on CPU; here its positions are -inf."""
    table = [[2, 2**31 - 1, 3, -5], [2, 2**31 - 1, 3, -5]]
    keys = index_cache([0x38] * 12, 4, pages=6)
    call = on_neuron(logits(keys, [10, 5], table, 16, one_sequence=one_sequence))
    got, seen = run_watched(call.run)
    assert {int(i.values.max()) for i in seen.indices()} <= {2, 3}
    finite = got.cpu().isfinite()
    assert finite.nonzero().tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [0, 8], [0, 9], [1, 0], [1, 1], [1, 2], [1, 3]]


def test_a_negative_context_has_no_live_position():
    keys = index_cache([0x38] * 4, 4, pages=1)
    got, _ = run_watched(on_neuron(logits(keys, [-1, -(2**31)], [[0], [0]], 4)).run)
    assert (got.cpu() == -torch.inf).all()


def test_nan_of_a_dead_position_reaches_neither_kernel_nor_output():
    """Garbage that overflows: +inf times a positive weight and +inf times a negative one would make NaN."""
    problem = LogitsProblem(contexts=(1, 2), heads=2, page_kv=4, pages=2, width=1, max_context_len=4, cap=CAP, seed=1)
    inputs = build(problem)
    runs = inputs.kv_cache.view(2, 4 * 132)
    for t, context in enumerate((1, 2)):
        page = int(inputs.block_table[t, 0])
        runs[page, context * 128 : 512] = 0x77
        runs[page, 512 + context * 4 :] = 240
    got, _ = run_watched(on_neuron(inputs).run)
    assert_scores_like_cpu(got, inputs)
