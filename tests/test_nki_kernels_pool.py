"""softmax_pool against float64: drawn N, R and D, masked entries, extreme scores, NaN."""

import nki_kernels
import nki_sim
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nki_kernels import assert_close, pool_problem, pooled, run

KERNEL = nki_kernels.load("compress_pool").softmax_pool
FP32_MIN, FP32_MAX = np.finfo(np.float32).min, np.finfo(np.float32).max


@st.composite
def problems(draw):
    r = draw(st.one_of(st.sampled_from([2, 4, 8, 128]), st.integers(2, 128)))
    d = draw(st.one_of(st.sampled_from([1, 64, 128, 512]), st.integers(1, 700)))
    count = draw(st.integers(1, max(1, min(150, 2**18 // (r * d)))))
    spread = draw(st.sampled_from([0.0, 1.0, 30.0, 1e5, 1e37]))
    masked = draw(st.sampled_from([0.0, 0.2, 0.9, 1.0]))
    return pool_problem(draw(st.integers(0, 2**32 - 1)), count, r, d, spread, masked)


@given(problems())
def test_pooling_is_fp32_exact_and_masked_entries_are_not_used(problem):
    assert_close(run(KERNEL, *problem), pooled(*problem))


@pytest.mark.parametrize(("count", "r", "d"), [(128, 8, 512), (4, 128, 512), (3, 300, 130), (1, 2, 1), (130, 3, 1100)])
def test_every_tiling_is_exact(count, r, d):
    problem = pool_problem(1, count, r, d)
    assert_close(run(KERNEL, *problem), pooled(*problem))


def test_a_column_of_masked_scores_is_zero_whatever_its_latents_hold():
    score = np.full((2, 3, 5), -np.inf, np.float32)
    for value in (np.nan, np.inf, 1.0):
        assert not run(KERNEL, np.full_like(score, value), score).any()


def test_scores_at_the_fp32_minimum_are_no_mask():
    latent = np.arange(4, dtype=np.float32).reshape(1, 4, 1)
    np.testing.assert_allclose(run(KERNEL, latent, np.full_like(latent, FP32_MIN)), [[1.5]], rtol=1e-6)


def test_the_largest_scores_do_not_overflow():
    latent = np.float32([[[1], [3]]])
    np.testing.assert_allclose(run(KERNEL, latent, np.full_like(latent, FP32_MAX)), [[2.0]], rtol=1e-6)
    np.testing.assert_array_equal(run(KERNEL, latent, np.float32([[[FP32_MAX], [FP32_MIN]]])), [[1.0]])


@pytest.mark.parametrize("where", ["latent", "score", "infinite score"])
def test_nan_stays_in_its_column(where):
    latent, score = pool_problem(2, 3, 4, 130, masked=0.0)
    if where == "latent":
        latent[1, 2, 129] = np.nan
    else:
        score[1, 2, 129] = np.nan if where == "score" else np.inf
    result = run(KERNEL, latent, score)
    assert np.argwhere(np.isnan(result)).tolist() == [[1, 129]]
    assert_close(result, pooled(latent, score))


def test_a_nan_latent_under_a_live_but_vanishing_weight_still_propagates():
    result = run(KERNEL, np.float32([[[1, 1], [np.nan, np.nan]]]), np.float32([[[0, 0], [-1e5, -np.inf]]]))
    assert np.isnan(result[0, 0])
    assert result[0, 1] == 1.0


def test_inputs_of_ones_give_ones():
    ones = np.ones((3, 2, 140), np.float32)
    np.testing.assert_array_equal(run(KERNEL, ones, ones), ones[:, 0])


@pytest.mark.skipif(nki_kernels.BACKEND != "simulator", reason="counts of nki_sim")
def test_program_does_not_grow_with_rows():
    sizes = []
    for count in (64, 256):
        with nki_sim.trace() as trace:
            run(KERNEL, *pool_problem(3, count, 8, 512))
        sizes.append((trace.program_size, dict(trace.peak_bytes)))
    assert sizes[0] == sizes[1]
