"""``flash_mla_decode`` on the simulated device equals the CPU kernel on every route that follows the index lists."""

from __future__ import annotations

import dataclasses

import hypothesis
import neuron_sim
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from neuron_problems import CAP, assert_decodes_like_cpu, run_watched
from strategies import examples
from strategies_decode import DecodeProblem, Scope, build, decode_problems

from deepinfer_ops import config, neuron

ROUTES = {
    "per row": {"attn_table_slots": 0},
    "table": {"dense_attn_min_rows": 10**6},
    "dense table": {"dense_attn_min_rows": 2},
}
"""Settings under which a call of several rows takes the route."""

KERNELS = {"per row": ["gathered_attn"], "table": ["gathered_attn_idx"], "dense table": []}


def plan_of(inputs, **hints):
    return neuron.explain("flash_mla_decode", **inputs._asdict(), **hints)


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "exact"])
@pytest.mark.parametrize("route", ROUTES)
@given(st.data())
@examples(quick=8, ci=24)
def test_it_equals_the_cpu_kernel_on(route, fast, data):
    problem = data.draw(decode_problems(unique=route == "dense table", cap=CAP))
    inputs = build(problem, "neuron")
    with config.override(fast_e4m3=fast, **ROUTES[route]):
        plan = plan_of(inputs)
        hypothesis.assume(plan.route == route)
        poisoned = problem.poison != "none"
        got, seen = run_watched(inputs.run, nan=poisoned)
    ran = [call.name for call in seen.kernels]
    assert ran == (KERNELS[route] if problem.h_q <= 128 else [])
    assert ran == [plan.kernel] * plan.kernel_calls
    assert_decodes_like_cpu(got, build(problem))


@pytest.mark.parametrize("route", ROUTES)
@given(st.data())
@examples(quick=2, ci=8)
def test_it_equals_the_cpu_kernel_compiled_on(route, data):
    unique = route == "dense table"
    problem = data.draw(decode_problems(unique=unique, cap=CAP, topk_limit=140, places=st.just("contiguous")))
    inputs = build(problem, "neuron")
    with config.override(fast_e4m3=data.draw(st.booleans()), **ROUTES[route]):
        hypothesis.assume(plan_of(inputs).route == route)
        compiled = neuron_sim.compile_fullgraph(type(inputs).run)
        got = compiled(inputs)
    assert neuron_sim.graph_rules.check(compiled.graph) == []
    assert_decodes_like_cpu(got, build(problem))


@given(decode_problems(unique=True, cap=CAP))
@examples(quick=8, ci=24)
def test_without_nki_it_equals_the_cpu_kernel_and_calls_no_kernel(problem):
    with config.override(nki_attn=False):
        got, seen = run_watched(build(problem, "neuron").run, nan=problem.poison != "none")
    assert seen.kernels == []
    assert_decodes_like_cpu(got, build(problem))


@pytest.mark.parametrize(
    "problem",
    [
        DecodeProblem(b=0, main=Scope(topk=3)),
        DecodeProblem(b=0, s_q=2, main=Scope(topk=0)),
        DecodeProblem(b=2, main=Scope(topk=0)),
        DecodeProblem(b=2, main=Scope(topk=0), extra=Scope(topk=5), sink="finite"),
        DecodeProblem(b=2, main=Scope(topk=5), extra=Scope(topk=0), sink="infinite"),
        DecodeProblem(b=1, main=Scope(topk=1, page=1)),
        DecodeProblem(b=3, s_q=2, main=Scope(topk=4, holes=100), sink="infinite", poison="sink"),
        DecodeProblem(b=2, main=Scope(topk=4, lengths=(0, 4)), poison="query", seed=1),
        DecodeProblem(b=1, h_q=128, main=Scope(topk=130, page=64, blocks=3)),
        DecodeProblem(b=3, h_q=129, main=Scope(topk=130, page=64, blocks=3)),
    ],
    ids=lambda p: f"b{p.b}-s{p.s_q}-h{p.h_q}-k{p.main.topk}{'+' + str(p.extra.topk) if p.extra else ''}",
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_edges_of_sizes(problem, compiled):
    inputs = build(dataclasses.replace(problem, cap=CAP), "neuron")
    call = neuron_sim.compile_fullgraph(type(inputs).run) if compiled else type(inputs).run
    got, _ = run_watched(lambda: call(inputs), nan=True)
    assert_decodes_like_cpu(got, build(dataclasses.replace(problem, cap=CAP)))


def test_a_cache_without_blocks_gives_zeros():
    inputs = build(DecodeProblem(b=2, main=Scope(topk=3, holes=100)), "neuron")
    got, _ = run_watched(inputs._replace(k_cache=inputs.k_cache[:0]).run)
    assert not got.cpu().any()


@pytest.mark.parametrize("settings", [{}, {"attn_table_slots": 0}, {"dense_attn_min_rows": 2}], ids=str)
def test_slots_outside_the_cache_are_no_keys(settings):
    """Not slot 0's key either, which holds NaN bytes here, and which a dead entry is pointed at."""
    problem = DecodeProblem(b=2, h_q=3, main=Scope(page=4, blocks=8, topk=6, unique=True), seed=3, cap=CAP)
    on_cpu = build(problem)
    on_cpu.indices[:, 0] = torch.tensor([[5, -1, 7, -1, 9, -1], [-1] * 6])
    listed = on_cpu.k_cache.view(32, 528)
    listed[[5, 7, 9]] = listed[int(on_cpu.indices.max())].clone()
    listed[0] = 0xFF
    outside = on_cpu.indices.clone()
    outside[0, 0, [1, 3, 5]] = torch.tensor([32, 2**31 - 1, -7], dtype=torch.int32)
    outside[1, 0] = torch.tensor([33, -2, -(2**31), 2**31 - 1, 32, 1000], dtype=torch.int32)
    with config.override(**settings):
        on_neuron = on_cpu._replace(**{n: t.to("neuron") for n, t in on_cpu._asdict().items() if torch.is_tensor(t)})
        got, _ = run_watched(on_neuron._replace(indices=outside.to("neuron")).run)
    assert_decodes_like_cpu(got, on_cpu)


@pytest.mark.parametrize("settings", [{}, {"attn_table_slots": 0}, {"dense_attn_min_rows": 2}], ids=str)
def test_garbage_of_1e38_in_slot_0_outweighs_no_mask(settings):
    """Dead entries and padding lanes are pointed somewhere, and -1e30 is added to what they give."""
    problem = DecodeProblem(b=3, h_q=2, main=Scope(page=4, blocks=8, topk=5, unique=True, holes=40), cap=CAP, seed=8)
    on_cpu = build(problem)
    assert not (on_cpu.indices == 0).any()
    on_cpu.k_cache.view(32, 528)[0] = torch.tensor([0x77] * 512 + [246] * 16, dtype=torch.uint8)
    on_cpu = on_cpu._replace(q=on_cpu.q.abs() * 100, softmax_scale=1e-3)
    on_neuron = on_cpu._replace(**{n: t.to("neuron") for n, t in on_cpu._asdict().items() if torch.is_tensor(t)})
    with config.override(**settings):
        got, _ = run_watched(on_neuron.run)
    assert_decodes_like_cpu(got, on_cpu)


def test_a_slot_listed_twice_counts_twice_except_where_documented():
    problem = DecodeProblem(b=2, main=Scope(page=4, blocks=2, topk=3), cap=CAP)
    inputs = build(problem)
    twice = torch.tensor([[[1, 1, 2]], [[2, 2, 2]]], dtype=torch.int32)
    records = inputs.k_cache.view(8, 528)
    records[1], records[2] = (
        records[int(inputs.indices[0, 0, 0])].clone(),
        records[int(inputs.indices[1, 0, 0])].clone(),
    )
    listed = inputs._replace(indices=twice)
    moved = listed._replace(**{n: t.to("neuron") for n, t in listed._asdict().items() if torch.is_tensor(t)})
    for settings in ({}, {"attn_table_slots": 0}, {"nki_attn": False}):
        with config.override(**settings):
            assert_decodes_like_cpu(moved.run(), listed)
    once = inputs._replace(indices=torch.tensor([[[1, -1, 2]], [[2, -1, -1]]], dtype=torch.int32))
    with config.override(dense_attn_min_rows=2):
        assert_decodes_like_cpu(moved.run(), once)
