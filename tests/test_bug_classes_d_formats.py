"""Class D: the edges of the number formats. (Every code pair is in test_decode_exhaustive.py.)"""

from __future__ import annotations

import math

import cases
import numpy as np
import pytest
import torch
from compare import assert_equal
from pack import KV_FORMAT, constant_record

INF = math.inf


def record(elements: list[int], scale: int = 127) -> np.ndarray:
    """An fp8 record whose first elements are given, the rest 0."""
    return np.array(elements + [0] * (512 - len(elements)) + [scale] * 16, dtype=np.uint8)


def decoded(one: np.ndarray, fmt: str = "fp8") -> torch.Tensor:
    """The record as attention over this one key returns it."""
    return cases.decode(cases.kv_cache({0: one}, 4, fmt=fmt), [[[0]]], h_q=1).run()[0, 0, 0]


@pytest.mark.parametrize("code", [0, 1, 2, 119, 126, 127, 128, 134, 253, 254, 255])
def test_ue8m0_codes_at_the_edges(code):  # TransformerEngine 3262
    want = 0.0 if code in (0, 255) else 2.0 ** (code - 127)
    assert_equal(decoded(record([0x38], code))[0], want)
    assert_equal(decoded(record([0x38], code))[1:], 0.0)


def test_the_largest_product_is_kept_and_the_next_one_is_zero():
    assert_equal(decoded(record([0x7E], 246))[0], 448 * 2.0**119)
    assert_equal(decoded(record([0x7E], 247))[0], 0.0)
    assert_equal(decoded(record([0xFE], 246))[0], -448 * 2.0**119)
    assert_equal(decoded(record([0xFE], 247))[0], 0.0)


def test_e4m3_nan_codes_are_zero_in_keys_and_448_is_not_nan():  # intel-xpu-backend-for-triton 7771
    assert_equal(decoded(record([0x7F, 0xFF, 0x7E, 0xFE]))[:4], [0.0, 0.0, 448.0, -448.0])


@pytest.mark.parametrize("nan", [0x7F, 0xFF])
def test_a_nan_scale_of_an_fp4_record_zeroes_its_16_elements_only(nan):
    one = constant_record(KV_FORMAT["fp4"], 0x22)  # 1.0, 1.0
    one[256 + 5] = nan
    want = np.ones(512)
    want[80:96] = 0.0
    assert_equal(decoded(one, "fp4"), want)


def test_fp4_scales_are_signed_and_may_be_subnormal():
    one = constant_record(KV_FORMAT["fp4"], 0x17)  # 6.0, 0.5
    one[256:259] = 0xB8, 0x01, 0x7E  # -1, 2^-9, 448
    out = decoded(one, "fp4")
    for group, scale in enumerate((-1.0, 2.0**-9, 448.0, 1.0)):
        assert_equal(out[16 * group : 16 * group + 16], np.tile([6.0 * scale, 0.5 * scale], 8))


@pytest.mark.parametrize("nan", [0x7F, 0xFF])
def test_e4m3_nan_codes_in_a_query_reach_that_tokens_live_columns(nan):
    inputs = cases.logits(cases.index_cache([0xB8] * 3, 1), [2, 2], [[0, 1]] * 2, 3)
    inputs.q_data.view(torch.uint8)[1, 0, 0, 64] = nan
    assert_equal(inputs.run(), [[0.0, 0.0, -INF], [math.nan, math.nan, -INF]])


@pytest.mark.parametrize(("byte", "first", "second"), [(0x17, 6.0, 0.5), (0xF9, -0.5, -6.0), (0x80, 0.0, 0.0)])
def test_the_even_element_is_the_low_nibble(byte, first, second):  # triton 5197
    one = constant_record(KV_FORMAT["fp4"], byte)
    assert_equal(decoded(one, "fp4"), np.tile([first, second], 256))


@pytest.mark.parametrize("query_dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize(("query", "want"), [(0x02, 6.0), (0x20, 0.5), (0x0A, 0.0), (0xA0, 0.0)])
def test_nibble_order_of_index_keys_and_queries_agrees(query, want, query_dtype):
    # Key: 6.0 then 0.5 in the first byte. Query: +-1.0 in element 0 or 1; relu removes the negative ones.
    kv = torch.zeros(1, 68, dtype=torch.uint8)
    kv[0, 0], kv[0, 64:] = 0x17, 127
    q = torch.zeros(1, 1, 1, 64, dtype=torch.uint8)
    q[..., 0] = query
    inputs = cases.logits(kv.view(1, 1, 1, 68), [1], [[0]], 1)
    assert_equal(inputs._replace(q_data=q.view(query_dtype)).run(), want)


@pytest.mark.parametrize("codes", [(200, 127), (127, 200), (128, 255), (0, 128)])
def test_int16_scales_are_two_bytes_the_low_one_first(codes):
    # One key of ones; the query is 1 in groups 0 and 1 only: 32 * 2^(a - 127) + 32 * 2^(b - 127).
    inputs = cases.logits(cases.index_cache([0x38], 1), [1], [[0]], 1)
    q = inputs.q_data.view(torch.uint8)
    q[..., 64:] = 0
    scale = torch.tensor([*codes, 127, 127], dtype=torch.uint8).view(torch.int16).reshape(1, 1, 1, 2)
    values = [0.0 if c == 0 else math.nan if c == 255 else 2.0 ** (c - 127) for c in codes]
    want = torch.tensor(32 * values[0] + 32 * values[1], dtype=torch.float64).bfloat16()
    assert_equal(inputs._replace(q_sf=scale).run(), want.double())


@pytest.mark.parametrize("key_fmt", ["fp8", "fp4"])
@pytest.mark.parametrize("query_fmt", ["fp8", "fp4"])
@pytest.mark.parametrize(("query_scale", "key_scale"), [(1, 253), (253, 1), (2, 254), (64, 190), (190, 64)])
def test_opposite_scales_cancel_exactly(query_scale, key_scale, query_fmt, key_fmt):
    # 128 products of 2^(a - 127) * 2^(b - 127): neither factor is anywhere near the result.
    kv = cases.index_cache([0x38 if key_fmt == "fp8" else 0x22], 1, key_fmt, scales=key_scale)
    inputs = cases.logits(kv, [1], [[0]], 1)
    if query_fmt == "fp4":
        inputs = inputs._replace(q_data=torch.full((1, 1, 1, 64), 0x22, dtype=torch.uint8))
    inputs.q_sf.fill_(query_scale)
    assert_equal(inputs.run(), 128 * 2.0 ** (query_scale + key_scale - 254))
