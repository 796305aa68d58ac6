"""``flash_mla_decode`` on CPU: the oracle's numbers, and what NaN, infinities and extremes do."""

from __future__ import annotations

import math

import cases
import numpy as np
import pytest
import torch
from compare import assert_equal, assert_matches, assert_same_bits
from hypothesis import given
from oracle import decode_slots
from pack import KV_FORMAT, cache_of, constant_record, nearest_codes
from strategies import examples
from strategies_decode import DecodeProblem, Scope, build, decode_problems


@examples(150, 900)
@given(decode_problems())
def test_matches_the_float64_oracle(problem):
    inputs = build(problem)
    out = inputs.run()
    assert out.dtype == torch.bfloat16
    assert out.is_contiguous()
    assert_matches(out, inputs.exact())


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
@pytest.mark.parametrize(
    ("rows", "h_q", "topk", "extra"), [(1, 128, 2048, 0), (1, 1, 5000, 3), (3, 64, 640, 1152), (40, 5, 129, 65)]
)
def test_real_sizes_match_the_oracle(fmt, rows, h_q, topk, extra):
    main = Scope(fmt, page=64, blocks=20, topk=topk, content="model")
    second = Scope("fp4" if fmt == "fp8" else "fp8", page=16, blocks=90, topk=extra) if extra else None
    problem = DecodeProblem(b=rows, h_q=h_q, main=main, extra=second, sink="finite", logit=30.0)
    inputs = build(problem)
    assert_matches(inputs.run(), inputs.exact())


@pytest.mark.parametrize("logit", [1.0, -8.0, 30.0, 60.0, -60.0])
@pytest.mark.parametrize("offset", [1.0, 0.3])
def test_tied_logits_cancel_to_the_tolerance(logit, offset):
    """The sharpest look at a logit: no rounding of the result to bf16 hides it.

    Two keys hold the same numbers in different order, so a constant query gives them the same logit; their last 32
    elements are +1 and -1, the query's 0. There the exact output is 0, and half the error of the logits' difference
    is what comes out: 1e-5 is allowed. ``offset`` shifts the numbers: sum |q_i k_i| is 1.1 or 2.7 times the logit.
    """
    rng, rows, h_q = np.random.default_rng(0), 200, 32
    numbers = rng.standard_normal(480) + offset
    numbers /= np.abs(numbers).max()
    keys = [np.r_[rng.permutation(numbers), np.full(32, sign)] for _ in range(rows) for sign in (1.0, -1.0)]
    data = nearest_codes(256 * np.array(keys), "e4m3")
    scales = np.full((2 * rows, 16), 127 - 8, dtype=np.uint8)
    cache = cache_of(np.concatenate([data, scales], axis=1), page=4)
    inputs = cases.decode(cache, torch.arange(2 * rows, dtype=torch.int32).reshape(rows, 1, 2), h_q=h_q)
    total = decode_slots(cache, np.arange(1))[0, :480].sum()
    inputs.q[..., :480] = torch.from_numpy(np.linspace(0.9, 0.99, h_q) * logit * 512**0.5 / total)[:, None]
    assert_matches(inputs.run(), inputs.exact())


def test_hints_change_nothing():
    inputs = build(DecodeProblem(b=2, s_q=2, h_q=3, main=Scope(topk=9, blocks=3), extra=Scope(topk=5, blocks=2)))
    chunk = {"chunk_block_table": cases.int32([0, 1]), "chunk_blocks": 2, "chunk_offset_len": cases.int32([[0, 1]] * 4)}
    assert_same_bits(inputs.run(max_requests=2, max_context=12, **chunk), inputs.run())


def test_nan_query_reaches_its_head_only_and_only_with_a_live_key():
    inputs = cases.decode(cases.kv_cache({0: 2.0}, 4), [[[0], [-1]], [[0], [0]]], h_q=3)
    inputs.q[0, :, 1, 17] = math.nan
    want = np.full((2, 2, 3, 512), 2.0)
    want[0, 0, 1] = math.nan
    want[0, 1] = 0.0
    assert_equal(inputs.run(), want)


def test_infinite_query_follows_ieee_arithmetic_to_nan_in_its_head():
    # inf * k is infinite (NaN where k is 0), and the largest logit minus itself is inf - inf.
    inputs = cases.decode(cases.kv_cache({0: 2.0, 1: 0.0}, 4), [[[0]], [[1]]], h_q=2)
    inputs.q[:, :, 1, 5] = math.inf
    want = np.zeros((2, 1, 2, 512))
    want[0] = 2.0
    want[:, :, 1] = math.nan
    assert_equal(inputs.run(), want)


def test_query_under_zero_scale_still_propagates_nan():
    inputs = cases.decode(cases.kv_cache({0: 2.0}, 4), [[[0]]], h_q=2, softmax_scale=0.0)
    inputs.q[..., 0, 3] = math.nan
    assert_equal(inputs.run(), [[[[math.nan]] * 1 + [[2.0]]]])


def test_nan_sink_reaches_its_head_only_and_only_with_a_live_key():
    sink = torch.tensor([0.0, math.nan, -math.inf])
    inputs = cases.decode(cases.kv_cache({0: 2.0}, 4), [[[0]], [[-1]]], h_q=3, attn_sink=sink)
    assert_equal(inputs.run(), [[[[1.0], [math.nan], [2.0]]], [[[0.0]] * 3]])


def test_nan_query_beats_an_infinite_sink():
    inputs = cases.decode(cases.kv_cache({0: 2.0}, 4), [[[0]]], h_q=2, attn_sink=torch.full((2,), math.inf))
    inputs.q[0, 0, 1, 0] = math.nan
    assert_equal(inputs.run(), [[[[0.0], [math.nan]]]])


def test_a_slot_listed_twice_counts_twice():
    keys = cases.kv_cache({0: 3.0, 5: 6.0}, 8)
    assert_equal(cases.decode(keys, [[[0, 5, 0]]]).run(), 4.0)
    assert_equal(cases.decode(keys, [[[5]]], extra_k_cache=keys, extra_indices=cases.int32([[[0, 5]]])).run(), 5.0)


@pytest.mark.parametrize("n", [1, 2, 300])
def test_mean_of_the_largest_keys_does_not_overflow(n):
    # 448 * 2^119 is the largest key of a ue8m0 record; two of them already exceed fp32.
    largest = constant_record(KV_FORMAT["fp8"], 0x7E, 246)
    cache = cases.kv_cache(dict.fromkeys(range(n), largest), n)
    assert_equal(cases.decode(cache, [[list(range(n))]]).run(), 448 * 2.0**119)


@pytest.mark.parametrize("scale", [0.0, -0.0, 1.0, -1.0, 1e-30, 1e30, 5e-324])
def test_any_finite_softmax_scale_picks_the_right_key(scale):
    # q . k = +-512 * q. A scale this large makes one key win; one this small makes both equal.
    cache = cases.kv_cache({0: 1.0, 1: np.where(np.arange(528) < 512, 0xB8, 127).astype(np.uint8)}, 4)
    out = cases.decode(cache, [[[0, 1]]], q=1.0, softmax_scale=scale).run()
    assert_equal(out, 0.0 if abs(scale) < 1e-20 else math.copysign(1.0, scale))


def test_a_cache_without_blocks_serves_rows_without_keys():
    cache = torch.empty(0, 4, 1, 528, dtype=torch.uint8)
    assert_equal(cases.decode(cache, [[[-1, -1]]], q=math.nan).run(), 0.0)


def test_inputs_are_left_alone():
    inputs = build(DecodeProblem(b=2, h_q=3, main=Scope(topk=9, blocks=3, lengths=(4, 9)), sink="finite"))
    before = [t.clone() for t in inputs if isinstance(t, torch.Tensor)]
    inputs.run()
    for now, then in zip([t for t in inputs if isinstance(t, torch.Tensor)], before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("magnitude", [2.0**-133, 2.0**-126, 1.0, 2.0**127])
@pytest.mark.parametrize("sink", [-math.inf, 0.5, math.inf])
def test_queries_at_both_ends_of_bfloat16_keep_their_softmax(magnitude, sink):
    """Products of such queries leave float32 on either side; the logits, 1 and 2 here, do not."""
    inputs = cases.decode(cases.kv_cache({0: 1.0, 1: 2.0}, 4), [[[0, 1]]], h_q=2)
    inputs.q[:] = magnitude
    inputs = inputs._replace(softmax_scale=1 / (512 * magnitude), attn_sink=torch.tensor([sink, -math.inf]))
    assert_matches(inputs.run(), inputs.exact())
