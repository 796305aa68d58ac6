"""Class F: index lists, block tables, lengths and layouts."""

from __future__ import annotations

import math

import cases
import numpy as np
import pack
import pytest
import torch
from compare import assert_equal, assert_same_bits
from pack import KV_FORMAT, Layout, constant_record
from strategies import token_bytes
from strategies_decode import DecodeProblem, Scope, build

INF = math.inf
LIST = [7, -1, -1, 9, -1, 4, -1, -1]


@pytest.mark.parametrize("entries", [LIST, LIST[::-1]])
def test_holes_inside_the_live_prefix_are_no_keys(entries):  # sglang 30645
    # The record before the cache's first holds 448s: slot -1 taken for an address would add it.
    keys = {1 + slot: key for slot, key in {7: 1.0, 9: 2.0, 4: 6.0}.items()} | {0: 448.0}
    rows = cases.kv_cache(keys, 13, page=1)
    cache = rows[1:].view(3, 4, 1, 528)
    assert cache.storage_offset() == 528
    assert_equal(cases.decode(cache, [[entries]], topk_length=cases.int32([8])).run(), 3.0)


@pytest.mark.parametrize("scope", ["main", "extra"])
@pytest.mark.parametrize("rows", [(1, 1), (64, 1), (5, 13), (130, 1)])
def test_entries_beyond_the_length_are_never_read(rows, scope):  # flashinfer 5095
    b, s_q = rows
    lengths = cases.int32([[0, 1, 5, 127, 128][i % 5] for i in range(b)])
    live = torch.arange(128) < lengths[:, None, None]
    cache = cases.kv_cache({0: 2.0, 1: 448.0}, 4)

    def result(garbage: int) -> torch.Tensor:
        lists = torch.where(live, 0, garbage).expand(b, s_q, 128).int()
        if scope == "main":
            return cases.decode(cache, lists, topk_length=lengths).run()
        main = torch.full((b, s_q, 1), -1, dtype=torch.int32)
        return cases.decode(cache, main, extra_k_cache=cache, extra_indices=lists, extra_topk_length=lengths).run()

    for garbage in (1, -1, 2**31 - 1, -9):
        assert_equal(result(garbage), torch.where(lengths > 0, 2.0, 0.0)[:, None, None, None].numpy())


@pytest.mark.parametrize("one_sequence", [False, True])
@pytest.mark.parametrize("contexts", [[5, 6, 7, 8], [8, 7, 6, 5], [8, 0, 8, 3]])
def test_each_token_sees_its_own_context(contexts, one_sequence):  # aiter 4290
    kv = cases.index_cache([0x38] * 8, 4)
    out = cases.logits(kv, contexts, [[0, 1]] * 4, 9, one_sequence=one_sequence).run()
    assert_equal(out, np.where(np.arange(9) < np.array(contexts)[:, None], 128.0, -INF))


def test_stale_table_entries_are_never_followed():  # vllm 42494
    kv = cases.index_cache([0x38] * 64, 64, pages=3)[[1, 2, 0]].contiguous()
    table = [[2, 0x7FFFFFFF, -5, 999_999]]
    for context in (64, 1, 0):
        out = cases.logits(kv, [context], table, 256).run()
        assert_equal(out, [[128.0] * context + [-INF] * (256 - context)])
    with pytest.raises(RuntimeError, match=r"block_table: .* got 2147483647 at \[0, 1\]"):
        cases.logits(kv, [65], table, 256).run()


@pytest.mark.parametrize("value", [8, 9, -2, 2**31 - 1])
def test_a_live_index_past_the_cache_is_an_error_and_never_slot_0(value):  # FlashMLA 184
    cache = cases.kv_cache(dict.fromkeys(range(8), 2.0), 8)
    small = cases.kv_cache({0: 2.0}, 4)
    with pytest.raises(RuntimeError, match=rf"indices: expected -1 or a slot below 8, got {value} at \[0, 0, 1\]"):
        cases.decode(cache, [[[0, value]]]).run()
    with pytest.raises(RuntimeError, match=rf"extra_indices: .* got {value} at \[0, 0, 1\]"):
        cases.decode(small, [[[0]]], extra_k_cache=cache, extra_indices=cases.int32([[[0, value]]])).run()


def test_lengths_may_be_columns_of_a_table():  # vllm 40987
    base = cases.int32([[5, 99], [3, 99], [0, 99]])
    kv = cases.index_cache([0x38] * 8, 4)
    inputs = cases.logits(kv, [5, 3, 0], [[0, 1]] * 3, 8, heads=2)
    wide_table = torch.full((3, 7), 77, dtype=torch.int32)
    wide_table[:, :2] = inputs.block_table
    wide_weights = torch.full((3, 4), math.nan, dtype=torch.bfloat16)
    wide_weights[:, ::2] = inputs.weights
    strided = inputs._replace(context_lens=base[:, :1], block_table=wide_table[:, :2], weights=wide_weights[:, ::2])
    assert_same_bits(strided.run(), inputs.run())

    plain = build(DecodeProblem(b=3, h_q=4, main=Scope("fp8", 4, 4, 5, (5, 3, 0)), sink="finite"))
    wide_q = torch.full((3, 1, 8, 512), math.nan, dtype=torch.bfloat16)
    wide_q[:, :, ::2] = plain.q
    wide_sink = torch.full((8,), math.nan)
    wide_sink[::2] = plain.attn_sink
    strided = plain._replace(topk_length=base[:, 0], q=wide_q[:, :, ::2], attn_sink=wide_sink[::2])
    assert_same_bits(strided.run(), plain.run())


LAYOUTS = {
    "second-half-of-a-pool": Layout(pool=2, layer=1),
    "tokens-of-640-bytes": Layout(token_pad=112),
    "odd-offset": Layout(offset=1),
    "everything": Layout(token_pad=13, block_pad=77, pool=3, layer=1, offset=5),
}


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_main_caches_in_pools_equal_their_compact_copy(layout, fmt):  # aiter 3498
    rng = np.random.default_rng(4)
    rows = np.concatenate(token_bytes(rng, KV_FORMAT[fmt], 8 * 64, "model", 448.0), axis=1)
    slots = cases.int32(rng.integers(0, 8 * 64, (2, 2, 70)))
    compact, pooled = (pack.cache_of(rows, 64, layout=where) for where in (Layout(), layout))
    assert pooled.stride() != compact.stride() or pooled.storage_offset() == 1
    for name, cache in (("main", compact), ("main in a pool", pooled)):
        inputs = cases.decode(cache, slots, q=0.25)
        other = cases.decode(compact, slots[:, :, :1], q=0.25, extra_k_cache=cache, extra_indices=slots)
        if name == "main":
            wanted = inputs.run(), other.run()
        assert_same_bits(inputs.run(), wanted[0], name)
        assert_same_bits(other.run(), wanted[1], f"extra: {name}")


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
@pytest.mark.parametrize("layout", [Layout(block_pad=552), Layout(pool=2, layer=1, offset=1), Layout(block_pad=1)])
def test_index_pages_in_pools_equal_their_compact_copy(layout, fmt):
    rng = np.random.default_rng(5)
    data, scales = token_bytes(rng, pack.INDEX_FORMAT[fmt], 5 * 64, "codes", 448.0)
    compact, pooled = (pack.index_cache_of(data, scales, 64, layout=where) for where in (Layout(), layout))
    runs = [
        cases.logits(kv, [300, 40], [[4, 1, 3, 0, 2], [2, 2, 2, 2, 2]], 320, heads=3).run() for kv in (compact, pooled)
    ]
    assert_same_bits(runs[1], runs[0])


def test_blocks_of_one_token_may_have_any_token_stride():
    # A size of 1 has no stride worth reading: views of a table or of a slice come with anything there.
    rows = cases.kv_cache({0: 2.0, 1: 4.0}, 3, page=1)
    odd = rows.as_strided((3, 1, 1, 528), (528, 7, 3, 1))
    assert_equal(cases.decode(odd, [[[0, 1]]]).run(), 3.0)


def test_an_index_page_is_all_elements_then_all_scales():  # DeepGEMM 311
    page = [code for code in (0x38, 0x40, 0x44, 0x48) for _ in range(128)]
    page += [code for code in (127, 128, 129, 130) for _ in range(4)]
    kv = torch.tensor(page, dtype=torch.uint8).view(1, 4, 1, 132)
    assert_equal(cases.logits(kv, [4], [[0]], 4).run(), [[128.0, 512.0, 1536.0, 4096.0]])


def test_a_record_is_its_elements_then_its_scales():
    record = constant_record(KV_FORMAT["fp8"], 0x38)
    record[512:] = 127 + np.arange(16) % 5
    want = np.repeat(2.0 ** (np.arange(16) % 5), 32)
    assert_equal(cases.decode(cases.kv_cache({3: record}, 4), [[[3]]]).run(), want)
