"""Class C: whatever stands in unused slots, or decodes to NaN in a listed one, poisons nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import cases
import numpy as np
import pytest
import torch
from compare import assert_equal, assert_same_bits
from pack import INDEX_FORMAT
from strategies_decode import DecodeProblem, Scope, build

FILLS = [0xFF, 0x7F, 0xFE]


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
@pytest.mark.parametrize("fill", FILLS)
def test_unfilled_tail_of_the_last_page_is_never_read(fmt, fill):  # flashinfer 941
    # 13 live tokens in pages of 4: slots 13, 14, 15 are the tail; three lanes of the list are empty.
    inputs = build(DecodeProblem(h_q=3, main=Scope(fmt, page=4, blocks=4, topk=16, content="model")))
    indices = cases.int32([[[*range(13), -1, -1, -1]]])

    def with_tail(byte: int) -> torch.Tensor:
        cache = inputs.k_cache.clone()
        cache.view(16, -1)[13:] = byte
        return inputs._replace(k_cache=cache, indices=indices).run()

    assert_same_bits(with_tail(fill), with_tail(0))
    assert not torch.isnan(with_tail(fill)).any()


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
@pytest.mark.parametrize("fill", FILLS)
def test_unfilled_tail_of_an_index_page_is_never_read(fmt, fill):
    data, live = INDEX_FORMAT[fmt].data_bytes, 13
    element = 0x38 if fmt == "fp8" else 0x22

    def with_tail(byte: int) -> torch.Tensor:
        kv = torch.full((4, 4 * (data + 4)), byte, dtype=torch.uint8)
        for token in range(live):
            page, at = divmod(token, 4)
            kv[page, at * data : (at + 1) * data] = element
            kv[page, 4 * data + 4 * at : 4 * data + 4 * at + 4] = 127
        return cases.logits(kv.view(4, 4, 1, data + 4), [live], [[0, 1, 2, 3]], 20).run()

    assert_same_bits(with_tail(fill), with_tail(0))
    assert_equal(with_tail(fill), [[128.0] * live + [-math.inf] * 7])


@pytest.mark.parametrize("q", [0.0, 1.0])
def test_a_listed_record_of_nan_joins_the_softmax_as_a_zero_key(q):
    # 13 keys of 2.0 have logit 1024 q * 512^-0.5, the zero key has logit 0: it counts only where q = 0.
    cache = cases.kv_cache(dict.fromkeys(range(13), 2.0), 16)
    out = cases.decode(cache, [[list(range(14))]], q=q).run()
    assert_equal(out, torch.tensor(26 / 14 if q == 0 else 2.0).bfloat16().double())


def test_a_listed_record_of_nan_equals_a_record_of_zeros_bit_for_bit():
    problem = DecodeProblem(b=2, h_q=5, main=Scope("fp8", 4, 8, 32, content="model"), logit=8.0)
    inputs = build(problem)

    def with_record(record: np.ndarray) -> torch.Tensor:
        cache = inputs.k_cache.clone()
        cache.view(32, -1)[7] = torch.from_numpy(record)
        lists = torch.arange(32, dtype=torch.int32).expand(2, 1, 32)
        return inputs._replace(k_cache=cache, indices=lists).run()

    ones, nan_elements = np.full(512, 0x38, dtype=np.uint8), np.full(512, 0xFF, dtype=np.uint8)
    one, nan_scale, no_scale = (np.full(16, code, dtype=np.uint8) for code in (127, 255, 0))
    zeros = with_record(np.zeros(528, dtype=np.uint8))
    for record in [(nan_elements, one), (nan_elements, nan_scale), (ones, nan_scale), (ones, no_scale)]:
        assert_same_bits(with_record(np.concatenate(record)), zeros)


def test_nan_in_one_group_of_a_key_leaves_its_other_groups_alone():
    record = np.full(528, 127, dtype=np.uint8)
    record[:512], record[512 + 3] = 0x38, 255
    want = np.ones(512)
    want[96:128] = 0.0
    assert_equal(cases.decode(cases.kv_cache({0: record}, 4), [[[0]]]).run(), want)


@pytest.mark.parametrize("scale", [512**-0.5, -1.0, 0.0])
def test_a_listed_record_of_random_bytes_never_makes_nan(scale):
    # Scale bytes up to 254 decode to finite keys of 1e38: q . k passes fp32's range, and inf - inf would be NaN.
    rng = np.random.default_rng(6)
    garbage = rng.integers(0, 256, (64, 528), dtype=np.uint8)
    cache = cases.kv_cache({64: 1.0} | dict(enumerate(garbage)), 68)
    inputs = cases.decode(cache, [[[64, slot, 64]] for slot in range(64)], h_q=4, softmax_scale=scale)
    q = torch.from_numpy(rng.standard_normal(inputs.q.shape)).bfloat16()
    assert_equal(torch.isfinite(inputs._replace(q=q).run()), 1, "finite")


def test_a_listed_index_key_of_nan_scores_zero():
    kv = cases.index_cache([0x38, 0xFF, 0x38, 0x38], 4, scales=[127, 127, 255, 0])
    assert_equal(cases.logits(kv, [4], [[0]], 4).run(), [[128.0, 0.0, 0.0, 0.0]])


def test_one_request_poisoned_in_its_query_leaves_the_batch_alone():
    problem = DecodeProblem(b=5, s_q=2, h_q=4, main=Scope("fp8", 4, 8, 20, content="model"))
    clean = build(problem).run()
    dirty_inputs = build(replace(problem))
    dirty_inputs.q[2] = math.nan
    dirty = dirty_inputs.run()
    assert torch.isnan(dirty[2]).all()
    rest = torch.tensor([0, 1, 3, 4])
    assert_same_bits(dirty[rest], clean[rest])
