"""The plain-torch kernel definitions equal float64 formulas written out row by row."""

from __future__ import annotations

import math

import neuron_sim
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

kernels = neuron_sim.kernel_definitions
DEAD = -1e30


def bf16(*size):
    return torch.randn(*size).bfloat16()


def attention_row(q, kv, bias, sink, scale):
    """One row and head in float64."""
    logits = kv.double() @ q.double() * scale + bias.double()
    largest = max(logits.max().item(), sink)
    weights = torch.exp(logits - largest)
    return weights @ kv.double() / (weights.sum() + math.exp(sink - largest))


@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 5, 128]), st.integers(0, 2**31), st.booleans())
def test_attention_kernels_equal_the_formula(rows, heads, keys, seed, gathered):
    torch.manual_seed(seed)
    q, table = bf16(rows * heads, 16), bf16(9, 16)
    idx = torch.randint(0, 9, (rows, keys), dtype=torch.int32)
    kv = table[idx.flatten().long()]
    bias = torch.where(torch.rand(rows, keys) < 0.3, DEAD, 0.0)
    bias[:, 0] = 0
    sink = torch.randn(heads, 1)
    if gathered:
        result = kernels.gathered_attn_idx(q, table, idx, bias, sink, 0.3)
    else:
        result = kernels.gathered_attn(q, kv, bias, sink, 0.3)
    assert result.dtype == torch.bfloat16
    for row in range(rows):
        for head in range(heads):
            mine = kv[row * keys : (row + 1) * keys]
            want = attention_row(q[row * heads + head], mine, bias[row], sink[head].item(), 0.3)
            torch.testing.assert_close(result[row * heads + head].double(), want, rtol=2**-6, atol=2**-6)


def test_a_row_of_dead_zero_keys_gives_zero():
    q = bf16(2, 16)
    result = kernels.gathered_attn(
        q, torch.zeros(128, 16).bfloat16(), torch.full((1, 128), DEAD), torch.ones(2, 1), 1.0
    )
    assert torch.equal(result, torch.zeros_like(q))


def test_an_index_outside_the_table_is_refused():
    for bad in (-1, 4):
        idx = torch.full((1, 128), bad, dtype=torch.int32)
        with pytest.raises(IndexError, match="table of 4"):
            kernels.gathered_attn_idx(bf16(1, 16), bf16(4, 16), idx, torch.zeros(1, 128), torch.zeros(1, 1), 1.0)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9), st.integers(0, 2**31))
def test_weighted_scores_equal_the_formula(tokens, heads, n, seed):
    torch.manual_seed(seed)
    q, k, weights = bf16(tokens * heads, 128), bf16(n, 128), torch.randn(heads, tokens)
    result = kernels.weighted_scores(q, k, weights)
    assert result.dtype == torch.float32
    for t in range(tokens):
        for j in range(n):
            want = sum(
                max((q[t * heads + h].double() @ k[j].double()).item(), 0) * weights[h, t].item() for h in range(heads)
            )
            assert result[t, j].item() == pytest.approx(want, rel=1e-4, abs=1e-3)


@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**31))
def test_pooling_equals_the_formula_and_a_mask_hides_any_latent(n, r, d, seed):
    torch.manual_seed(seed)
    latent, score = torch.randn(n, r, d), torch.randn(n, r, d) * 50
    masked = torch.rand(n, r, d) < 0.3
    want = torch.zeros(n, d, dtype=torch.float64)
    for i in range(n):
        for c in range(d):
            live = [x for x in range(r) if not masked[i, x, c]]
            if live:
                weights = torch.softmax(score[i, live, c].double(), 0)
                want[i, c] = weights @ latent[i, live, c].double()
    result = kernels.softmax_pool(latent.masked_fill(masked, math.nan), score.masked_fill(masked, -math.inf))
    torch.testing.assert_close(result.double(), want, rtol=1e-5, atol=1e-5)
