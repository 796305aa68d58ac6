"""Row and block gathers move the right bytes, in whole rows, with indices that stay inside their tables."""

from __future__ import annotations

import neuron_sim
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from neuron_problems import PLATFORM  # noqa: F401  (installs the device)
from pack import Layout, paged
from strategies import examples, layouts

from deepinfer_ops.neuron.gathers import all_records, compact, gather_blocks, gather_records, split_slots
from deepinfer_ops.neuron.shapes import MIN_ROW_BYTES, CacheShape
from deepinfer_ops.record_format import KV_FORMATS


def cache_of(fmt_bytes: int, blocks: int, page: int, layout: Layout, seed: int):
    """A cache of random bytes on the device, its shape, and its records [slots, bytes]."""
    rng = np.random.default_rng(seed)
    records = rng.integers(0, 256, (blocks, page, fmt_bytes), dtype=np.uint8)
    cache = paged(records, layout, "ff", seed, "neuron")
    return cache, CacheShape.of(cache, KV_FORMATS[fmt_bytes]), torch.from_numpy(records.reshape(-1, fmt_bytes))


CACHES = st.builds(
    cache_of,
    st.sampled_from([528, 288]),
    st.integers(1, 9),
    st.sampled_from([1, 2, 3, 4, 7, 16, 64]),
    layouts(),
    st.integers(0, 99),
)


@given(CACHES, st.data())
@examples(quick=40, ci=150)
def test_records_arrive_whole_from_any_layout(cache, data):
    tensor, shape, records = cache
    slots = torch.tensor(
        data.draw(st.lists(st.integers(0, shape.slots - 1), min_size=1, max_size=9)), dtype=torch.int32
    )
    on_device = slots.to("neuron")
    with neuron_sim.record() as seen:
        got = gather_records(tensor, shape, on_device)
    assert torch.equal(got.cpu(), records[slots.long()])
    assert got.is_contiguous()
    (gather,) = [call for call in seen.ops if call.name == "index"]
    assert gather.outputs[0].shape[-1] == shape.row_bytes >= MIN_ROW_BYTES
    assert not seen.out_of_range()
    copied = any(call.name == "copy" and call.inputs[0].shape == tensor.shape for call in seen.ops)
    assert copied == shape.must_copy


@given(CACHES, st.data())
@examples(quick=40, ci=150)
def test_blocks_arrive_whole_and_in_counts_that_are_powers_of_two(cache, data):
    tensor, shape, records = cache
    ids = torch.tensor(data.draw(st.lists(st.integers(0, shape.blocks - 1), min_size=1, max_size=9)), dtype=torch.int32)
    with neuron_sim.record() as seen:
        got = gather_blocks(tensor, shape, ids.to("neuron"))
    assert torch.equal(got.cpu(), records.view(shape.blocks, shape.page, -1)[ids.long()])
    (gather,) = seen.indices()
    assert gather.values.numel() & (gather.values.numel() - 1) == 0
    assert not seen.out_of_range()


@given(CACHES)
@examples(quick=20, ci=60)
def test_a_whole_cache_in_slot_order_is_not_gathered(cache):
    tensor, shape, records = cache
    with neuron_sim.record() as seen:
        got = all_records(tensor, shape)
    assert torch.equal(got.cpu(), records)
    assert not seen.indices()


@given(st.integers(1, 40), st.lists(st.integers(0, 39), min_size=1, max_size=60), st.integers(1, 40))
def test_compaction_lists_the_named_blocks_in_order(blocks, named, capacity):
    named = [block % blocks for block in named]
    with neuron_sim.record() as seen:
        listed, rank = compact(torch.tensor(named, dtype=torch.int32, device="neuron"), blocks, capacity)
    want = sorted(set(named))
    assert listed.cpu().tolist() == (want + [0] * capacity)[:capacity]
    assert [int(rank.cpu()[block]) for block in want] == list(range(len(want)))
    assert (listed.dtype, rank.dtype) == (torch.int32, torch.int32)
    assert not seen.out_of_range()
    assert "nonzero" not in seen.names()


@pytest.mark.parametrize("page", [1, 2, 3, 48, 64, 100, 256])
def test_slots_split_into_block_and_offset_up_to_the_largest_int32(page):
    slots = torch.tensor([0, 1, page - 1, page, page + 1, 2**24 + 1, 2**31 - 1], dtype=torch.int32)
    block, offset = split_slots(slots, page)
    assert torch.equal(block.long() * page + offset, slots.long())
    assert (offset >= 0).all()
    assert (offset < page).all()
    assert block.dtype == offset.dtype == torch.int32
