"""What the packers refuse, in which words, and that nothing was written before."""

from __future__ import annotations

import math
import re

import pytest
import torch

from deepinfer_ops import packers, packers_index


def refused(message: str):
    return pytest.raises(RuntimeError, match=re.escape(message))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_value_that_is_not_finite_is_named_with_its_position(bad, dtype):
    values = torch.zeros(3, 2, 512, dtype=dtype)
    values[2, 0, 17] = bad
    values[2, 1, 0] = math.nan
    for fmt in ("fp8", "fp4"):
        with refused(f"deepinfer::quantize_kv: latents: expected finite values, got {bad} at [2, 0, 17]"):
            packers.quantize_kv(values, fmt)
        with refused(f"deepinfer::quantize_index: keys: expected finite values, got {bad} at [2, 0, 17]"):
            packers_index.quantize_index(values[..., :128], fmt)
        with refused(f"deepinfer::quantize_index_query: queries: expected finite values, got {bad} at [2, 0, 17]"):
            packers_index.quantize_index_query(values[..., :128], fmt)


@pytest.mark.parametrize("cap", [0.0, -1.0, 5.9, 449.0, math.nan, math.inf])
def test_a_cap_outside_the_codes_is_refused(cap):
    with refused(f"deepinfer::quantize_kv: cap: expected a number in 6..448, got {cap}"):
        packers.quantize_kv(torch.zeros(1, 512), cap=cap)


def test_unknown_format_wrong_dtype_and_wrong_width_are_refused():
    with refused("deepinfer::quantize_kv: format: expected 'fp8' or 'fp4', got 'fp6'"):
        packers.quantize_kv(torch.zeros(1, 512), "fp6")
    with refused("deepinfer::quantize_kv: latents: expected dtype bfloat16 or float32, got float64"):
        packers.quantize_kv(torch.zeros(1, 512, dtype=torch.float64))
    with refused("deepinfer::quantize_index: keys: expected shape [.., 128], got [1, 512]"):
        packers_index.quantize_index(torch.zeros(1, 512))
    with refused("deepinfer::quantize_kv: latents: expected shape [.., 512], got []"):
        packers.quantize_kv(torch.zeros(()))
    with refused("deepinfer::dequantize_kv: records: expected bytes 528 (fp8) or 288 (fp4), got 529"):
        packers.dequantize_kv(torch.zeros(2, 529, dtype=torch.uint8))
    with refused("deepinfer::dequantize_kv: records: expected dtype uint8, got int8"):
        packers.dequantize_kv(torch.zeros(2, 528, dtype=torch.int8))
    with refused("deepinfer::quantize_index_query: sf_dtype: expected torch.uint8 or torch.int16, got torch.int32"):
        packers_index.quantize_index_query(torch.zeros(1, 128), sf_dtype=torch.int32)


def test_data_and_scales_that_do_not_belong_together_are_refused():
    data = torch.zeros(3, 128, dtype=torch.uint8)
    with refused("deepinfer::dequantize_index: scales: expected shape [3, 4], got [2, 4]"):
        packers_index.dequantize_index(data, torch.zeros(2, 4, dtype=torch.uint8))
    with refused("deepinfer::dequantize_index: scales: expected shape [3, 2], got [3, 4]"):
        packers_index.dequantize_index(data, torch.zeros(3, 4, dtype=torch.int16))
    with refused("deepinfer::dequantize_index: data: expected element bytes 128 (fp8) or 64 (fp4), got 100"):
        packers_index.dequantize_index(data[:, :100], torch.zeros(3, 4, dtype=torch.uint8))
    with refused("deepinfer::dequantize_index: data: expected dtype uint8, int8 or float8_e4m3fn, got int16"):
        packers_index.dequantize_index(data.short(), torch.zeros(3, 4, dtype=torch.uint8))


def test_a_gradient_is_refused():
    with refused("requires_grad=True"):
        packers.quantize_kv(torch.zeros(1, 512, requires_grad=True))


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([0, 12], "slots: expected -1 or 0 <= slot < 12, got 12 at [1]"),
        ([-2, 99], "slots: expected -1 or 0 <= slot < 12, got -2 at [0]"),
        ([5, 5], "slots: expected each slot at most once, got 5 more than once"),
        ([5], "expected shape [1, "),
    ],
)
def test_bad_slots_are_refused_before_anything_is_written(slots, message):
    cache = torch.full((3, 4, 1, 288), 7, dtype=torch.uint8)
    with refused(message):
        packers.write_kv(cache, torch.tensor(slots), torch.zeros(2, 288, dtype=torch.uint8))
    pages = torch.full((3, 4, 1, 68), 7, dtype=torch.uint8)
    two = torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.uint8)
    with refused(message):
        packers_index.write_index(pages, torch.tensor(slots), *two)
    assert (cache == 7).all()
    assert (pages == 7).all()


def test_minus_one_skips_its_record_however_often_it_comes():
    cache = torch.full((1, 4, 1, 288), 7, dtype=torch.uint8)
    packers.write_kv(cache, torch.tensor([-1, 2, -1]), torch.arange(3, dtype=torch.uint8)[:, None].expand(3, 288))
    assert cache[0, :, 0, 0].tolist() == [7, 7, 1, 7]


def test_records_and_keys_of_another_format_are_refused():
    cache = torch.zeros(3, 4, 1, 288, dtype=torch.uint8)
    with refused("deepinfer::write_kv: records: expected shape [1, 288], got [1, 528]"):
        packers.write_kv(cache, torch.tensor([0]), torch.zeros(1, 528, dtype=torch.uint8))
    pages = torch.zeros(3, 4, 1, 68, dtype=torch.uint8)
    with refused("deepinfer::write_index: data: expected shape [1, 64], got [1, 128]"):
        packers_index.write_index(
            pages, torch.tensor([0]), torch.zeros(1, 128, dtype=torch.uint8), torch.zeros(1, 4, dtype=torch.uint8)
        )
    with refused("deepinfer::index_planes: cache: expected stride(1) 68, got 69"):
        packers_index.index_planes(torch.zeros(3, 4, 1, 69, dtype=torch.uint8)[..., :68])
