"""The choice of routes is a pure function of shapes, strides, dtypes, hints and settings."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_ops.config import Settings
from deepinfer_ops.neuron.plans import Read
from deepinfer_ops.neuron.routes import plan_decode, plan_logits, plan_pool
from deepinfer_ops.neuron.shapes import CacheShape, DecodeShape, LogitsShape, PoolShape, ScopeShape, power_of_two
from deepinfer_ops.record_format import INDEX_FORMATS, KV_FORMATS

FP8, INDEX_FP8 = KV_FORMATS[528], INDEX_FORMATS[132]
DEFAULTS = Settings()


def cache(blocks=4, page=64, fmt=FP8, token_stride=None, block_stride=None, offset=0):
    token = token_stride or fmt.bytes
    return CacheShape(fmt, blocks, page, block_stride or page * token, token, offset)


def decode(rows=8, heads=64, main=None, topk=128, extra=None, extra_topk=512, **hints):
    scopes = [ScopeShape("main", main or cache(), topk)]
    if extra is not None:
        scopes.append(ScopeShape("extra", extra, extra_topk))
    return DecodeShape(rows, 1, heads, tuple(scopes), **hints)


BIG = cache(blocks=100_000)


@pytest.mark.parametrize(
    ("shape", "settings", "route", "kernel", "why"),
    [
        (decode(), {}, "table", "gathered_attn_idx", "8 rows and 256 slots to decode <= attn_table_slots 32768"),
        (decode(main=cache(blocks=512)), {}, "table", "gathered_attn_idx", "32768 slots"),
        (decode(main=cache(blocks=513)), {}, "per row", "gathered_attn", "32832 slots to decode > attn_table_slots"),
        (decode(main=cache(blocks=400), extra=cache(blocks=112)), {}, "table", "gathered_attn_idx", "32768 slots"),
        (decode(main=cache(blocks=400), extra=cache(blocks=113)), {}, "per row", "gathered_attn", "32832 slots"),
        (decode(rows=1), {}, "per row", "gathered_attn", "one row"),
        (decode(rows=64), {}, "table", "gathered_attn_idx", "64 rows"),
        (decode(rows=65), {}, "dense table", None, "128 padded rows >= dense_attn_min_rows 65"),
        (decode(rows=65, main=cache(blocks=64)), {}, "dense table", None, "4096 slots <= dense_attn_max_kv 4096"),
        (decode(rows=65, main=cache(blocks=65)), {}, "table", "gathered_attn_idx", "4160 slots"),
        (decode(rows=65), {"dense_attn_min_rows": 129}, "table", "gathered_attn_idx", "65 rows"),
        (decode(rows=65), {"dense_attn_max_kv": 255}, "table", "gathered_attn_idx", "65 rows"),
        (decode(rows=512, extra=BIG, extra_topk=1024), {}, "per row", "gathered_attn", "> attn_table_slots"),
        (
            decode(rows=512, extra=BIG, extra_topk=1024),
            {"prefill_bucket": 512},
            "shared scope",
            None,
            "512 rows are the prefill_bucket and 1024 list entries >= 1024",
        ),
        (
            decode(rows=512, extra=BIG, extra_topk=1023),
            {"prefill_bucket": 512},
            "per row",
            "gathered_attn",
            "> attn_table",
        ),
        (
            decode(rows=256, extra=BIG, extra_topk=1024),
            {"prefill_bucket": 512},
            "per row",
            "gathered_attn",
            "> attn_table",
        ),
        (
            decode(rows=512, extra=BIG, chunk_blocks=16),
            {},
            "dense chunk",
            None,
            "its ring of 64 slots and 16 compressed",
        ),
        (
            decode(rows=512, extra=BIG, chunk_blocks=16),
            {"prefill_dense": False},
            "per row",
            "gathered_attn",
            "not the dense chunk: prefill_dense is off",
        ),
        (decode(rows=64, chunk_blocks=1), {}, "table", "gathered_attn_idx", "it needs a main and an extra scope"),
        (decode(heads=128), {}, "table", "gathered_attn_idx", "8 rows"),
        (decode(heads=129), {}, "table", None, "plain torch: 129 heads > 128"),
        (decode(rows=1, heads=129), {}, "per row", None, "plain torch: 129 heads > 128"),
        (decode(), {"nki_attn": False}, "table", None, "plain torch: nki_attn is off"),
        (decode(rows=0), {}, "empty", None, "no rows"),
        (decode(topk=0), {}, "empty", None, "no scope has both list entries and slots"),
        (decode(main=cache(blocks=0)), {}, "empty", None, "no scope has both"),
        (decode(topk=0, extra=cache()), {}, "table", "gathered_attn_idx", "256 slots"),
    ],
)
def test_decode_takes_the_route_and_says_why(shape, settings, route, kernel, why):
    plan = plan_decode(shape, dataclasses.replace(DEFAULTS, **settings))
    assert (plan.route, plan.kernel) == (route, kernel)
    assert why in plan.reason


SERVING = {"extra": cache(blocks=20_000), "max_requests": 8, "max_context": 4096}


@pytest.mark.parametrize(
    ("shape", "settings", "main", "extra"),
    [
        # 8 * (ceil(4096 / 64) + 1) + 1 = 521 blocks
        (decode(**SERVING), {"attn_table_slots": 2**20}, (Read.WHOLE, 64, 0), (Read.USED, 64, 1024)),
        (
            decode(main=cache(blocks=64, page=256), **SERVING),
            {"attn_table_slots": 2**20},
            # 8 * (ceil((128 + 1) / 64) + 2) + 1 = 41 sub-blocks
            (Read.USED, 64, 64),
            (Read.USED, 64, 1024),
        ),
        (
            decode(main=cache(blocks=64, page=256), **SERVING),
            {"attn_table_slots": 2**20, "swa_subblock": False},
            # 8 * (16 + 1) + 1 = 137 rings of 64: all of them
            (Read.WHOLE, 256, 0),
            (Read.USED, 64, 1024),
        ),
        (
            decode(main=cache(blocks=64, page=200), **SERVING),
            {"attn_table_slots": 2**20},
            (Read.WHOLE, 200, 0),  # no multiple of 64
            (Read.USED, 64, 1024),
        ),
        (
            decode(main=cache(blocks=64, page=256, block_stride=300 * 528), **SERVING),
            {"attn_table_slots": 2**20},
            (Read.WHOLE, 256, 0),  # gaps between rings: blocks cannot be cut elsewhere
            (Read.USED, 64, 1024),
        ),
    ],
    ids=["blocks", "sub-blocks", "switched off", "odd ring", "gaps"],
)
def test_bounds_decide_what_is_decoded(shape, settings, main, extra):
    plan = plan_decode(shape, dataclasses.replace(DEFAULTS, **settings))
    assert [(s.read, s.cache.page, s.blocks) for s in plan.scopes] == [main, extra]


def test_without_an_extra_scope_the_main_cache_is_no_ring():
    shape = decode(main=cache(blocks=64, page=256), max_requests=1)
    assert plan_decode(shape, DEFAULTS).scopes[0].read is Read.WHOLE


def test_a_bound_that_saves_nothing_is_not_used():
    shape = decode(main=cache(blocks=4), max_requests=1, max_context=64)  # 3 blocks, rounded up to all 4
    assert plan_decode(shape, DEFAULTS).scopes[0].read is Read.WHOLE
    shape = decode(main=cache(blocks=5), max_requests=1, max_context=64)
    assert plan_decode(shape, DEFAULTS).scopes[0].read is Read.USED


@pytest.mark.parametrize(
    ("shape", "grid", "copied"),
    [
        (cache(), 528, False),
        (cache(token_stride=640), 16, False),
        (cache(offset=33792), 528, False),
        (cache(offset=528 + 4), 4, False),
        (cache(offset=1), 1, True),
        (cache(offset=2), 2, True),
        (cache(block_stride=64 * 528 + 8), 8, False),
        (cache(fmt=KV_FORMATS[288]), 288, False),
    ],
    ids=str,
)
def test_rows_of_a_gather_tile_records_strides_and_base(shape, grid, copied):
    assert (shape.grid, shape.must_copy) == (grid, copied)
    assert shape.row_bytes == (shape.fmt.bytes if copied else grid)


def test_the_sizes_of_a_plan_add_up():
    plan = plan_decode(decode(rows=6, main=BIG, topk=100, extra=BIG, extra_topk=30), DEFAULTS)
    assert (plan.rows, plan.padded_rows, plan.keys, plan.table_rows) == (6, 8, 256, 0)
    assert plan.bytes_gathered == 8 * 130 * 528
    assert plan.decoded_elements == 8 * 130 * 512
    assert plan.matmul_flops == 4 * 8 * 64 * 256 * 512
    assert plan.kernel_bytes_gathered == 0
    table = plan_decode(decode(rows=6), DEFAULTS)
    assert (table.table_rows, table.bytes_gathered) == (384, 0)
    assert table.kernel_bytes_gathered == 8 * 128 * 1024


logits = LogitsShape(INDEX_FP8, cache(page=64, fmt=INDEX_FP8, blocks=100), 3, 64, 10, 600, False)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("per token", "weighted_scores", 3, 3, 10, 640, 1)),
        ({"max_context_len": 100}, ("per token", "weighted_scores", 3, 3, 2, 128, 1)),
        ({"max_context_len": 10_000}, ("per token", "weighted_scores", 3, 3, 10, 640, 1)),
        ({"one_sequence": True}, ("one sequence", "weighted_scores", 1, 1, 10, 640, 4)),
        ({"heads": 129}, ("per token", None, 0, 3, 10, 640, 1)),
        ({"tokens": 0}, ("empty", None, 0, 0, 0, 0, 0)),
        ({"width": 0}, ("empty", None, 0, 0, 0, 0, 0)),
        ({"max_context_len": 0}, ("empty", None, 0, 0, 0, 0, 0)),
        ({"cache": cache(blocks=0, fmt=INDEX_FP8)}, ("empty", None, 0, 0, 0, 0, 0)),
    ],
    ids=str,
)
def test_logits_take_the_route(changes, expected):
    plan = plan_logits(dataclasses.replace(logits, **changes))
    got = (plan.route, plan.kernel, plan.kernel_calls, plan.tables, plan.pages, plan.positions, plan.kernel_tokens)
    assert got == expected


@pytest.mark.parametrize(
    ("shape", "route"),
    [
        ((4, 2, 8), "kernel"),
        ((4, 1, 8), "plain"),
        ((4, 4096, 8), "kernel"),
        ((4, 4097, 8), "plain"),
        ((0, 4, 8), "empty"),
        ((4, 4, 0), "empty"),
    ],
)
def test_pooling_takes_the_route(shape, route):
    assert plan_pool(PoolShape(*shape)).route == route


@given(st.integers(1, 2**40))
def test_padded_counts_are_the_next_power_of_two(count):
    padded = power_of_two(count)
    assert padded & (padded - 1) == 0
    assert count <= padded < 2 * count


@given(
    st.builds(
        decode,
        rows=st.integers(0, 700),
        heads=st.integers(1, 200),
        main=st.builds(cache, blocks=st.integers(0, 2000), page=st.integers(1, 300)),
        topk=st.integers(0, 2000),
        extra=st.none() | st.builds(cache, blocks=st.integers(0, 2000), page=st.integers(1, 300)),
        max_requests=st.none() | st.integers(0, 64),
        max_context=st.none() | st.integers(0, 10**6),
        chunk_blocks=st.none() | st.integers(0, 64),
    ),
    st.builds(
        Settings,
        nki_attn=st.booleans(),
        prefill_bucket=st.integers(0, 512),
        swa_subblock=st.booleans(),
        prefill_dense=st.booleans(),
        prefill_dense_check=st.booleans(),
    ),
)
def test_any_shape_has_a_plan_that_keeps_the_rules_and_prints(shape, settings):
    plan = plan_decode(shape, settings)
    assert plan == plan_decode(shape, settings)
    assert hash(plan) == hash(plan_decode(shape, settings))
    assert plan.reason
    assert plan.reason in str(plan)
    if plan.route == "empty":
        return
    assert plan.padded_rows == power_of_two(shape.rows)
    assert plan.kernel is None or (shape.heads <= 128 and settings.nki_attn and plan.keys % 128 == 0)
    for scope in plan.scopes:
        assert scope.blocks & (scope.blocks - 1) == 0
        if scope.read is Read.USED:
            assert scope.blocks < scope.cache.blocks
            assert scope.cache.slots == next(s.cache.slots for s in shape.scopes if s.name == scope.name)
