"""Drawn problems of ``paged_mqa_logits``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import oracle
import torch
from hypothesis import strategies as st
from pack import COMPACT, INDEX_FORMAT, Layout, hostile_bytes, paged, place, planar_pages
from strategies import HOSTILE, PLACES, SEEDS, layouts, token_bytes

CONTENTS = ("model", "codes", "extreme")


@dataclass(frozen=True)
class LogitsProblem:
    """One token per entry of ``contexts``. ``shared``: leading table columns all tokens have in common, as requests
    with one prompt do. ``poison``: NaN in one token's query, its scales or its weights."""

    contexts: tuple[int, ...] = (1,)
    heads: int = 1
    query: str = "fp8"
    keys: str = "fp8"
    page_kv: int = 4
    pages: int = 1
    width: int = 1
    max_context_len: int = 4
    shared: int = 0
    one_sequence: bool = False
    packed_scales: bool = False
    nibble_dtype: torch.dtype = torch.uint8
    weight_dtype: torch.dtype = torch.bfloat16
    content: str = "model"
    poison: str = "none"
    cap: float = 448.0
    hostile: str = "ff"
    layout: Layout = COMPACT
    q_place: str = "contiguous"
    small_place: str = "contiguous"
    seed: int = 0


class LogitsInputs(NamedTuple):
    """The operator's arguments, by their names."""

    q_data: torch.Tensor
    q_sf: torch.Tensor
    kv_cache: torch.Tensor
    weights: torch.Tensor
    context_lens: torch.Tensor
    block_table: torch.Tensor
    max_context_len: int
    one_sequence: bool = False

    def run(self) -> torch.Tensor:
        return torch.ops.deepinfer.paged_mqa_logits(**self._asdict())

    def exact(self) -> oracle.Exact:
        return oracle.paged_mqa_logits(**self._asdict())


@st.composite
def logits_problems(draw: st.DrawFn, *, cap: float = 448.0, places: st.SearchStrategy[str] = PLACES) -> LogitsProblem:
    """Contexts from 0 to past the table's width and past max_context_len."""
    tokens = draw(st.sampled_from([1, 2, 3, 5, 1, 2, 3, 5, 9, 0]))
    page_kv = draw(st.sampled_from([4, 1, 2, 3, 16, 64, 100, 256]))
    widest = max(1, min(8, 300 // page_kv))
    width = draw(st.one_of(st.integers(1, widest), st.integers(0, widest)))
    capacity = width * page_kv
    lengths = st.one_of(st.integers(capacity // 2, capacity), st.integers(0, capacity + 3))
    return LogitsProblem(
        contexts=draw(st.tuples(*[lengths] * tokens)),
        heads=draw(st.sampled_from([1, 2, 3, 8, 17, 32, 64, 65])),
        query=draw(st.sampled_from(["fp8", "fp4"])),
        keys=draw(st.sampled_from(["fp8", "fp4"])),
        page_kv=page_kv,
        pages=draw(st.integers(max(1, width), max(1, width) + 3)),
        width=width,
        max_context_len=draw(st.one_of(lengths, st.sampled_from([255, 256, 257]))),
        shared=draw(st.integers(0, width)),
        one_sequence=draw(st.booleans()),
        packed_scales=draw(st.booleans()),
        nibble_dtype=draw(st.sampled_from([torch.uint8, torch.int8])),
        weight_dtype=draw(st.sampled_from([torch.bfloat16, torch.float32])),
        content=draw(st.sampled_from(CONTENTS)),
        poison=draw(st.sampled_from(["none"] * 6 + ["query", "scale", "weight"])),
        cap=cap,
        hostile=draw(HOSTILE),
        layout=draw(layouts(planar=True)),
        q_place=draw(places),
        small_place=draw(places),
        seed=draw(SEEDS),
    )


def build(problem: LogitsProblem, device: torch.device | str = "cpu") -> LogitsInputs:
    """The tensors of a problem: deterministic, equal on every device."""
    rng, p = np.random.default_rng(problem.seed), problem
    q_data, q_sf = _queries(rng, p)
    table, live_tokens = _block_table(rng, p)
    fmt = INDEX_FORMAT[p.keys]
    data = hostile_bytes(rng, p.hostile, (p.pages * p.page_kv, fmt.data_bytes))
    scales = hostile_bytes(rng, p.hostile, (p.pages * p.page_kv, fmt.scales))
    data[live_tokens], scales[live_tokens] = token_bytes(rng, fmt, len(live_tokens), p.content, p.cap)
    pages = planar_pages(*(a.reshape(p.pages, p.page_kv, -1) for a in (data, scales)))
    weights = rng.standard_normal((len(p.contexts), p.heads))
    if p.poison == "weight" and p.contexts:
        weights[rng.integers(len(weights)), rng.integers(p.heads)] = np.nan
    contexts = torch.tensor(p.contexts, dtype=torch.int32).reshape(-1, 1)
    return LogitsInputs(
        q_data=place(q_data, p.q_place, device),
        q_sf=place(q_sf, p.small_place, device),
        kv_cache=paged(pages, p.layout, p.hostile, p.seed, device),
        weights=place(torch.from_numpy(weights).to(p.weight_dtype), p.small_place, device),
        context_lens=place(contexts, p.small_place, device),
        block_table=place(torch.from_numpy(table.astype(np.int32)), p.small_place, device),
        max_context_len=p.max_context_len,
        one_sequence=p.one_sequence,
    )


def _queries(rng: np.random.Generator, p: LogitsProblem) -> tuple[torch.Tensor, torch.Tensor]:
    fmt, tokens = INDEX_FORMAT[p.query], len(p.contexts)
    # Where a key's NaN is 0, a query's NaN must reach the output: only "poison" puts one there.
    content = "codes" if p.content == "extreme" else p.content
    data, scales = token_bytes(rng, fmt, tokens * p.heads, content, p.cap)
    if tokens and p.poison == "scale":
        scales[rng.integers(len(scales)), rng.integers(fmt.scales)] = 255
    if tokens and p.poison == "query" and p.query == "fp8":
        data[rng.integers(len(data)), rng.integers(fmt.dim)] = rng.choice([0x7F, 0xFF])
    q_data = torch.from_numpy(data.reshape(tokens, 1, p.heads, fmt.data_bytes))
    q_data = q_data.view(torch.float8_e4m3fn if p.query == "fp8" else p.nibble_dtype)
    q_sf = torch.from_numpy(scales.reshape(tokens, 1, p.heads, fmt.scales))
    return q_data, q_sf.view(torch.int16) if p.packed_scales else q_sf


def _block_table(rng: np.random.Generator, p: LogitsProblem) -> tuple[np.ndarray, np.ndarray]:
    """The table, stale entries past each context, and the flat ids of the tokens that are read."""
    tokens = len(p.contexts)
    table = rng.permuted(np.broadcast_to(np.arange(p.pages), (tokens, p.pages)), axis=1)
    table = table[:, : p.width].copy()
    table[:, : p.shared] = table[:1, : p.shared]
    lengths = np.minimum(np.array(p.contexts, dtype=np.int64), min(p.max_context_len, p.width * p.page_kv))
    if p.one_sequence and tokens:
        table, lengths = np.repeat(table[:1], tokens, axis=0), np.full(tokens, lengths.max())
    positions = np.arange(p.width * p.page_kv)
    token_ids = np.repeat(table * p.page_kv, p.page_kv, axis=1) + positions % p.page_kv
    live = np.unique(token_ids[positions < lengths[:, None]])
    stale = np.arange(p.width) * p.page_kv >= lengths[:, None]
    garbage = rng.choice([2**31 - 1, -5, 999_999, -(2**31), 0], table.shape)
    if p.one_sequence and tokens:
        garbage = np.repeat(garbage[:1], tokens, axis=0)
    return np.where(stale, garbage, table), live
