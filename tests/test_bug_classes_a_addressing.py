"""Class A: addresses past 2^31. Pools come from torch.empty and only the named bytes are ever touched."""

from __future__ import annotations

import math

import cases
import pytest
import torch
from compare import assert_equal
from pack import INDEX_FORMAT, KV_FORMAT, constant_record

GIB = 2**30
BLOCK_STRIDE = 1_039_680  # bytes between two blocks of one layer where all layers share an allocation


def untouched(count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Address space without memory behind it; ``resize_`` instead of empty(n) would be the same."""
    return torch.empty(count, dtype=dtype)


def write_record(cache: torch.Tensor, slot: int, byte: int, fmt: str = "fp8") -> None:
    page = cache.shape[1]
    cache[slot // page, slot % page, 0] = torch.from_numpy(constant_record(KV_FORMAT[fmt], byte))


@pytest.mark.parametrize("offset", [0, 1, 64])
def test_index_page_past_two_gib_in_a_shared_pool(offset):  # vllm-xpu-kernels 445
    pool = untouched(2_160_000_000)
    kv = pool.as_strided((2070, 64, 1, 132), (BLOCK_STRIDE, 132, 132, 1), offset)
    page = kv[2066].reshape(-1).as_strided((64 * 132,), (1,))
    run = pool.as_strided((64 * 132,), (1,), offset + 2066 * BLOCK_STRIDE)
    assert page.numel() == run.numel()
    run[: 64 * 128], run[64 * 128 :] = 0x38, 127
    inputs = cases.logits(kv, [64], [[2066]], 64, heads=2)
    assert_equal(inputs.run(), 256.0)


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_compact_index_cache_past_two_gib(fmt):
    size = INDEX_FORMAT[fmt].bytes
    pages = 5 * GIB // 2 // (64 * size)
    kv = untouched(pages * 64 * size).view(pages, 64, 1, size)
    last = kv[-1].view(-1)
    last[: 64 * (size - 4)], last[64 * (size - 4) :] = (0x38 if fmt == "fp8" else 0x22), 128
    assert_equal(cases.logits(kv, [64], [[pages - 1]], 64).run(), 256.0)


@pytest.mark.parametrize("scope", ["main", "extra"])
def test_slot_past_two_gib_in_a_shared_pool(scope):  # ROCm aiter 4474
    pool = untouched(2070 * BLOCK_STRIDE)
    cache = pool.as_strided((2070, 64, 1, 528), (BLOCK_STRIDE, 528, 528, 1))
    slots = [2066 * 64 + 5, 3]
    for slot, byte in zip(slots, (0x40, 0x38), strict=True):
        write_record(cache, slot, byte)
    if scope == "main":
        inputs = cases.decode(cache, [[slots]])
    else:
        small = cases.kv_cache({}, 4)
        inputs = cases.decode(small, [[[-1]]], extra_k_cache=cache, extra_indices=cases.int32([[slots]]))
    assert_equal(inputs.run(), 1.5)


@pytest.mark.parametrize(("fmt", "byte"), [("fp8", 0x40), ("fp4", 0x44)])
@pytest.mark.parametrize("page", [1, 64])
def test_last_slot_of_a_compact_cache_past_two_gib(fmt, byte, page):
    size = KV_FORMAT[fmt].bytes
    blocks = 5 * GIB // 2 // (page * size)  # 2.5 GiB: slot * bytes passes 2^31 in either format
    cache = untouched(blocks * page * size).view(blocks, page, 1, size)
    for slot in (0, blocks * page - 1):
        write_record(cache, slot, byte, fmt)
    assert_equal(cases.decode(cache, [[[blocks * page - 1, 0]]]).run(), 2.0)


def test_queries_indices_and_lengths_farther_apart_than_two_gib():
    step = GIB + 64  # elements: 2 GiB of bf16, 4 GiB of int32
    q = untouched(step + 1024, torch.bfloat16).as_strided((2, 1, 2, 512), (step, 512, 512, 1))
    indices = untouched(step + 8, torch.int32).as_strided((2, 1, 2), (step, 2, 1))
    lengths = untouched(step + 8, torch.int32).as_strided((2,), (step,))
    q.fill_(1.0)
    indices[0, 0], indices[1, 0] = cases.int32([0, 1]), cases.int32([1, 1])
    lengths.fill_(2)
    inputs = cases.decode(cases.kv_cache({0: 2.0, 1: 4.0}, 4), [[[0]]], topk_length=lengths, softmax_scale=0.0)
    assert_equal(inputs._replace(q=q, indices=indices).run(), [[[[3.0]]], [[[4.0]]]])


def test_pool_rows_farther_apart_than_eight_gib():
    step = 2**31 + 64  # elements of fp32
    latent = untouched(step + 64, torch.float32).as_strided((2, 2, 3), (step, 16, 1))
    latent.fill_(3.0)
    latent[1, 0] = 5.0
    out = torch.ops.deepinfer.softmax_pool(torch.zeros(2, 2, 3), latent)
    assert_equal(out, [[3.0], [4.0]])


@pytest.mark.large
def test_logits_of_more_than_two_to_the_31_elements():
    """The result itself: 8200 rows of 262,144 bf16 elements, 4.3 GB of memory."""
    tokens, columns = 8200, 2**18
    inputs = cases.logits(cases.index_cache([0x38] * 4, 4), [0] * tokens, [[0]] * tokens, columns)
    inputs.context_lens[0], inputs.context_lens[-1] = 1, 3
    out = inputs.run()
    assert_equal(out[0, :2], [128.0, -math.inf])
    assert_equal(out[-1, :4], [128.0] * 3 + [-math.inf])
    assert torch.isneginf(out[:, 4::4099]).all()
