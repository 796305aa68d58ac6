"""Records out of paged caches: whole rows of bytes, indexed by (block, unit) (SPEC section 7, rules 2, 5 and 8 to 10).

Every index here is a block, a unit in a block or a row of a table, never a byte address: integers are 32 bits wide on
the device, whatever the size of the cache.
"""

from __future__ import annotations

import torch

from .shapes import CacheShape, power_of_two


def split_slots(slots: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Non-negative slots -> (block, offset in the block). Bit operations where the page allows."""
    if page & (page - 1) == 0:
        return slots >> (page.bit_length() - 1), slots & (page - 1)
    block = torch.div(slots, page, rounding_mode="floor")
    return block, slots - block * page


def gather_records(cache: torch.Tensor, shape: CacheShape, slots: torch.Tensor) -> torch.Tensor:
    """Records of ``slots`` [n] int32, all inside the cache -> [n, bytes] uint8."""
    block, offset = split_slots(slots, shape.page)
    source, grid, packed = _gatherable(cache, shape)
    units = shape.fmt.bytes // grid
    if units == 1:
        return source.view(shape.blocks, shape.page, grid)[block, offset]
    block, part = block.unsqueeze(1), torch.arange(units, dtype=torch.int32, device=slots.device)
    if packed:
        rows = source.view(shape.blocks, shape.page * units, grid)[block, offset.unsqueeze(1) * units + part]
    else:
        # Padding between records belongs to no view of them, so the offset stays an index of its own.
        rows = source.view(shape.blocks, shape.page, units, grid)[block, offset.unsqueeze(1), part]
    return rows.reshape(slots.shape[0], shape.fmt.bytes)


def gather_blocks(cache: torch.Tensor, shape: CacheShape, ids: torch.Tensor) -> torch.Tensor:
    """Whole blocks ``ids`` [n] int32, all inside the cache -> [n, page, bytes] uint8.

    As many as the next power of two are gathered (block 0 again) and cut off.
    """
    source, _, _ = _gatherable(cache, shape)
    padding = power_of_two(ids.shape[0]) - ids.shape[0]
    padded = torch.nn.functional.pad(ids, (0, padding)) if padding else ids
    blocks = source.view(shape.blocks, shape.page, shape.fmt.bytes).index_select(0, padded)
    return blocks[: ids.shape[0]]


def all_records(cache: torch.Tensor, shape: CacheShape) -> torch.Tensor:
    """Every record in slot order, [slots, bytes] uint8, without a gather."""
    return cache.reshape(shape.slots, shape.fmt.bytes)


def compact(block_of: torch.Tensor, blocks: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Number the blocks that ``block_of`` [n] int32 names, in order of their ids.

    Returns ``listed`` [capacity] int32, the named blocks (0 where fewer are), and ``rank`` [blocks] int32, each named
    block's place in it. A rank >= capacity means that a promise about the number of blocks was broken.
    """
    device = block_of.device
    named = torch.zeros(blocks, dtype=torch.int32, device=device).scatter(0, block_of.long(), 1)
    rank = named.cumsum(0, dtype=torch.int32) - 1
    # Blocks that are not named, or too many, are written to one more place that is cut off.
    place = torch.where((named == 1) & (rank < capacity), rank, capacity)
    ids = torch.arange(blocks, dtype=torch.int32, device=device)
    listed = torch.zeros(capacity + 1, dtype=torch.int32, device=device).scatter(0, place.long(), ids)
    return listed[:capacity], rank


def _gatherable(cache: torch.Tensor, shape: CacheShape) -> tuple[torch.Tensor, int, bool]:
    """The cache, its grid and whether its records are adjacent; a copy where the grid is too fine to gather from."""
    if shape.must_copy:
        return cache.clone(memory_format=torch.contiguous_format), shape.row_bytes, True
    return cache, shape.row_bytes, shape.packed
