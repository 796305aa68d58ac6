"""What changes no bit of ``flash_mla_decode``: threads, neighbours, order of the batch, holes, strides, pages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from compare import assert_matches, assert_same_bits
from hypothesis import HealthCheck, given, settings
from pack import COMPACT
from strategies_decode import DecodeInputs, DecodeProblem, Scope, build, decode_problems

PER_BATCH = ("q", "indices", "topk_length", "extra_indices", "extra_topk_length")
BIG = DecodeProblem(
    b=2, s_q=2, h_q=128, main=Scope("fp8", 64, 20, 1024), extra=Scope("fp4", 16, 40, 600), sink="finite", logit=30.0
)


def take(inputs: DecodeInputs, batch: object, query: slice = slice(None)) -> DecodeInputs:
    """Some batch entries, and some of their query rows."""
    part = {name: t[batch] for name in PER_BATCH if (t := getattr(inputs, name)) is not None}
    for name in {"q", "indices", "extra_indices"} & set(part):
        part[name] = part[name][:, query]
    return inputs._replace(**part)


@pytest.mark.parametrize("count", [2, 3, 7, 16])
def test_bits_do_not_depend_on_threads_at_real_size(threads, count):
    inputs = build(BIG)
    threads(1)
    alone = inputs.run()
    threads(count)
    for _ in range(3):
        assert_same_bits(inputs.run(), alone)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(decode_problems())
def test_bits_do_not_depend_on_threads(threads, problem):
    inputs = build(problem)
    threads(1)
    alone = inputs.run()
    threads(5)
    assert_same_bits(inputs.run(), alone)


@given(decode_problems())
def test_every_row_is_its_own_call(problem):
    inputs = build(problem)
    out = inputs.run()
    for b, s in np.ndindex(problem.b, problem.s_q):
        row = take(inputs, slice(b, b + 1), slice(s, s + 1)).run()
        assert_same_bits(row, out[b : b + 1, s : s + 1], f"row {b}, {s}")


@pytest.mark.parametrize("row", [(0, 0), (1, 1)])
def test_every_row_is_its_own_call_at_real_size(row):
    inputs = build(BIG)
    b, s = (slice(i, i + 1) for i in row)
    assert_same_bits(take(inputs, b, s).run(), inputs.run()[b, s])


@given(decode_problems())
def test_permuting_the_batch_permutes_the_result(problem):
    inputs = build(problem)
    order = torch.from_numpy(np.random.default_rng(problem.seed).permutation(problem.b))
    assert_same_bits(take(inputs, order).run(), inputs.run()[order])


@given(decode_problems())
def test_inserted_holes_change_nothing(problem):
    inputs = build(problem)
    rng = np.random.default_rng(problem.seed)
    topk = inputs.indices.shape[2]
    places = np.sort(rng.choice(topk + 9, topk, replace=False))
    wider = torch.full((*inputs.indices.shape[:2], topk + 9), -1, dtype=torch.int32)
    wider[:, :, places] = inputs.indices
    lengths = inputs.topk_length
    if lengths is not None:
        # Where the list's n-th entry now stands: the new length ends just before it.
        lengths = torch.tensor([*places, topk + 9], dtype=torch.int32)[lengths.long()]
    assert_same_bits(inputs._replace(indices=wider, topk_length=lengths).run(), inputs.run())


@given(decode_problems())
def test_strides_and_pools_change_nothing(problem):
    plain = replace(
        problem,
        q_place="contiguous",
        small_place="contiguous",
        main=replace(problem.main, layout=COMPACT),
        extra=problem.extra and replace(problem.extra, layout=COMPACT),
    )
    assert_same_bits(build(problem).run(), build(plain).run())


@given(decode_problems())
def test_bytes_outside_the_live_slots_change_nothing(problem):
    def filled(hostile: str) -> torch.Tensor:
        extra = problem.extra and replace(problem.extra, hostile=hostile)
        return build(replace(problem, main=replace(problem.main, hostile=hostile), extra=extra)).run()

    clean = filled("zero")
    assert_same_bits(filled("ff"), clean)
    assert_same_bits(filled("nan"), clean)


@given(decode_problems())
def test_page_size_changes_nothing(problem):
    inputs = build(problem)
    size = inputs.k_cache.shape[3]
    records = inputs.k_cache.reshape(-1, size)
    out = inputs.run()
    for page in {1, 2, len(records)}:
        blocks = records[: len(records) // page * page].reshape(-1, page, 1, size)
        if len(blocks) * page == len(records):
            assert_same_bits(inputs._replace(k_cache=blocks).run(), out, f"page {page}")


@given(decode_problems())
def test_keys_may_move_from_main_to_extra(problem):
    problem = replace(problem, extra=None, main=replace(problem.main, lengths=None))
    inputs = build(problem)
    cut = problem.main.topk // 3
    head, tail = inputs.indices[:, :, :cut], inputs.indices[:, :, cut:]
    split = inputs._replace(indices=head, extra_k_cache=inputs.k_cache, extra_indices=tail)
    assert_matches(split.run(), inputs.exact())


@given(decode_problems())
def test_absent_lengths_mean_full_lengths(problem):
    problem = replace(problem, main=replace(problem.main, lengths=None))
    inputs = build(problem)
    full = torch.full((problem.b,), problem.main.topk, dtype=torch.int32)
    assert_same_bits(inputs._replace(topk_length=full).run(), inputs.run())


@given(decode_problems())
def test_sink_of_minus_infinity_is_no_sink(problem):
    inputs = build(replace(problem, sink="none"))
    sink = torch.full((problem.h_q,), -torch.inf)
    assert_same_bits(inputs._replace(attn_sink=sink).run(), inputs.run())
