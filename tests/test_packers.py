"""The packers of main caches against the independent encoders of pack.py, and the codes they never emit."""

from __future__ import annotations

import math

import cases
import ml_dtypes
import numpy as np
import oracle
import pack
import pytest
import torch
from compare import assert_equal, assert_same_bits
from hypothesis import given
from hypothesis import strategies as st
from oracle import TABLES
from pack import INDEX_FORMAT, KV_FORMAT, Layout
from strategies import SEEDS, examples

from deepinfer_ops.minifloat import NUMBERS
from deepinfer_ops.packers import dequantize_kv, encode, quantize_kv, write_kv
from deepinfer_ops.record_format import INDEX_FORMATS, KV_FORMATS

CAPS = st.sampled_from([448.0, 240.0, 224.0, 6.0])
FORMATS = [*KV_FORMATS.values(), *INDEX_FORMATS.values()]


def drawn_values(seed: int, rows: int, dim: int, spread: int, dtype: torch.dtype) -> torch.Tensor:
    """Finite numbers of both signs: normal ones, zeros, ties; magnitudes ``2^-spread .. 2^spread`` by group of 16."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, dim // 16, 16)) * np.exp2(
        rng.integers(-spread, spread + 1, (rows, dim // 16, 1))
    )
    # Few significant bits make ties; whole groups of zeros and lone zeros of both signs are common in caches.
    coarse = rng.integers(-64, 65, values.shape) * np.exp2(rng.integers(-spread, spread + 1, (rows, 1, 1)) - 4.0)
    values = np.where(rng.random((rows, dim // 16, 1)) < 0.4, coarse, values)
    values = np.where(rng.random((rows, dim // 16, 1)) < 0.1, 0.0, values)
    values = np.where(rng.random(values.shape) < 0.05, -0.0, values).reshape(rows, dim)
    return torch.from_numpy(np.clip(values, -3e38, 3e38).astype(np.float32)).to(dtype)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f"{f.bytes}-bytes")
@examples(60, 400)
@given(SEEDS, st.sampled_from([2, 12, 100, 127]), CAPS, st.sampled_from([torch.float32, torch.bfloat16]))
def test_bytes_are_those_of_the_independent_encoder(fmt, seed, spread, cap, dtype):
    values = drawn_values(seed, 4, fmt.dim, spread, dtype)
    data, scales = encode(values, fmt, cap)
    twin = (KV_FORMAT if fmt.dim == 512 else INDEX_FORMAT)[fmt.name]
    want_data, want_scales = pack.quantize(values.double().numpy(), twin, cap)
    assert np.array_equal(scales.numpy(), want_scales)
    assert np.array_equal(data.numpy(), want_data)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f"{f.bytes}-bytes")
@examples(20, 100)
@given(SEEDS, st.sampled_from([2, 100, 127]), CAPS)
def test_no_code_is_nan_or_past_the_cap_and_no_scale_is_zero(fmt, seed, spread, cap):
    data, scales = encode(drawn_values(seed, 8, fmt.dim, spread, torch.float32), fmt, cap)
    factors = TABLES[fmt.scale][scales.numpy()]
    assert (factors > 0).all()
    assert factors.max() <= (cap if fmt.scale == "e4m3" else 2.0**127)
    if fmt.element == "e4m3":
        assert np.abs(TABLES["e4m3"][data.numpy()]).max() <= cap


@pytest.mark.parametrize("fmt", KV_FORMATS.values(), ids=lambda f: f.name)
def test_dequantize_decodes_any_bytes_as_the_oracle_does(fmt):
    rng = np.random.default_rng(0)
    records = rng.integers(0, 256, (600, fmt.bytes), dtype=np.uint8)
    records[:256, fmt.data_bytes :] = np.arange(256)[:, None]  # every scale code
    want = oracle.decode_keys(records[:, : fmt.data_bytes], records[:, fmt.data_bytes :], oracle.KV[fmt.bytes])
    assert_equal(dequantize_kv(torch.from_numpy(records)), want)


@pytest.mark.parametrize(("fmt", "spread"), [("fp8", 115), ("fp4", 4)])
def test_what_came_out_of_a_record_goes_back_into_the_same_record(fmt, spread):
    values = dequantize_kv(quantize_kv(drawn_values(3, 300, 512, spread, torch.float32), fmt))
    again = dequantize_kv(quantize_kv(values, fmt))
    assert_same_bits(again, values)


@pytest.mark.parametrize("cap", [448.0, 224.0])
@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_the_error_is_half_a_step_of_the_groups_largest_binade(fmt, cap):
    values = torch.randn(200, 512, generator=torch.Generator().manual_seed(1))
    twin = KV_FORMAT[fmt]
    largest = values.reshape(200, twin.scales, twin.group).abs().amax(-1).repeat_interleave(twin.group, dim=1)
    # e4m3 steps by 1/16 in its top binade's upper part (a at 224..448 of scale s: step 32 s), e2m1 from 4 to 6 by 2.
    half_step = {"fp8": 16 / 224, "fp4": 1 / 5}[fmt]
    error = (dequantize_kv(quantize_kv(values, fmt, cap)).float() - values).abs()
    assert (error <= half_step * largest).all()


def test_e4m3_codes_are_torchs_and_e2m1_codes_are_ml_dtypes():
    # Every code's value, every midpoint, and the neighbours of both.
    for name, theirs in (("e4m3", ml_dtypes.float8_e4m3fn), ("e2m1", ml_dtypes.float4_e2m1fn)):
        exact = TABLES[name][np.isfinite(TABLES[name])]
        ladder = np.sort(exact)
        points = np.concatenate([ladder, (ladder[1:] + ladder[:-1]) / 2]).astype(np.float32)
        points = np.concatenate([points, np.nextafter(points, np.float32(-9e9)), np.nextafter(points, np.float32(9e9))])
        points = points[np.abs(points) <= ladder[-1]]
        codes = NUMBERS[name].encode(torch.from_numpy(points)).numpy()
        assert np.array_equal(codes, points.astype(theirs).view(np.uint8)), name
        if name == "e4m3":
            torchs = torch.from_numpy(points).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
            assert np.array_equal(codes, torchs)


def test_a_float32_next_to_a_tie_rounds_to_its_own_side():
    scales = torch.tensor([0.875, 0.9375, 1.125, 1.375, 13.0, 0.1015625])
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    ties = scales[:, None] * middles
    above, below = ties.nextafter(torch.tensor(math.inf)), ties.nextafter(torch.tensor(0.0))
    groups = torch.cat([6 * scales[:, None], above, below, torch.zeros(6, 1)], dim=1)
    values = torch.zeros(512)
    values[:96] = groups.flatten()
    decoded = dequantize_kv(quantize_kv(values, "fp4"))[:96].view(6, 16) / scales[:, None].bfloat16()
    upper, lower = [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0]
    assert_equal(decoded, [[6.0, *upper, *lower, 0.0]] * 6)


@pytest.mark.parametrize(("cap", "scales"), [(448.0, [120, 1, 127]), (224.0, [121, 1, 128])])
def test_scales_of_groups_with_maxima_3_zero_denormal_and_448(cap, scales):  # DeepGEMM 35
    values = torch.zeros(512)
    values[5], values[64 + 7], values[96 + 9] = 3.0, 2.0**-133, 448.0
    record = quantize_kv(values, "fp8", cap)
    assert record[512:516][[0, 2, 3]].tolist() == scales
    assert record[[5, 71, 105]].tolist() == ([0x7C, 0x04, 0x7E] if cap == 448 else [0x74, 0x04, 0x76])
    assert_equal(dequantize_kv(record), values.double().numpy())  # 2^-133 is the smallest bfloat16


@pytest.mark.parametrize(("cap", "largest"), [(448.0, 448.0), (224.0, 224.0)])
def test_an_fp4_group_past_6_times_the_cap_saturates_and_a_tiny_one_is_exact(cap, largest):  # DeepGEMM 35
    values = torch.zeros(512)
    values[0], values[1] = 3000.0, -3000.0  # would need scale 500
    values[16] = 6 * 2.0**-9
    values[48], values[49] = 6 * largest, 0.5 * largest  # the last group that fits
    record = quantize_kv(values, "fp4", cap)
    want = values.double().numpy()
    want[:2] = 6 * largest, -6 * largest
    assert_equal(dequantize_kv(record), want)
    assert record[257] == 1
    assert not np.isin(record[256:].numpy(), [0, 0x7F, 0xFF]).any()


def test_a_cap_that_is_no_e4m3_number_is_kept_below():
    values = torch.zeros(512)
    values[0], values[1] = 300.0, 150.0
    record = quantize_kv(values, "fp8", cap=300.0)
    assert record[512] == 127
    assert_equal(dequantize_kv(record)[:2], [288.0, 144.0])  # 300 is nearer to 288 than to 320; 150 ties to even


def test_the_even_element_is_packed_into_the_low_nibble():  # triton 5197
    values = torch.zeros(512)
    values[:4] = torch.tensor([6.0, 0.5, -0.5, -6.0])
    record = quantize_kv(values, "fp4")
    assert record[:2].tolist() == [0x17, 0xF9]
    assert record[256] == 0x38


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_the_operator_reads_what_the_packer_wrote(fmt):
    values = drawn_values(5, 6, 512, 3, torch.bfloat16)
    cache = torch.full((4, 3, 1, KV_FORMAT[fmt].bytes), 0xFF, dtype=torch.uint8)
    write_kv(cache, torch.tensor([11, 0, 7, -1, 4, 2]), quantize_kv(values, fmt))
    out = cases.decode(cache, [[[slot]] for slot in (11, 0, 7, 4, 2)], h_q=1).run()
    assert_equal(out[:, 0, 0], dequantize_kv(quantize_kv(values[[0, 1, 2, 4, 5]], fmt)).double().numpy())


@pytest.mark.parametrize("layout", [Layout(), Layout(16, 64, 3, 1, 7), Layout(token_pad=112, offset=1)])
@pytest.mark.parametrize("page", [1, 5])
def test_writing_touches_the_records_of_its_slots_and_nothing_else(layout, page):
    fmt = KV_FORMAT["fp4"]
    blocks = np.random.default_rng(0).integers(0, 256, (6, page, fmt.bytes), dtype=np.uint8)
    cache = pack.paged(blocks, layout, hostile="random")
    before = cache.untyped_storage().tolist()
    slots = torch.tensor([6 * page - 1, 0, 3], dtype=torch.int32)
    records = torch.arange(3 * fmt.bytes, dtype=torch.int64).reshape(3, -1).to(torch.uint8)
    write_kv(cache, slots, records)
    for slot, record in zip(slots.tolist(), records, strict=True):
        at = cache.storage_offset() + slot // page * cache.stride(0) + slot % page * cache.stride(1)
        before[at : at + fmt.bytes] = record.tolist()
    assert cache.untyped_storage().tolist() == before


def test_empty_input_and_any_leading_dimensions():
    assert quantize_kv(torch.zeros(0, 512), "fp4").shape == (0, 288)
    assert dequantize_kv(torch.zeros(2, 0, 528, dtype=torch.uint8)).shape == (2, 0, 512)
    values = drawn_values(9, 6, 512, 3, torch.float32)
    grid = quantize_kv(values.view(2, 3, 1, 512).transpose(0, 1))
    assert torch.equal(grid, quantize_kv(values).view(2, 3, 1, 528).transpose(0, 1))


def test_more_rows_than_are_encoded_at_once():
    values = torch.randn(5000, 512, generator=torch.Generator().manual_seed(2))
    records = quantize_kv(values, "fp4")
    assert torch.equal(records[4000:], quantize_kv(values[4000:], "fp4"))
