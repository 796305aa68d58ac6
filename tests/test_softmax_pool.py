"""``softmax_pool`` on CPU: the oracle's numbers, masks, NaN, and what must not change a bit."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from compare import assert_equal, assert_matches, assert_same_bits
from hypothesis import HealthCheck, given, settings
from strategies import examples
from strategies_pool import FP32_MAX, PoolInputs, PoolProblem, build, pool_problems

INF, NAN = math.inf, math.nan


@examples(100, 500)
@given(pool_problems())
def test_matches_the_float64_oracle(problem):
    inputs = build(problem)
    out = inputs.run()
    assert out.dtype == torch.bfloat16
    assert out.is_contiguous()
    assert_matches(out, inputs.exact())


def test_real_size_matches_the_oracle():
    inputs = build(PoolProblem(n=130, r=8, d=512, spread=5.0, scores=("-inf",)))
    assert_matches(inputs.run(), inputs.exact())


@pytest.mark.parametrize(
    ("scores", "latents", "want"),
    [
        ([5.0], [3.0], 3.0),
        ([-INF], [NAN], 0.0),
        ([0.0, -INF], [3.0, NAN], 3.0),
        ([-INF, 0.0, -INF], [INF, 3.0, -INF], 3.0),
        ([-INF, -INF], [NAN, INF], 0.0),
        ([NAN, 0.0], [1.0, 2.0], NAN),
        ([NAN, -INF], [1.0, 2.0], NAN),
        ([INF, 0.0], [1.0, 2.0], NAN),
        ([INF, INF], [1.0, 1.0], NAN),
        ([INF], [1.0], NAN),
        ([0.0, 0.0], [NAN, 2.0], NAN),
        ([0.0, 0.0], [INF, 2.0], INF),
        ([0.0, 0.0], [INF, -INF], NAN),
        ([FP32_MAX, -FP32_MAX], [1.0, 2.0], 1.0),
        ([-FP32_MAX] * 4, [1.0, 2.0, 3.0, 6.0], 3.0),
        ([-FP32_MAX, -INF], [5.0, 7.0], 5.0),
        ([1e4, 1e4], [1.0, 3.0], 2.0),
        ([0.0] * 4, [3e38] * 4, 3e38),
    ],
)
def test_special_values_stay_in_their_column(scores, latents, want):
    # The case stands in the middle column; its neighbours pool a plain 1, 1, ... to 1.
    score, latent = torch.zeros(2, len(scores), 17), torch.ones(2, len(scores), 17)
    score[1, :, 8], latent[1, :, 8] = torch.tensor(scores), torch.tensor(latents)
    expected = np.ones((2, 17))
    expected[1, 8] = torch.tensor(want).bfloat16().double()
    assert_equal(PoolInputs(score, latent).run(), expected)


def test_one_row_is_rounded_to_nearest_even():
    latent = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, -1 - 2.0**-8, 3.4e38])
    out = PoolInputs(torch.zeros(1, 1, 5), latent.reshape(1, 1, 5)).run()
    assert_equal(out, [[1.0, 1 + 2.0**-6, 1 + 2.0**-7, -1.0, INF]])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pool_problems())
def test_bits_do_not_depend_on_threads(threads, problem):
    inputs = build(problem)
    threads(1)
    alone = inputs.run()
    threads(5)
    assert_same_bits(inputs.run(), alone)


@given(pool_problems())
def test_every_row_is_its_own_call_in_any_order(problem):
    inputs = build(problem)
    out = inputs.run()
    order = torch.from_numpy(np.random.default_rng(problem.seed).permutation(problem.n))
    assert_same_bits(PoolInputs(*(t[order] for t in inputs)).run(), out[order])
    for n in range(problem.n):
        assert_same_bits(PoolInputs(*(t[n : n + 1] for t in inputs)).run(), out[n : n + 1], f"row {n}")


@given(pool_problems())
def test_strides_change_nothing(problem):
    plain = replace(problem, score_place="contiguous", latent_place="contiguous")
    assert_same_bits(build(problem).run(), build(plain).run())


@given(pool_problems())
def test_expanded_scores_are_read_as_they_stand(problem):
    inputs = build(replace(problem, n=max(problem.n, 1)))
    shared = inputs.score_rows[:1, :, :1].expand_as(inputs.latent_rows)
    expanded = PoolInputs(shared, inputs.latent_rows)
    assert_same_bits(expanded.run(), PoolInputs(shared.contiguous(), inputs.latent_rows).run())
