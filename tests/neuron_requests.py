"""Problems shaped as an engine makes them: requests with a sliding-window ring each and a compressed cache.

Where ``strategies_decode`` lists slots at random, these lists keep the promises behind the hints of Neuron: a row's
main slots are a window of consecutive ring slots, its extra slots the compressed keys ``offset .. offset + len`` of its
request.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from pack import COMPACT, KV_FORMAT, Layout, hostile_bytes, paged
from strategies import HOSTILE, SEEDS, layouts, token_bytes
from strategies_decode import DecodeInputs


@dataclass(frozen=True)
class Requests:
    """``count`` requests of ``rows`` query rows each, at positions ``start``, ``start + 1``, ...; a compressed key for
    every ``ratio`` positions. ``padding`` rows with nothing live follow (one request only). ``shuffled``: every row has
    its extra list in an order of its own; otherwise each is a prefix of the longest.
    """

    count: int = 1
    rows: int = 4
    start: int = 20
    ring: int = 32
    rings: int = 4
    window: int = 8
    ratio: int = 4
    page: int = 4
    blocks: int = 24
    extra_topk: int = 16
    shuffled: bool = False
    padding: int = 0
    heads: int = 2
    sink: bool = True
    main_format: str = "fp8"
    extra_format: str = "fp8"
    hostile: str = "ff"
    layout: Layout = COMPACT
    seed: int = 0

    @property
    def last_position(self) -> int:
        return self.start + self.rows - 1

    @property
    def chunk_blocks(self) -> int:
        """Compressed blocks of a request that hold a visible key."""
        return -(-((self.last_position + 1) // self.ratio) // self.page)


@st.composite
def requests(
    draw: st.DrawFn, *, one: bool, rings: tuple[int, ...] = (16, 24, 64, 100), compact: bool = False
) -> Requests:
    """``one``: a single request's chunk. ``rings``: lengths of a ring. ``compact``: the caches have no gaps."""
    ring = draw(st.sampled_from(rings))
    rows = draw(st.sampled_from([2, 3, 5, 8]))
    start = draw(st.integers(0, 90))
    ratio, page = draw(st.sampled_from([2, 4, 8])), draw(st.sampled_from([1, 4, 7, 16]))
    visible = (start + rows) // ratio
    count = 1 if one else draw(st.integers(1, 3))
    needed = count * -(-visible // page)
    return Requests(
        count=count,
        rows=rows,
        start=start,
        ring=ring,
        rings=count + draw(st.integers(0, 3)),
        window=draw(st.integers(1, min(ring, 20))),
        ratio=ratio,
        page=page,
        blocks=max(1, needed + draw(st.sampled_from([0, 3, 60]))),
        extra_topk=max(1, visible + draw(st.integers(0, 3))),
        shuffled=draw(st.booleans()),
        padding=draw(st.integers(0, 3)) if one else 0,
        heads=draw(st.sampled_from([1, 3, 16])),
        sink=draw(st.booleans()),
        main_format=draw(st.sampled_from(["fp8", "fp4"])),
        extra_format=draw(st.sampled_from(["fp8", "fp4"])),
        hostile=draw(HOSTILE),
        layout=COMPACT if compact else draw(layouts()),
        seed=draw(SEEDS),
    )


def build(p: Requests, device: str = "cpu") -> tuple[DecodeInputs, dict[str, object]]:
    """The operator's arguments, and ``chunk_*`` of the first request; equal on every device."""
    rng = np.random.default_rng(p.seed)
    rows = p.rows + p.padding
    main = np.full((p.count, rows, p.window), -1)
    extra = np.full((p.count, rows, p.extra_topk), -1)
    offset_len = rng.integers(-(2**31), 2**31, (rows + 2, 2))  # beyond the rows and in padding: leftovers
    ring_of = rng.permutation(p.rings)[: p.count]
    tables = rng.permutation(p.blocks)[: p.count * p.chunk_blocks].reshape(p.count, p.chunk_blocks)
    for request in range(p.count):
        for row in range(p.rows):
            position = p.start + row
            seen = np.arange(max(0, position - p.window + 1), position + 1)
            main[request, row, : len(seen)] = ring_of[request] * p.ring + seen % p.ring
            visible = (position + 1) // p.ratio
            order = rng.permutation(visible) if p.shuffled else np.arange(visible)
            extra[request, row, :visible] = tables[request][order // p.page] * p.page + order % p.page
            offset_len[row] = 0, visible
    k_cache = _cache(rng, p, p.main_format, main, p.rings, p.ring, device)
    extra_cache = _cache(rng, p, p.extra_format, extra, p.blocks, p.page, device)
    q = torch.from_numpy(rng.standard_normal((p.count, rows, p.heads, 512))).to(torch.bfloat16).to(device)
    sink = torch.from_numpy(rng.standard_normal(p.heads)).float().to(device) if p.sink else None
    lists = _int32(main).to(device), _int32(extra).to(device)
    inputs = DecodeInputs(q, k_cache, lists[0], None, sink, extra_cache, lists[1], None)
    # The table of a request is as long as the engine's longest; what follows its blocks is stale.
    table = np.concatenate([tables[0], rng.choice([2**31 - 1, -5, 0], 3)])
    chunk = {
        "chunk_block_table": _int32(table).to(device),
        "chunk_blocks": p.chunk_blocks,
        "chunk_offset_len": _int32(offset_len).to(device),
    }
    return inputs, chunk


def _cache(
    rng: np.random.Generator, p: Requests, name: str, lists: np.ndarray, blocks: int, page: int, device: str
) -> torch.Tensor:
    fmt = KV_FORMAT[name]
    listed = np.unique(lists[lists >= 0])
    records = hostile_bytes(rng, p.hostile, (blocks * page, fmt.bytes))
    records[listed] = np.concatenate(token_bytes(rng, fmt, len(listed), "model", 224.0), axis=1)
    return paged(records.reshape(blocks, page, fmt.bytes), p.layout, p.hostile, p.seed, device)


def _int32(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32))
