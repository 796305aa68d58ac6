"""The hints of ``flash_mla_decode`` bound the work on Neuron and never change the result."""

from __future__ import annotations

import dataclasses
import logging

import hypothesis
import neuron_sim
import pytest
import torch
from compare import assert_same_bits
from hypothesis import given
from hypothesis import strategies as st
from neuron_problems import assert_decodes_like_cpu, run_watched
from neuron_requests import Requests, build, requests
from strategies import examples

from deepinfer_ops import config, neuron


def bounds(p: Requests) -> dict[str, object]:
    """As tight as the promise allows: a request has so many compressed keys, and one ring."""
    return {"max_requests": p.count, "max_context": (p.last_position + 1) // p.ratio}


USED_EXTRA = Requests(count=2, rows=3, rings=3, blocks=64)
USED_BOTH = Requests(count=2, rows=3, rings=40, blocks=64)
SUB_BLOCKS = Requests(count=2, rows=4, start=250, ring=512, rings=8, window=100, blocks=64, extra_topk=80)
CHUNK = Requests(rows=5, padding=2)
SHARED = Requests(rows=4, start=4200, page=16, blocks=70, extra_topk=1060)

HINTED = {
    "used blocks of one scope": (USED_EXTRA, {}, bounds, "table", ["WHOLE", "USED"]),
    "used blocks of both scopes": (USED_BOTH, {}, bounds, "table", ["USED", "USED"]),
    "ring in sub-blocks": (SUB_BLOCKS, {}, lambda p: {"max_requests": p.count}, "table", ["USED", "WHOLE"]),
    "dense over used blocks": (USED_BOTH, {"dense_attn_min_rows": 2}, bounds, "dense table", ["USED", "USED"]),
    "dense chunk": (CHUNK, {}, None, "dense chunk", ["RING", "LISTED"]),
    "shared scope": (
        SHARED,
        {"prefill_bucket": 4, "attn_table_slots": 0},
        lambda p: {},
        "shared scope",
        ["RECORDS", "SHARED"],
    ),
}
"""Name: the problem, settings, hints (None: the problem's ``chunk_*``), the route, and how each scope is read."""


def hinted(name: str, device: str):
    problem, settings, hints, route, reads = HINTED[name]
    inputs, chunk = build(problem, device)
    return inputs, chunk if hints is None else hints(problem), settings, route, reads


def plan_of(inputs, hints):
    return neuron.explain("flash_mla_decode", **inputs._asdict(), **hints)


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "exact"])
@pytest.mark.parametrize("name", HINTED)
def test_eager_and_compiled_equal_the_cpu_kernel_and_the_graph_keeps_the_rules(name, fast):
    inputs, hints, settings, route, reads = hinted(name, "neuron")
    with config.override(fast_e4m3=fast, **settings):
        plan = plan_of(inputs, hints)
        assert (plan.route, [scope.read.name for scope in plan.scopes]) == (route, reads)
        eager, seen = run_watched(lambda: inputs.run(**hints))
        assert [call.name for call in seen.kernels] == [plan.kernel] * plan.kernel_calls
        compiled = neuron_sim.compile_fullgraph(lambda hints: inputs.run(**hints))
        traced = compiled(hints)
        assert neuron_sim.graph_rules.check(compiled.graph) == []
        assert (torch.float8_e4m3fn in neuron_sim.graph_rules.dtypes(compiled.graph)) == fast
    assert_decodes_like_cpu(eager, hinted(name, "cpu")[0])
    assert_same_bits(traced, eager)


@given(requests(one=False), st.booleans())
@examples(quick=10, ci=40)
def test_bounds_change_nothing(problem, fast):
    inputs, _ = build(problem, "neuron")
    with config.override(fast_e4m3=fast):
        got, _ = run_watched(lambda: inputs.run(**bounds(problem)))
    assert_decodes_like_cpu(got, build(problem)[0])


@given(requests(one=False, rings=(128, 192, 256), compact=True), st.integers(0, 3))
@examples(quick=10, ci=40)
def test_sub_blocks_of_the_ring_change_nothing_with_any_number_of_requests_promised(problem, more):
    problem = dataclasses.replace(problem, rings=problem.rings + 12)
    inputs, _ = build(problem, "neuron")
    hints = {"max_requests": problem.count + more}
    plan = plan_of(inputs, hints)
    assert (plan.route, plan.scopes[0].cache.page, plan.scopes[0].read.name) == ("table", 64, "USED")
    got, _ = run_watched(lambda: inputs.run(**hints))
    assert_decodes_like_cpu(got, build(problem)[0])


@given(requests(one=True), st.booleans())
@examples(quick=12, ci=50)
def test_the_dense_chunk_changes_nothing(problem, fast):
    inputs, chunk = build(problem, "neuron")
    with config.override(fast_e4m3=fast):
        assert plan_of(inputs, chunk).route == "dense chunk"
        got, _ = run_watched(lambda: inputs.run(**chunk))
    assert_decodes_like_cpu(got, build(problem)[0])


@given(requests(one=True), st.sampled_from([128, 192]))
@examples(quick=6, ci=20)
def test_rows_that_start_in_another_ring_are_padding(problem, ring):
    """An engine pads a chunk with rows that look at the first slots of the cache: they get no keys and disturb none."""
    problem = dataclasses.replace(problem, padding=2, ring=ring, rings=4)
    (inputs, chunk), (on_cpu, _) = build(problem, "neuron"), build(problem)
    hypothesis.assume(int(on_cpu.indices[0, 0, 0]) >= ring)
    inputs.indices[0, -1, 0] = 1
    inputs.extra_indices[0, -1, 0] = 0
    chunk["chunk_offset_len"][problem.rows + 1] = torch.tensor([0, 1], dtype=torch.int32, device="neuron")
    got, _ = run_watched(lambda: inputs.run(**chunk))
    assert_decodes_like_cpu(got, on_cpu)


def test_the_check_mode_logs_the_difference_and_returns_the_gathered_result(caplog):
    inputs, chunk = build(CHUNK, "neuron")
    gathered = inputs.run()
    with config.override(prefill_dense_check=True), caplog.at_level(logging.WARNING, "deepinfer_ops"):
        assert plan_of(inputs, chunk).checked.route == "table"
        assert_same_bits(inputs.run(**chunk), gathered)
        (record,) = caplog.records
        difference, largest = record.args
        assert record.msg == "flash_mla_decode: dense chunk is off by %g, largest output %g"
        assert largest == gathered.cpu().abs().max()
        assert 0 <= difference <= 2**-6 * largest
        # The check finds a promise that does not hold: one more key than the lists have.
        chunk["chunk_offset_len"][:, 1] += 1
        assert_same_bits(inputs.run(**chunk), gathered)
        assert caplog.records[-1].args[0] > difference


def test_the_check_mode_compiled_runs_the_gathered_route_and_says_that_it_cannot_check(caplog):
    inputs, chunk = build(CHUNK, "neuron")
    with config.override(prefill_dense_check=True), caplog.at_level(logging.WARNING, "deepinfer_ops"):
        compiled = neuron_sim.compile_fullgraph(lambda chunk: inputs.run(**chunk))
        assert_same_bits(compiled(chunk), inputs.run())
    assert "not checked in a compiled graph" in caplog.records[0].message


def test_a_broken_promise_gives_wrong_rows_but_never_an_index_outside_the_table():
    """A block too many is masked: data cannot raise on the device, and an index outside a table could break it."""
    inputs, _ = build(dataclasses.replace(USED_BOTH, count=30), "neuron")
    broken = {"max_requests": 0, "max_context": 0}
    assert [scope.blocks for scope in plan_of(inputs, broken).scopes] == [1, 1]
    got, _ = run_watched(lambda: inputs.run(**broken))
    assert got.cpu().isfinite().all()


@pytest.mark.parametrize("offset", [0, 2])
def test_chunk_keys_start_at_the_offset_and_stale_table_entries_are_never_followed(offset):
    problem = dataclasses.replace(CHUNK, padding=0, extra_topk=40)
    inputs, chunk = build(problem, "neuron")
    lengths = torch.tensor([2, 1, 0, 2, 1], dtype=torch.int32)
    table, page = chunk["chunk_block_table"].cpu(), problem.page
    extra = torch.full((1, 5, 40), -1, dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        for t in range(offset, offset + length):
            extra[0, row, t] = table[t // page] * page + t % page
    table[problem.chunk_blocks - 1] = 2**31 - 1  # its keys are past every row's length here
    chunk["chunk_block_table"] = table.to("neuron")
    offset_len = torch.stack([torch.full((5,), offset, dtype=torch.int32), lengths], dim=1)
    chunk["chunk_offset_len"] = offset_len.to("neuron")
    got, _ = run_watched(lambda: inputs._replace(extra_indices=extra.to("neuron")).run(**chunk))
    assert_decodes_like_cpu(got, build(problem)[0]._replace(extra_indices=extra))
