"""The compositions from torch operators give the operators' results, within the operators' tolerance."""

from __future__ import annotations

import pytest
import torch
from compare import assert_matches
from hypothesis import given
from strategies import examples
from strategies_decode import DecodeProblem, Scope, decode_problems
from strategies_decode import build as build_decode
from strategies_logits import build as build_logits
from strategies_logits import logits_problems
from strategies_pool import build as build_pool
from strategies_pool import pool_problems

from deepinfer_ops import reference


@examples(60, 200)
@given(decode_problems())
def test_decode_matches_the_oracle(problem):
    inputs = build_decode(problem)
    assert_matches(reference.flash_mla_decode(*inputs), inputs.exact())


@examples(60, 200)
@given(logits_problems())
def test_logits_match_the_oracle(problem):
    inputs = build_logits(problem)
    assert_matches(reference.paged_mqa_logits(**inputs._asdict()), inputs.exact())


@examples(60, 200)
@given(pool_problems())
def test_pooling_matches_the_oracle(problem):
    inputs = build_pool(problem)
    assert_matches(reference.softmax_pool(*inputs), inputs.exact())


@pytest.mark.parametrize("sink", [float("inf"), -float("inf"), 3.4e38, -200.0])
def test_extreme_sinks(sink):
    inputs = build_decode(DecodeProblem(b=2, h_q=3, main=Scope(topk=5, blocks=3, lengths=(5, 0))))
    inputs = inputs._replace(attn_sink=torch.full((3,), sink))
    assert_matches(reference.flash_mla_decode(*inputs), inputs.exact())
