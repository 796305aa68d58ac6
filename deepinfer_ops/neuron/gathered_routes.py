"""The routes that follow the index lists: table, dense table, shared scope, per row."""

from __future__ import annotations

import torch

from . import kernels
from .decode import decode_keys
from .gathers import all_records, compact, gather_blocks, gather_records, split_slots
from .inputs import Lists, Query
from .plain import MASKED, attention
from .plans import DecodePlan, Read, ScopePlan


def gathered(plan: DecodePlan, lists: list[Lists], query: Query) -> torch.Tensor:
    """[padded rows, heads, 512] bf16; rows without a live key are 0."""
    out = _ROUTES[plan.route](plan, lists, query).view(query.q.shape)
    live = torch.cat([scope.live for scope in lists], dim=1)
    return zero_dead_rows(out, live)


def zero_dead_rows(out: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """A row without a live key is 0, whatever its query and the sink hold. ``live`` [rows, keys]."""
    return torch.where(live.any(1).view(-1, 1, 1), out, 0.0)


def decode_records(records: torch.Tensor, plan: ScopePlan, query: Query, live: torch.Tensor | None) -> torch.Tensor:
    """Records of a main cache, [..., bytes] uint8 -> [n, 512] bf16."""
    fmt = plan.cache.fmt
    flat = records.reshape(-1, fmt.bytes)
    return decode_keys(flat[:, : fmt.data_bytes], flat[:, fmt.data_bytes :], fmt, fast=query.fast, live=live)


def _per_row(plan: DecodePlan, lists: list[Lists], query: Query) -> torch.Tensor:
    """Every row's keys side by side in one buffer."""
    keys = [_own_keys(scope, query) for scope in lists]
    live = torch.cat([scope.live for scope in lists], dim=1)
    rows, width, dim = *live.shape, query.q.shape[2]
    if plan.keys > width:
        keys.append(query.q.new_zeros(rows, plan.keys - width, dim))
    kv = torch.cat(keys, dim=1).view(rows * plan.keys, dim)
    return _attend_by_kernel("gathered_attn", plan, query, [kv], live)


def _table(plan: DecodePlan, lists: list[Lists], query: Query) -> torch.Tensor:
    """Rows gather from the decoded table inside the kernel."""
    table, places, live = _decoded_table(plan, lists, query)
    missing = plan.keys - places.shape[1]
    if missing:
        filler = torch.full((places.shape[0], missing), _zero_row(plan), dtype=torch.int32, device=places.device)
        places = torch.cat([places, filler], dim=1)
    return _attend_by_kernel("gathered_attn_idx", plan, query, [table, places], live)


def _dense_table(plan: DecodePlan, lists: list[Lists], query: Query) -> torch.Tensor:
    """Two matmuls over the whole table. A slot listed twice counts once: indices have to be unique within a row."""
    table, places, live = _decoded_table(plan, lists, query)
    seen = torch.zeros(places.shape[0], plan.table_rows, dtype=torch.int32, device=places.device)
    # Dead lanes write their 0 to the row of zeros, so no write depends on the order of another.
    seen = seen.scatter(1, places.long(), live.to(torch.int32))
    return attention(query.q, table, None, seen > 0, query.sink, query.softmax_scale)


def _shared_scope(plan: DecodePlan, lists: list[Lists], query: Query) -> torch.Tensor:
    """Wide lists are prefixes of the longest one: it is gathered once, and each row masks it."""
    wide = [scope for scope in lists if scope.plan.read is Read.SHARED]
    narrow = [scope for scope in lists if scope.plan.read is Read.RECORDS]
    shared = torch.cat([_shared_keys(scope, query) for scope in wide])
    own = torch.cat([_own_keys(scope, query) for scope in narrow], dim=1) if narrow else None
    live = torch.cat([scope.live for scope in wide + narrow], dim=1)
    return attention(query.q, shared, own, live, query.sink, query.softmax_scale)


_ROUTES = {"per row": _per_row, "table": _table, "dense table": _dense_table, "shared scope": _shared_scope}


def _own_keys(scope: Lists, query: Query) -> torch.Tensor:
    """Each row's keys, [rows, topk, 512]; dead ones are 0."""
    rows, topk = scope.slots.shape
    records = gather_records(scope.cache, scope.plan.cache, scope.slots.reshape(-1))
    return decode_records(records, scope.plan, query, scope.live.reshape(-1)).view(rows, topk, -1)


def _shared_keys(scope: Lists, query: Query) -> torch.Tensor:
    """The longest list's keys, [topk, 512]. Rows agree wherever they are live, so the largest entry is the list's."""
    longest = torch.where(scope.live, scope.slots, -1).amax(0)
    live = longest >= 0
    records = gather_records(scope.cache, scope.plan.cache, torch.where(live, longest, 0))
    return decode_records(records, scope.plan, query, live)


def _zero_row(plan: DecodePlan) -> int:
    """The first of the zeros that follow the decoded records."""
    return sum(scope.decoded for scope in plan.scopes)


def _decoded_table(
    plan: DecodePlan, lists: list[Lists], query: Query
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The table [table rows, 512], each row's places in it [rows, keys] int32, and which of them are live.

    Dead places point at a row of zeros: a mask that is added does not outweigh garbage in slot 0.
    """
    tables, places, lives, first = [], [], [], 0
    for scope in lists:
        records, place, live = _used_records(scope) if scope.plan.read is Read.USED else _whole_cache(scope)
        tables.append(decode_records(records, scope.plan, query, None))
        places.append(torch.where(live, place + first, _zero_row(plan)))
        lives.append(live)
        first += scope.plan.decoded
    tables.append(query.q.new_zeros(plan.table_rows - first, query.q.shape[2]))
    return torch.cat(tables), torch.cat(places, dim=1), torch.cat(lives, dim=1)


def _whole_cache(scope: Lists) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return all_records(scope.cache, scope.plan.cache), scope.slots, scope.live


def _used_records(scope: Lists) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Only the blocks that lists name, and slots renumbered into them."""
    shape = scope.plan.cache
    block, offset = split_slots(scope.slots, shape.page)
    listed, rank = compact(block.reshape(-1), shape.blocks, scope.plan.blocks)
    renumbered = rank.index_select(0, block.reshape(-1)).view(block.shape)
    # A broken promise about the number of blocks must not become an index outside the table.
    live = scope.live & (renumbered < scope.plan.blocks)
    return gather_blocks(scope.cache, shape, listed), torch.where(live, renumbered * shape.page + offset, 0), live


def _attend_by_kernel(
    name: str, plan: DecodePlan, query: Query, keys: list[torch.Tensor], live: torch.Tensor
) -> torch.Tensor:
    """``live`` [rows, up to plan.keys] becomes the additive mask; lanes beyond it are empty."""
    empty = live.new_zeros(plan.padded_rows, plan.keys - live.shape[1])
    mask = torch.cat([live, empty], dim=1).logical_not().to(torch.float32) * MASKED
    q = query.q.reshape(plan.padded_rows * plan.heads, -1)
    on_device = plan.kernel is not None
    return kernels.call(name, q, *keys, mask, query.sink, query.softmax_scale, on_device=on_device)
