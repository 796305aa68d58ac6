"""The packers of index keys, pages and queries."""

from __future__ import annotations

import math
import re
from pathlib import Path

import cases
import numpy as np
import oracle
import pack
import pytest
import torch
from compare import assert_equal, assert_matches
from pack import INDEX_FORMAT, Layout
from test_packers import drawn_values

import deepinfer_ops
from deepinfer_ops.packers_index import (
    dequantize_index,
    index_planes,
    quantize_index,
    quantize_index_query,
    write_index,
)


@pytest.mark.parametrize(("cap", "scales"), [(448.0, [120, 1, 127]), (224.0, [121, 1, 128])])
def test_scale_bytes_stay_apart_when_groups_differ_wildly(cap, scales):  # DeepGEMM 35
    keys = torch.zeros(128)
    keys[3], keys[64], keys[127] = 3.0, 2.0**-133, 448.0
    data, sf = quantize_index(keys, "fp8", cap)
    assert sf[[0, 2, 3]].tolist() == scales
    assert_equal(dequantize_index(data, sf), keys.double().numpy())
    # Two to an int16: the same bytes in the same order, whatever their sign bit.
    query, packed = quantize_index_query(keys, "fp8", cap, sf_dtype=torch.int16)
    assert packed.view(torch.uint8).tolist() == sf.tolist()
    assert query.view(torch.uint8).tolist() == data.tolist()
    low_first = [(int(word) & 0xFFFF) >> shift & 0xFF for word in packed for shift in (0, 8)]
    assert low_first == sf.tolist()


def test_a_page_is_all_elements_then_all_scales():  # DeepGEMM 311
    cache = torch.full((1, 4, 1, 132), 0xFF, dtype=torch.uint8)
    ones = torch.full((4, 128), 0x38, dtype=torch.uint8) + torch.tensor([[0], [8], [12], [16]], dtype=torch.uint8)
    scales = torch.tensor([127, 128, 129, 130], dtype=torch.uint8)[:, None].expand(4, 4)
    write_index(cache, torch.arange(4), ones, scales)  # tokens of 1, 2, 3, 4
    run = cache.flatten().tolist()
    assert run[:512] == [0x38] * 128 + [0x40] * 128 + [0x44] * 128 + [0x48] * 128
    assert run[512:] == [127] * 4 + [128] * 4 + [129] * 4 + [130] * 4
    assert_equal(cases.logits(cache, [4], [[0]], 4).run(), [[128.0, 512.0, 1536.0, 4096.0]])
    assert_equal(dequantize_index(*index_planes(cache))[0, :, 0], [1.0, 4.0, 12.0, 32.0])


def test_nibbles_of_index_keys_and_queries():  # triton 5197
    pair = torch.zeros(128)
    pair[:2] = torch.tensor([6.0, 0.5])
    data, sf = quantize_index(pair, "fp4")
    assert (data[0], sf[0]) == (0x17, 127)
    query, q_sf = quantize_index_query(-pair.flip(0).view(1, 1, 1, 128), "fp4")
    assert query.dtype == torch.int8
    assert query[0, 0, 0, 63].item() & 0xFF == 0xF9
    assert q_sf.tolist() == [[[[1, 1, 1, 127]]]]


@pytest.mark.parametrize("page_kv", [1, 3, 64])
@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
@pytest.mark.parametrize("layout", [Layout(), Layout(block_pad=9000, pool=2, layer=1, offset=3)])
def test_pages_written_by_slot_equal_independently_built_ones(fmt, page_kv, layout):
    keys = drawn_values(1, 70, 128, 6, torch.float32)
    data, sf = pack.quantize(keys.double().numpy(), INDEX_FORMAT[fmt])
    want = pack.index_cache_of(data, sf, page_kv)
    cache = pack.paged(np.full(want.shape, 0xFF, dtype=np.uint8).squeeze(2), layout, hostile="random")
    before = cache.untyped_storage().tolist()
    order = torch.randperm(70, generator=torch.Generator().manual_seed(0))
    write_index(cache, order, *(side[order] for side in quantize_index(keys, fmt)))
    assert torch.equal(cache, want)
    pages = np.array(before).reshape(-1)  # outside the pages nothing moved
    inside = np.zeros(len(pages), dtype=bool)
    for page in range(cache.shape[0]):
        at = cache.storage_offset() + page * cache.stride(0)
        inside[at : at + page_kv * INDEX_FORMAT[fmt].bytes] = True
    assert np.array_equal(np.array(cache.untyped_storage().tolist())[~inside], pages[~inside])
    decoded = dequantize_index(*index_planes(cache)).flatten(0, 1)[:70]
    assert_equal(decoded, oracle.decode_keys(data, sf, INDEX_FORMAT[fmt]))


@pytest.mark.parametrize("sf_dtype", [torch.uint8, torch.int16])
@pytest.mark.parametrize("q_fmt", ["fp8", "fp4"])
@pytest.mark.parametrize("k_fmt", ["fp8", "fp4"])
def test_the_operator_scores_packed_keys_and_queries(q_fmt, k_fmt, sf_dtype):
    keys, queries = drawn_values(2, 20, 128, 3, torch.bfloat16), drawn_values(3, 6, 128, 3, torch.bfloat16)
    cache = torch.full((6, 4, 1, INDEX_FORMAT[k_fmt].bytes), 0xFF, dtype=torch.uint8)
    table = cases.int32([[5, 0, 3, 1, 2]])
    slots = (table[0].long()[:, None] * 4 + torch.arange(4)).flatten()
    write_index(cache, slots, *quantize_index(keys, k_fmt))
    q_data, q_sf = quantize_index_query(queries.view(2, 1, 3, 128), q_fmt, sf_dtype=sf_dtype)
    inputs = cases.logits(cache, [20, 17], table.expand(2, 5).tolist(), 20, heads=3)
    inputs = inputs._replace(q_data=q_data, q_sf=q_sf)
    assert_matches(inputs.run(), inputs.exact())
    q, k = (dequantize_index(*quantize_index(x, fmt)).double() for x, fmt in ((queries, q_fmt), (keys, k_fmt)))
    own = (q.view(2, 3, 128) @ k.T).relu().sum(1)
    assert torch.allclose(inputs.run()[0].double(), own[0], rtol=2.0**-8, atol=1e-3 * own.max().item())
    assert_equal(dequantize_index(q_data, q_sf).view(6, 128), q.numpy())


def test_nonfinite_products_are_zero_in_keys_and_kept_in_queries():
    data = torch.zeros(128, dtype=torch.uint8)
    data[0], data[40], data[70] = 0x7F, 0x7E, 0x38
    scales = torch.tensor([127, 254, 255, 127], dtype=torch.uint8)
    assert_equal(dequantize_index(data, scales), 0.0)
    kept = dequantize_index(data.view(torch.float8_e4m3fn), scales, keep_nonfinite=True)
    want = np.zeros(128)
    want[[0, 40]], want[64:96] = (math.nan, math.inf), math.nan
    assert_equal(kept, want)


def test_the_example_of_the_formats_page_runs():
    page = Path(__file__).parents[1].joinpath("docs", "formats.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {
        "deepinfer_ops": deepinfer_ops,
        "latents": torch.ones(3, 512),
        "cache": torch.zeros(2, 4, 1, 528, dtype=torch.uint8),
        "slots": torch.tensor([5, -1, 2]),
        "keys": torch.ones(3, 128),
        "index_cache": torch.zeros(2, 4, 1, 68, dtype=torch.uint8),
        "queries": torch.ones(1, 1, 2, 128),
    }
    exec(example, names)
    assert_equal(names["back"][:, :, 0], [[0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    assert names["q_sf"].tolist() == [[[[119] * 4] * 2]]  # 1.0 is 256 * 2^-8
