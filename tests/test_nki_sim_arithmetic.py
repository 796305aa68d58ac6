"""Arithmetic of the simulated engines: conversions, accumulation, registers, bit operations."""

import ml_dtypes
import nki_sim
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from nki_sim import dtypes
from nki_sim.examples import drawn
from test_nki_sim_examples_compute import stored

nki_sim.install()
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

import nki  # noqa: E402

BF16 = ml_dtypes.bfloat16
FP32 = st.floats(width=32, allow_nan=True, allow_infinity=True)


@nki.jit
def cast(a, dtype):
    result = nl.ndarray(a.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result, src=nl.load(a))
    return stored(result)


@given(hnp.arrays(np.float32, (4, 8), elements=FP32))
def test_fp32_rounds_to_nearest_even_and_saturates_into_integers(a):
    for dtype, low, high in ((nl.int8, -128, 127), (nl.uint8, 0, 255), (nl.int32, -(2**31), 2**31 - 1)):
        got = nki.simulate(cast)(a, dtype)
        for value, result in zip(a.reshape(-1).tolist(), got.reshape(-1).tolist(), strict=True):
            if value != value:
                assert result == 0
            else:
                assert result == min(max(round(max(min(value, 1e12), -1e12)), low), high)


@given(hnp.arrays(np.float32, (4, 8), elements=FP32))
def test_fp32_rounds_to_the_nearest_bfloat16(a):
    got = nki.simulate(cast)(a, nl.bfloat16).astype(np.float64)
    bits = a.view(np.uint32) & np.uint32(0xFFFF0000)
    below = bits.view(np.float32).astype(np.float64)  # towards zero
    with np.errstate(over="ignore", invalid="ignore"):
        above = (bits + np.uint32(0x10000)).view(np.float32).astype(np.float64)
        finite = np.isfinite(a) & np.isfinite(above)
        nearest = np.minimum(np.abs(a - below), np.abs(a - above))
    np.testing.assert_array_equal(np.abs(got[finite] - a[finite]), nearest[finite])
    np.testing.assert_array_equal(np.isnan(got), np.isnan(a))


@pytest.mark.parametrize("name", sorted(dtypes.FP8 | {"bfloat16", "float16"}))
def test_every_code_of_a_small_float_survives_a_round_trip_through_fp32(name):
    codes = np.arange(256 ** dtypes.itemsize(name), dtype=f"u{dtypes.itemsize(name)}").view(dtypes.NUMPY[name])
    wide = dtypes.to_fp32(codes, name)
    number = ~np.isnan(wide)
    np.testing.assert_array_equal(wide, codes.astype(np.float32))
    with np.errstate(invalid="ignore"):
        back = dtypes.from_fp32(wide, name)
    np.testing.assert_array_equal(back[number], codes[number])


def test_float8_e4m3_is_the_ieee_like_form_with_a_maximum_of_240():
    got = nki.simulate(cast)(np.float32([[240.0, 247.0, 249.0, -500.0]]), nl.float8_e4m3).astype(np.float32)
    np.testing.assert_array_equal(got, [[240, 240, np.inf, -np.inf]])


def test_tfloat32_keeps_ten_mantissa_bits():
    ulp = 2.0**-10
    values = np.float32([1 + ulp * 0.5, 1 + ulp * 1.5, 1 + ulp * 0.75, np.inf, -1 - ulp * 0.5])
    np.testing.assert_array_equal(dtypes.round_tfloat32(values), np.float32([1, 1 + 2 * ulp, 1 + ulp, np.inf, -1]))


def test_equal_dtypes_are_copied_bit_for_bit():
    bits = np.random.default_rng(0).integers(0, 2**16, (128, 64)).astype(np.uint16)  # NaN payloads included
    got = nki.simulate(cast)(bits.view(BF16), nl.bfloat16)
    np.testing.assert_array_equal(got.view(np.uint16), bits)


@nki.jit
def fresh_outputs():
    a = nl.ndarray((4, 4), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    b = nl.ndarray((4, 4), dtype=nl.int32, buffer=nl.shared_hbm)
    return a, b


def test_memory_never_written_is_nan_or_four():
    a, b = nki.simulate(fresh_outputs)()
    assert np.isnan(a.astype(np.float32)).all()
    assert (b == 4).all()


# ---- PSUM ----------------------------------------------------------------------------------------------------------


@nki.jit
def products(a, b, flags):
    """Sum of a[i].T @ b[i], the i-th with accumulate=flags[i]."""
    total = nl.ndarray((a.shape[2], b.shape[2]), dtype=nl.float32, buffer=nl.psum)
    for i in range(len(flags)):
        nisa.nc_matmul(dst=total, stationary=nl.load(a[i]), moving=nl.load(b[i]), accumulate=flags[i])
    evicted = nl.ndarray(total.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=evicted, src=total)
    return stored(evicted)


@pytest.mark.parametrize(("flags", "kept"), [((False, True, True), (0, 1, 2)), ((None,) * 3, (0, 1, 2))])
def test_psum_accumulates_from_the_first_write(flags, kept):
    a, b = drawn(3, 128, 32).astype(BF16), drawn(3, 128, 96, seed=1).astype(BF16)
    expected = sum(a[i].astype(np.float64).T @ b[i].astype(np.float64) for i in kept)
    np.testing.assert_allclose(nki.simulate(products)(a, b, flags), expected, rtol=1e-6)


def test_accumulate_false_overwrites():
    a, b = drawn(3, 128, 32).astype(BF16), drawn(3, 128, 96, seed=1).astype(BF16)
    expected = sum(a[i].astype(np.float64).T @ b[i].astype(np.float64) for i in (1, 2))
    np.testing.assert_allclose(nki.simulate(products)(a, b, (None, False, True)), expected, rtol=1e-6)


@nki.jit
def overlapping(a, b):
    total = nl.ndarray((32, 96), dtype=nl.float32, buffer=nl.psum)
    x, y = nl.load(a), nl.load(b)
    nisa.nc_matmul(dst=total[:, 0:64], stationary=x, moving=y[:, 0:64])
    nisa.nc_matmul(dst=total[:, 32:96], stationary=x, moving=y[:, 32:96])
    evicted = nl.ndarray(total.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=evicted, src=total)
    return stored(evicted)


def test_inferred_accumulation_is_decided_for_each_location():
    a, b = drawn(128, 32).astype(BF16), drawn(128, 96, seed=1).astype(BF16)
    once = a.astype(np.float64).T @ b.astype(np.float64)
    once[:, 32:64] *= 2
    np.testing.assert_allclose(nki.simulate(overlapping)(a, b), once, rtol=1e-6)


# ---- registers and reductions --------------------------------------------------------------------------------------


@nki.jit
def blockwise_softmax(scores, scale):
    """Row softmax with the sum kept in ScalarE's registers over two blocks."""
    tile = nl.load(scores)
    lowest = nl.ndarray((scores.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=lowest, op=nl.maximum, data=tile, axis=1, negate=True)
    nisa.tensor_scalar(dst=lowest, data=lowest, op0=nl.multiply, operand0=scale)
    total = nl.ndarray((scores.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    width = scores.shape[1] // 2
    for block in range(2):
        part = tile[:, nl.ds(block * width, width)]
        nisa.activation(
            dst=part,
            op=nl.exp,
            data=part,
            bias=lowest,
            scale=scale,
            reduce_op=nl.add,
            reduce_cmd=nisa.reduce_cmd.reset_reduce if block == 0 else nisa.reduce_cmd.reduce,
            reduce_res=total if block == 1 else None,
        )
    nisa.reciprocal(dst=total, data=total)
    nisa.activation(dst=tile, op=nl.copy, data=tile, scale=total)
    return stored(tile)


def test_scale_bias_and_row_sum_fuse_into_one_activation():
    scores = drawn(64, 256) - 50
    wide = scores.astype(np.float64) * 0.3
    expected = np.exp(wide - wide.max(axis=1, keepdims=True))
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(nki.simulate(blockwise_softmax)(scores, 0.3), expected, rtol=1e-5, atol=1e-9)


@nki.jit
def integer_sum(a, b, engine):
    x = nl.load(a)
    nisa.tensor_tensor(dst=x, data1=x, data2=nl.load(b), op=nl.add, engine=engine)
    return stored(x)


def test_int32_addition_is_exact_on_gpsimd_and_rounded_on_the_vector_engine():
    a, b = np.full((1, 1), 2**24 + 1, np.int32), np.full((1, 1), 2, np.int32)
    assert nki.simulate(integer_sum)(a, b, nisa.engine.unknown) == 2**24 + 3
    assert nki.simulate(integer_sum)(a, b, nisa.engine.vector) == 2**24 + 2
    wrapped = nki.simulate(integer_sum)(np.full((1, 1), 2**31 - 1, np.int32), b, nisa.engine.gpsimd)
    assert wrapped == -(2**31) + 1


@nki.jit
def e4m3fn_pairs(packed):
    """uint32 of four e4m3fn bytes to fp16 pairs (even bytes, odd bytes), both worth 2^-8 of the value."""
    words = nl.load(packed).view(nl.uint32)
    even = nl.ndarray(words.shape, dtype=nl.uint32, buffer=nl.sbuf)
    odd = nl.ndarray(words.shape, dtype=nl.uint32, buffer=nl.sbuf)
    sign = nl.ndarray(words.shape, dtype=nl.uint32, buffer=nl.sbuf)
    for target, magnitude, left, mask, shift in (
        (even, 0x007F007F, True, 0x00800080, 8),
        (odd, 0x7F007F00, False, 0x80008000, 0),
    ):
        nisa.tensor_scalar(
            dst=target,
            data=words,
            op0=nl.bitwise_and,
            operand0=magnitude,
            op1=nl.left_shift if left else nl.right_shift,
            operand1=7 if left else 1,
        )
        nisa.tensor_scalar(dst=sign, data=words, op0=nl.bitwise_and, operand0=mask, op1=nl.left_shift, operand1=shift)
        nisa.tensor_tensor(dst=target, data1=target, data2=sign, op=nl.bitwise_or)
    return stored(even.view(nl.float16)), stored(odd.view(nl.float16))


def test_bit_operations_decode_every_finite_e4m3fn_code():
    codes = np.arange(256, dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    even, odd = nki.simulate(e4m3fn_pairs)(codes.reshape(1, 256))
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(even[0].astype(np.float64) * 2**8, values[0::2])
    np.testing.assert_array_equal(odd[0].astype(np.float64) * 2**8, values[1::2])


@nki.jit
def find_twice(data, vals):
    index = nl.ndarray((1, 8), dtype=nl.uint32, buffer=nl.sbuf)
    replaced = nl.ndarray((1, 8), dtype=nl.uint16, buffer=nl.sbuf)
    result = nl.ndarray(data.shape, dtype=nl.float32, buffer=nl.sbuf)
    x, wanted = nl.load(data), nl.load(vals)
    nisa.nc_find_index8(dst=index, data=x, vals=wanted)
    nisa.nc_match_replace8(dst=result, data=x, vals=wanted, imm=0.0, dst_idx=replaced)
    return stored(index), stored(replaced)


def test_duplicates_pair_with_positions_upwards_in_find_and_downwards_in_replace():
    data = np.float32([[1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8]])
    index, replaced = nki.simulate(find_twice)(data, np.float32([[3, 8, 8, 8, 8, 8, 8, 8]]))
    np.testing.assert_array_equal(index, [[2, 4, 5, 6, 7, 8, 9, 10]])
    np.testing.assert_array_equal(replaced, [[2, 10, 9, 8, 7, 6, 5, 4]])
    index, replaced = nki.simulate(find_twice)(data, np.float32([[3, 3, 9, 8, 8, 8, 8, 8]]))
    np.testing.assert_array_equal(index[0, :3], [2, 2**32 - 1, 2**32 - 1])
    np.testing.assert_array_equal(replaced[0, :3], [2**16 - 1, 2, 2**16 - 1])
