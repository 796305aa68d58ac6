"""weighted_scores against float64: drawn tokens, heads and keys."""

import nki_kernels
import nki_sim
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nki_kernels import BF16, assert_close, run, score_problem, scores

KERNEL = nki_kernels.load("index_score").weighted_scores


@st.composite
def problems(draw):
    n = 128 * draw(st.one_of(st.integers(1, 8), st.integers(9, 32)))
    heads = draw(st.one_of(st.sampled_from([1, 8, 32, 64, 128]), st.integers(1, 128)))
    tokens = draw(st.integers(1, max(1, min(300, 2**19 // (heads * n)))))
    return score_problem(draw(st.integers(0, 2**32 - 1)), tokens, heads, n)


@given(problems())
def test_scores_are_within_bf16_of_float64(problem):
    assert_close(run(KERNEL, *problem), scores(*problem))


@pytest.mark.parametrize(
    ("tokens", "heads", "n"),
    [(1, 64, 4096), (8, 64, 4096), (70, 64, 128), (3, 128, 4224), (130, 1, 256), (130, 2, 256), (9, 48, 384)],
)
def test_every_grouping_of_tokens_and_heads_is_exact(tokens, heads, n):
    problem = score_problem(1, tokens, heads, n)
    assert_close(run(KERNEL, *problem), scores(*problem))


def test_relu_comes_before_a_negative_weight():
    q, k, _ = score_problem(2, 2, 8, 128)
    assert (run(KERNEL, q, k, np.full((8, 2), -1.0, np.float32)) <= 0).all()


def test_integers_are_exact():
    rng = np.random.default_rng(3)
    q, k = (rng.integers(-1, 2, (rows, 128)).astype(BF16) for rows in (4 * 32, 640))
    weights = rng.integers(-8, 9, (32, 4)).astype(np.float32)
    np.testing.assert_array_equal(run(KERNEL, q, k, weights), scores(q, k, weights).value)


def test_a_token_does_not_see_the_others():
    q, k, weights = score_problem(4, 5, 24, 256)
    alone = run(KERNEL, q[48:72], k, np.ascontiguousarray(weights[:, 2:3]))
    np.testing.assert_allclose(run(KERNEL, q, k, weights)[2:3], alone, rtol=0, atol=1e-4)


def test_inputs_of_ones_give_128_for_each_head():
    out = run(KERNEL, np.ones((2 * 16, 128), BF16), np.ones((256, 128), BF16), np.ones((16, 2), np.float32))
    np.testing.assert_array_equal(out, np.full((2, 256), 128.0 * 16, np.float32))


@pytest.mark.skipif(nki_kernels.BACKEND != "simulator", reason="counts of nki_sim")
def test_program_does_not_grow_with_tokens_or_keys():
    sizes = []
    for tokens, n in ((32, 4096), (64, 4096), (32, 8192)):
        with nki_sim.trace() as trace:
            run(KERNEL, *score_problem(5, tokens, 64, n))
        sizes.append((trace.program_size, dict(trace.peak_bytes)))
    assert sizes[0] == sizes[1] == sizes[2]
