"""Class B: masks, sinks and the edges of softmax."""

from __future__ import annotations

import math

import cases
import numpy as np
import pytest
import torch
from compare import assert_equal

INF = math.inf


@pytest.mark.parametrize(("q", "scale"), [(-1000.0, 1.0), (1000.0, -1.0)])
@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_hugely_negative_logits_still_rank(q, scale, order):  # flashinfer 4401
    # Logits of about -4.9e7 and -5.3e7: below any finite "minus infinity" of 16-bit habits.
    cache = cases.kv_cache({0: 96.0, 1: 104.0}, 4)
    assert_equal(cases.decode(cache, [[order]], q=q, softmax_scale=scale).run(), 96.0)


@pytest.mark.parametrize("position", [0, 63, 64, 127, 128, 200, 255])
def test_one_live_key_among_holes_in_any_tile(position):
    indices = torch.full((1, 1, 256), -1, dtype=torch.int32)
    indices[0, 0, position] = 2
    assert_equal(cases.decode(cases.kv_cache({2: 3.0}, 4), indices, q=-30.0).run(), 3.0)


@pytest.mark.parametrize("gap", [100.0, 1e4, 1e30])
@pytest.mark.parametrize("rising", [True, False])
def test_later_tiles_may_outweigh_or_underflow_earlier_ones(gap, rising):
    # Keys 1 then 2 (or the reverse), 300 of each: the winner's weight makes the others vanish, without NaN.
    cache = cases.kv_cache({0: 1.0, 1: 2.0}, 4)
    lists = [0] * 300 + [1] * 300 if rising else [1] * 300 + [0] * 300
    inputs = cases.decode(cache, [[lists]], q=1.0, softmax_scale=gap / 512)
    assert_equal(inputs.run(), 2.0)
    assert_equal(inputs._replace(softmax_scale=-gap / 512).run(), 1.0)


SINKS = [-INF, -3.3e38, -200.0, 0.0, 3.3e38, INF]


def test_sinks_from_minus_to_plus_infinity():  # cudnn-frontend 1095
    inputs = cases.decode(cases.kv_cache({0: 2.0}, 4), [[[-1]], [[0]]], h_q=6, attn_sink=torch.tensor(SINKS))
    want = np.zeros((2, 1, 6, 1))
    want[1, 0, :, 0] = [2, 2, 2, 1, 0, 0]
    assert_equal(inputs.run(), want)


@pytest.mark.parametrize("logit", [-1e30, -300.0, 300.0, 1e30])
def test_sinks_are_measured_against_the_largest_logit(logit):
    # The one key's logit is `logit` itself: the sink wins, ties or vanishes by their difference alone.
    sinks = torch.tensor([logit - 200, logit, logit + 200, -INF, INF, -3.3e38, 3.3e38])
    inputs = cases.decode(
        cases.kv_cache({0: 2.0}, 4), [[[0]]], h_q=7, q=1.0, softmax_scale=logit / 1024, attn_sink=sinks
    )
    # At 1e30 a difference of 200 is below fp32's resolution: a tie.
    edges = [2.0, 1.0, 0.0] if abs(logit) < 1e6 else [1.0, 1.0, 1.0]
    assert_equal(inputs.run()[0, 0, :, 0], [*edges, 2.0, 0.0, 2.0, 0.0])


@pytest.mark.parametrize("sink", SINKS)
def test_rows_without_keys_are_zero_whatever_query_and_sink_hold(sink):
    cache = cases.kv_cache({0: 2.0}, 4)
    for q in (0.0, 1e30, INF, math.nan):
        for lists in ([[[-1, -1]]], [[[]]]):
            inputs = cases.decode(cache, lists, q=q, attn_sink=torch.tensor([sink, math.nan]))
            assert_equal(inputs._replace(indices=inputs.indices.int()).run(), 0.0)


def leave_nan_in_freed_memory(*shape: int) -> None:
    """Allocators hand freed blocks out again: a row the operator forgets to write shows NaN."""
    blocks = [torch.full(shape, math.nan, dtype=torch.bfloat16) for _ in range(4)]
    del blocks


def test_requests_of_length_zero_between_others_are_zero():  # vllm 57094
    cache = cases.kv_cache({0: 1.0, 1: 2.0, 2: 6.0}, 4)
    inputs = cases.decode(cache, [[[0, 1, 2]]] * 4, topk_length=cases.int32([3, 0, 1, 0]))
    for _ in range(20):
        leave_nan_in_freed_memory(4, 1, 2, 512)
        assert_equal(inputs.run(), [[[[3.0]]], [[[0.0]]], [[[1.0]]], [[[0.0]]]])


def test_tokens_of_context_zero_between_others_are_minus_infinity():
    inputs = cases.logits(cases.index_cache([0x38] * 4, 4), [2, 0, 1, 0], [[0]] * 4, 300)
    want = np.full((4, 300), -INF)
    want[0, :2], want[2, 0] = 128.0, 128.0
    for _ in range(20):
        leave_nan_in_freed_memory(4, 512)
        assert_equal(inputs.run(), want)


def test_pooled_columns_without_live_rows_are_zero():
    score = torch.full((4, 3, 40), -INF)
    score[1], score[3, 2] = 0.0, 0.0
    latent = torch.full((4, 3, 40), 6.0)
    for _ in range(20):
        leave_nan_in_freed_memory(4, 40)
        assert_equal(torch.ops.deepinfer.softmax_pool(score, latent), [[0.0], [6.0], [0.0], [6.0]])
