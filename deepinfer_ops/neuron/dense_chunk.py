"""The dense chunk route: one request's prompt chunk, its masks by arithmetic, its keys in two dense matmuls."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from .gathered_routes import decode_records, zero_dead_rows
from .gathers import gather_blocks, split_slots
from .inputs import Lists, Query, pad_rows
from .plain import attention
from .plans import DecodePlan

_LOG = logging.getLogger("deepinfer_ops")

_FAR = 2**30 - 1
"""Offsets and lengths are cut here: the sum of two such numbers still fits 32 bits."""


@dataclass
class Chunk:
    """``block_table`` [n] int32: the request's compressed blocks; ``offset_len`` [rows or more, 2] int32."""

    block_table: torch.Tensor
    offset_len: torch.Tensor


def dense_chunk(plan: DecodePlan, lists: list[Lists], query: Query, chunk: Chunk) -> torch.Tensor:
    """[padded rows, heads, 512] bf16. The lists only tell which ring slots are live and which rows are padding."""
    ring, compressed = lists[0], lists[1:]
    keys, live, padding = _ring_keys(ring, query)
    parts, masks = [keys], [live]
    for scope in compressed:
        keys, live = _chunk_keys(plan, scope, query, chunk)
        parts.append(keys)
        masks.append(live)
    mask = torch.cat(masks, dim=1) & padding.logical_not().unsqueeze(1)
    out = attention(query.q, torch.cat(parts), None, mask, query.sink, query.softmax_scale)
    return zero_dead_rows(out, mask)


def _ring_keys(scope: Lists, query: Query) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys [ring, 512], live [rows, ring], and which rows are padding [rows].

    The request's ring is the block of the largest live slot. A row sees as many consecutive slots as it has live
    entries, from its first entry on, around the ring's end. A row that starts in another ring is padding.
    """
    size = scope.plan.cache.page
    ring, _ = split_slots(scope.slots.amax().view(1), size)
    block, first = split_slots(scope.slots[:, 0], size)
    starts = scope.live[:, 0]
    count = scope.live.sum(1, dtype=torch.int32)
    slot = torch.arange(size, dtype=torch.int32, device=first.device)
    ahead = slot - first.unsqueeze(1)
    ahead = torch.where(ahead < 0, ahead + size, ahead)
    live = (starts & (block == ring)).unsqueeze(1) & (ahead < count.unsqueeze(1))
    keys = decode_records(gather_blocks(scope.cache, scope.plan.cache, ring), scope.plan, query, None)
    return keys, live, starts & (block != ring)


def _chunk_keys(plan: DecodePlan, scope: Lists, query: Query, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [blocks * page, 512] of the request's first compressed blocks, live [rows, blocks * page].

    A row without a live list entry has no compressed keys, whatever stands in its offset and length: rows that pad a
    chunk often hold leftovers there.
    """
    shape, page = scope.plan.cache, scope.plan.cache.page
    ids = chunk.block_table[: scope.plan.decoded // page]
    known = (ids >= 0) & (ids < shape.blocks)
    ids = torch.where(known, ids, 0)
    keys = decode_records(gather_blocks(scope.cache, shape, ids), scope.plan, query, None)
    offset, length = pad_rows(chunk.offset_len[: plan.rows], plan.padded_rows).clamp(-_FAR, _FAR).unbind(1)
    position = torch.arange(ids.shape[0] * page, dtype=torch.int32, device=ids.device)
    live = (position >= offset.unsqueeze(1)) & (position < (offset + length).unsqueeze(1))
    return keys, live & known.repeat_interleave(page) & scope.live_rows.unsqueeze(1)


def log_difference(dense: torch.Tensor, gathered: torch.Tensor) -> None:
    """The CHECK mode's one line. A compiled graph has no place to log a value: it only runs the gathered route."""
    if type(dense) is not torch.Tensor:
        _LOG.warning("flash_mla_decode: dense chunk not checked in a compiled graph; it runs the gathered route")
        return
    difference = (dense.to(torch.float32) - gathered.to(torch.float32)).abs().max()
    largest = gathered.to(torch.float32).abs().max()
    _LOG.warning("flash_mla_decode: dense chunk is off by %g, largest output %g", difference.item(), largest.item())
