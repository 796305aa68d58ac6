"""Caches of several GiB: addresses stay (block, unit) pairs, so no integer leaves 32 bits.

The pools are address space: only the records named here are ever written or read.
"""

from __future__ import annotations

import pack
import pytest
import torch
from compare import assert_equal
from neuron_problems import run_watched
from neuron_sim.memory import adopt, host_alias
from oracle import INDEX

from deepinfer_ops import config, neuron

GIB = 2**30


def pool_view(nbytes: int, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> torch.Tensor:
    """A neuron tensor over ``nbytes`` untouched bytes."""
    return adopt(torch.empty(nbytes, dtype=torch.uint8)).as_strided(shape, strides, offset)


def write_record(cache: torch.Tensor, slot: int, element: int) -> None:
    """A constant fp8 record with scales of 1."""
    page = cache.shape[1]
    host_alias(cache)[slot // page, slot % page, 0] = torch.from_numpy(
        pack.constant_record(pack.KV_FORMAT["fp8"], element)
    )


def attend(cache: torch.Tensor, slots: list[list[int]], **hints: object) -> torch.Tensor:
    """q = 0: the mean of the keys."""
    indices = torch.tensor(slots, dtype=torch.int32).unsqueeze(1).to("neuron")
    q = torch.zeros(len(slots), 1, 2, 512, dtype=torch.bfloat16, device="neuron")
    return torch.ops.deepinfer.flash_mla_decode(q, cache, indices, None, None, None, None, None, 1.0, **hints)


@pytest.mark.parametrize("page", [64, 48], ids=["bit operations", "divisions"])
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "exact"])
def test_records_of_a_compact_cache_beyond_two_to_the_32_bytes(page, fast):
    blocks = 5 * GIB // (page * 528)
    cache = pool_view(blocks * page * 528, (blocks, page, 1, 528), (page * 528, 528, 528, 1))
    last = blocks * page - 1
    assert last * 528 > 2**32
    write_record(cache, 3, 0x38)
    write_record(cache, last, 0x44)
    with config.override(fast_e4m3=fast):
        got, seen = run_watched(lambda: attend(cache, [[last, 3, -1], [last, last, last + 1]]))
    assert_equal(got[0], 2.0)
    assert_equal(got[1], 3.0)
    assert seen.largest_integer() < 2**31


def test_blocks_that_are_slices_of_a_shared_pool_with_padded_records():
    block = 1_039_680
    cache = pool_view(4 * GIB, (4_000, 64, 1, 528), (block, 640, 528, 1), 528 * 16)
    write_record(cache, 132_229, 0x40)
    write_record(cache, 3, 0x38)
    got, seen = run_watched(lambda: attend(cache, [[132_229, 3]]))
    assert_equal(got, 1.5)
    assert seen.largest_integer() < 2**31


def test_used_blocks_of_a_cache_beyond_two_to_the_32_bytes():
    blocks = 5 * GIB // (64 * 528)
    cache = pool_view(blocks * 64 * 528, (blocks, 64, 1, 528), (64 * 528, 528, 528, 1))
    last = blocks * 64 - 1
    for slot, element in ((last, 0x44), (last - 64, 0x38), (7, 0x40)):
        write_record(cache, slot, element)
    hints = {"max_requests": 1, "max_context": 128}
    call = (cache, [[last, last - 64], [7, -1]])
    q, indices = (
        torch.empty(2, 1, 2, 512, dtype=torch.bfloat16, device="neuron"),
        torch.empty(2, 1, 2, dtype=torch.int32),
    )
    assert neuron.explain("flash_mla_decode", q, cache, indices.to("neuron"), **hints).scopes[0].read.name == "USED"
    got, seen = run_watched(lambda: attend(*call, **hints))
    assert_equal(got[0], 2.0)
    assert_equal(got[1], 2.0)
    assert seen.largest_integer() < 2**31


@pytest.mark.parametrize("one_sequence", [False, True])
def test_index_pages_beyond_two_to_the_32_bytes(one_sequence):
    stride, pages = 1_039_680, 4_500
    cache = pool_view(pages * stride, (pages, 64, 1, 132), (stride, 132, 132, 1))
    data, scales = torch.full((64, 128), 0x38).numpy(), torch.full((64, 4), 127).numpy()
    run = pack.planar_pages(data[None], scales[None])[0]
    assert run.shape[1] == INDEX[132].bytes
    host_alias(cache)[pages - 1, :, 0] = torch.from_numpy(run)
    call = (
        torch.full((2, 1, 2, 128), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn).to("neuron"),
        torch.full((2, 1, 2, 4), 127, dtype=torch.uint8).to("neuron"),
        cache,
        torch.ones(2, 2, dtype=torch.bfloat16).to("neuron"),
        torch.tensor([[64], [3]], dtype=torch.int32).to("neuron"),
        torch.full((2, 1), pages - 1, dtype=torch.int32).to("neuron"),
    )
    got, seen = run_watched(lambda: torch.ops.deepinfer.paged_mqa_logits(*call, 64, one_sequence=one_sequence))
    assert_equal(got[0], 256.0)
    assert_equal(got[1, :3], 256.0)
    assert_equal(got[1, 3:], -torch.inf)
    assert seen.largest_integer() < 2**31
