"""``paged_mqa_logits`` on CPU: the oracle's numbers, the form of the result, NaN and masks."""

from __future__ import annotations

import math
from dataclasses import replace

import cases
import numpy as np
import pytest
import torch
from compare import assert_equal, assert_matches, assert_same_bits
from hypothesis import given
from strategies import examples
from strategies_logits import LogitsProblem, build, logits_problems

INF = math.inf


@examples(120, 800)
@given(logits_problems())
def test_matches_the_float64_oracle(problem):
    inputs = build(problem)
    out = inputs.run()
    assert out.dtype == torch.bfloat16
    assert out.stride() == (-(-problem.max_context_len // 256) * 256, 1)
    assert_matches(out, inputs.exact(), "logits")


@pytest.mark.parametrize(("query", "keys"), [("fp8", "fp8"), ("fp4", "fp4"), ("fp8", "fp4"), ("fp4", "fp8")])
def test_real_sizes_match_the_oracle(query, keys):
    problem = LogitsProblem(
        contexts=(4096, 17, 3000),
        heads=64,
        query=query,
        keys=keys,
        page_kv=64,
        pages=70,
        width=64,
        max_context_len=4096,
    )
    inputs = build(problem)
    assert_matches(inputs.run(), inputs.exact(), "logits")


@pytest.mark.parametrize("poison", ["query", "scale", "weight"])
def test_nan_of_a_token_fills_its_live_positions_only(poison):
    # Three tokens of contexts 3, 2, 4. All dot products are negative or 0: relu must not hide the NaN.
    cache = cases.index_cache([0xB8] * 4, 4)
    inputs = cases.logits(cache, [3, 2, 4], [[0]] * 3, 6, heads=2)
    if poison == "query":
        inputs.q_data.view(torch.uint8)[1, 0, 1, 77] = 0xFF
    elif poison == "scale":
        inputs.q_sf[1, 0, 1, 3] = 255
    else:
        inputs.weights[1, 1] = math.nan
    want = np.full((3, 6), -INF)
    want[0, :3], want[1, :2], want[2, :4] = 0.0, math.nan, 0.0
    assert_equal(inputs.run(), want)


def test_infinite_weight_follows_ieee_arithmetic():
    inputs = cases.logits(cases.index_cache([0x38, 0xB8], 2), [2], [[0]], 2)
    inputs.weights[0, 0] = INF
    assert_equal(inputs.run(), [[INF, math.nan]])  # inf * 128, inf * relu(-128)


def test_relu_is_per_head_and_weights_may_be_negative():
    # Heads see +-128 and +-256; each keeps its positive part before it is weighted.
    inputs = cases.logits(cases.index_cache([0x38, 0xB8], 2), [2], [[0]], 2, heads=3)
    inputs.q_data.view(torch.uint8)[0, 0] = torch.tensor([[0x38], [0xB8], [0x40]], dtype=torch.uint8)
    weights = torch.tensor([[1.0, -0.5, 4.0]])
    assert_equal(inputs._replace(weights=weights).run(), [[128 + 4 * 256, -0.5 * 128]])


def test_contexts_are_cut_at_the_table_and_at_max_context_len():
    cache = cases.index_cache([0x38] * 8, 4)
    contexts, table = [99, 5, 0, 2**31 - 1], [[0, 1], [1, 0], [0, 0], [1, 1]]
    for columns in (0, 1, 4, 8, 11):
        out = cases.logits(cache, contexts, table, columns).run()
        live = np.arange(columns) < np.minimum([[8], [5], [0], [8]], columns)
        assert_equal(out, np.where(live, 128.0, -INF))


def test_a_table_without_columns_has_no_positions():
    cache = cases.index_cache([0x38] * 4, 4)
    assert_equal(cases.logits(cache, [3], [[]], 5).run(), [[-INF] * 5])


def test_result_is_rounded_once():
    # 37 heads of 128 * 1.125^2 * (1 + 2^-7) = 163.265625 sum to 6040.8, which rounds to 6048. Rounding each head's
    # value or the running sum to bf16 as well would give 6016 or 5952.
    inputs = cases.logits(cases.index_cache([0x39], 1), [1], [[0]], 1, heads=37, q=0x39)
    inputs.weights.fill_(1 + 2.0**-7)
    assert_equal(inputs.run(), [[6048.0]])


@given(logits_problems())
def test_weights_of_either_dtype_give_the_same_bits(problem):
    inputs = build(replace(problem, weight_dtype=torch.bfloat16))
    assert_same_bits(inputs._replace(weights=inputs.weights.float()).run(), inputs.run())


@given(logits_problems())
def test_query_forms_give_the_same_bits(problem):
    plain = replace(problem, query="fp4", nibble_dtype=torch.uint8, packed_scales=False)
    other = replace(plain, nibble_dtype=torch.int8, packed_scales=True)
    assert_same_bits(build(other).run(), build(plain).run())
