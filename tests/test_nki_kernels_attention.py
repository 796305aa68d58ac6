"""gathered_attn and gathered_attn_idx against float64: drawn sizes, sinks, scales, masks and tables."""

import nki_kernels
import nki_sim
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nki_kernels import BF16, assert_close, attention_problem, run

KERNELS = nki_kernels.load("sparse_attn")
SINKS = [0.0, -1e30, 1e30, -np.inf, np.inf]
on_the_simulator = pytest.mark.skipif(nki_kernels.BACKEND != "simulator", reason="counts of nki_sim")


def contiguous(problem):
    return run(KERNELS.gathered_attn, *problem)


def by_table(problem, seed=0):
    table, idx = problem.as_table(np.random.default_rng(seed))
    return run(KERNELS.gathered_attn_idx, problem.q, table, idx, problem.mask_bias, problem.sink, problem.scale)


BOTH = pytest.mark.parametrize("route", [contiguous, by_table])


@st.composite
def problems(draw):
    k = 128 * draw(st.one_of(st.integers(1, 9), st.integers(10, 32)))
    rows = draw(st.integers(1, max(1, min(9, 4096 // k))))
    heads = draw(st.one_of(st.sampled_from([1, 16, 32, 64, 96, 128]), st.integers(1, 128)))
    sink = draw(st.one_of(st.none(), st.sampled_from(SINKS), st.floats(-60, 60)))
    return attention_problem(
        draw(st.integers(0, 2**32 - 1)),
        rows,
        heads,
        k,
        scale=draw(st.sampled_from([512**-0.5, -0.3, 1.0, 2.0**-20, 700.0, 0.0])),
        largest=draw(st.floats(0.01, 60)),
        live=draw(st.sampled_from([0.0, 0.02, 0.7, 1.0])),
        sink=sink,
        repeats=draw(st.booleans()),
    )


@given(problems())
def test_gathered_attention_is_within_bf16_of_float64(problem):
    assert_close(contiguous(problem), problem.exact)


@given(problems(), st.integers(0, 2**32 - 1))
def test_table_attention_is_within_bf16_of_float64_for_repeated_unordered_indices(problem, seed):
    assert_close(by_table(problem, seed), problem.exact)


@BOTH
@pytest.mark.parametrize(("heads", "k"), [(128, 4096), (64, 2048), (1, 4096), (17, 4224), (8, 6400)])
def test_every_block_boundary_is_exact(route, heads, k):
    problem = attention_problem(1, 1, heads, k, largest=30.0)
    assert_close(route(problem), problem.exact)


@BOTH
@pytest.mark.parametrize("k", [128, 2304])
@pytest.mark.parametrize("sink", SINKS)
def test_a_row_without_a_live_key_is_zero_for_every_sink(route, k, sink):
    problem = attention_problem(2, 2, 5, k, sink=sink)
    problem.mask_bias[0] = -1e30
    keys = problem.keys.reshape(2, k, 512)
    keys[0] = np.random.default_rng(3).standard_normal((k, 512))  # not even zeros: the weights themselves are 0
    result = route(problem).astype(np.float32)
    assert not result[:5].any()
    assert result[5:].any() == (sink < 1e30)
    assert_close(route(problem), problem.exact)


@BOTH
@pytest.mark.parametrize("k", [256, 2304])
def test_an_infinite_sink_is_a_sink_of_1e30(route, k):
    for sign in (-1, 1):
        problem = attention_problem(4, 2, 6, k, sink=sign * np.inf)
        finite = problem._replace(sink=np.full_like(problem.sink, sign * 1e30))
        np.testing.assert_array_equal(route(problem).view(np.uint16), route(finite).view(np.uint16))


@BOTH
@pytest.mark.parametrize("k", [384, 2176])
def test_dead_lanes_do_not_reach_the_result(route, k):
    problem = attention_problem(5, 3, 20, k, live=0.5)
    garbage = np.random.default_rng(6).standard_normal((3, k, 512)) * 1e3
    dead = problem.mask_bias < 0
    other = problem._replace(keys=np.where(dead[..., None], garbage, problem.keys.reshape(3, k, 512)).astype(BF16))
    other = other._replace(keys=other.keys.reshape(-1, 512))
    np.testing.assert_array_equal(route(problem).view(np.uint16), route(other).view(np.uint16))


@BOTH
def test_live_logits_far_below_zero_are_not_lost_beside_dead_lanes(route):
    problem = attention_problem(7, 2, 4, 256, live=0.3, sink=-1e30)
    keys = problem.keys.reshape(2, 256, 512)
    q = np.broadcast_to(np.float32(0.5), problem.q.shape).astype(BF16)
    keys[problem.mask_bias == 0] = -1.0 - np.random.default_rng(8).random((512,)) / 8
    far = problem._replace(q=q, scale=1.0)  # logits near -270: exp of them is 0 in fp32
    assert_close(route(far), far.exact)
    assert np.abs(route(far).astype(np.float32)).min() > 0.5


@pytest.mark.parametrize("k", [128, 2176])
def test_inputs_of_ones_are_accepted(k):
    ones = [np.ones(s, BF16) for s in ((2 * 3, 512), (2 * k, 512), (4, 512))]
    mask, sink, idx = np.ones((2, k), np.float32), np.ones((3, 1), np.float32), np.ones((2, k), np.int32)
    first = run(KERNELS.gathered_attn, ones[0], ones[1], mask, sink, 1.0)
    second = run(KERNELS.gathered_attn_idx, ones[0], ones[2], idx, mask, sink, 1.0)
    assert first.shape == second.shape == (6, 512)
    assert np.isfinite(first.astype(np.float32)).all()
    assert np.isfinite(second.astype(np.float32)).all()


def program(route, rows, heads, k):
    with nki_sim.trace() as trace:
        route(attention_problem(9, rows, heads, k))
    return trace.program_size, dict(trace.peak_bytes)


@on_the_simulator
@BOTH
def test_program_and_memory_do_not_grow_with_rows_or_with_streamed_keys(route):
    assert program(route, 4, 64, 256) == program(route, 12, 64, 256)
    assert program(route, 1, 16, 4096) == program(route, 2, 16, 6144)
