"""Drawn problems of ``flash_mla_decode``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import oracle
import torch
from hypothesis import strategies as st
from pack import COMPACT, KV_FORMAT, Layout, hostile_bytes, paged, place
from strategies import CONTENTS, HOSTILE, PLACES, SEEDS, layouts, token_bytes

INT32_MAX = 2**31 - 1
HEADS = (1, 2, 3, 5, 8, 15, 16, 17, 32, 33, 64, 65, 128, 129)


@dataclass(frozen=True)
class Scope:
    """One cache and its index lists. ``lengths``: topk_length, one per batch entry; ``holes``: percent of -1 entries;
    ``unique``: no slot twice in a row of indices (the dense Neuron routes need it).
    """

    format: str = "fp8"
    page: int = 4
    blocks: int = 1
    topk: int = 1
    lengths: tuple[int, ...] | None = None
    holes: int = 0
    unique: bool = False
    content: str = "model"
    hostile: str = "ff"
    layout: Layout = COMPACT

    @property
    def slots(self) -> int:
        return self.page * self.blocks


@dataclass(frozen=True)
class DecodeProblem:
    """``logit``: the magnitude q is scaled to reach. ``poison``: NaN in one head's query or sink.
    ``cap``: the largest e4m3 value in listed slots (224 for a Neuron device).
    """

    b: int = 1
    s_q: int = 1
    h_q: int = 1
    main: Scope = Scope()
    extra: Scope | None = None
    sink: str = "none"
    softmax_scale: float = 512**-0.5
    logit: float = 1.0
    poison: str = "none"
    cap: float = 448.0
    q_place: str = "contiguous"
    small_place: str = "contiguous"
    seed: int = 0


class DecodeInputs(NamedTuple):
    """The operator's arguments, by their names."""

    q: torch.Tensor
    k_cache: torch.Tensor
    indices: torch.Tensor
    topk_length: torch.Tensor | None = None
    attn_sink: torch.Tensor | None = None
    extra_k_cache: torch.Tensor | None = None
    extra_indices: torch.Tensor | None = None
    extra_topk_length: torch.Tensor | None = None
    softmax_scale: float = 512**-0.5

    def run(self, **hints: object) -> torch.Tensor:
        return torch.ops.deepinfer.flash_mla_decode(**self._asdict(), **hints)

    def exact(self) -> oracle.Exact:
        return oracle.flash_mla_decode(**self._asdict())


@st.composite
def scopes(draw: st.DrawFn, b: int, *, unique: bool, topk_limit: int) -> Scope:
    small = st.integers(0, min(70, topk_limit))
    tile_edges = st.sampled_from([k for k in (1, 63, 65, 127, 128, 129, 192, 300) if k <= topk_limit])
    topk = draw(st.one_of(st.sampled_from([1, 2, 5]), small, tile_edges))
    page = draw(st.sampled_from([4, 1, 2, 3, 7, 16, 32, 48, 64, 100]))
    lengths = st.tuples(*[st.integers(0, topk)] * b)
    return Scope(
        format=draw(st.sampled_from(["fp8", "fp4"])),
        page=page,
        blocks=draw(st.integers(1, max(1, 200 // page))),
        topk=topk,
        lengths=draw(st.one_of(st.none(), lengths)),
        holes=draw(st.sampled_from([0, 10, 50, 0, 10, 50, 90, 100])),
        unique=unique or draw(st.booleans()),
        content=draw(st.sampled_from(CONTENTS)),
        hostile=draw(HOSTILE),
        layout=draw(layouts()),
    )


@st.composite
def decode_problems(
    draw: st.DrawFn,
    *,
    unique: bool = False,
    cap: float = 448.0,
    topk_limit: int = 300,
    places: st.SearchStrategy[str] = PLACES,
) -> DecodeProblem:
    """``unique``, ``cap``: what a Neuron device asks for. ``places``: layouts of the small tensors and of q."""
    b = draw(st.sampled_from([1, 2, 3, 1, 2, 3, 1, 2, 3, 4, 7, 0]))
    main = draw(scopes(b, unique=unique, topk_limit=topk_limit))
    extra = draw(st.one_of(st.none(), scopes(b, unique=unique, topk_limit=topk_limit)))
    # One row of 129 heads and 600 keys is work enough; fewer keys leave room for more rows.
    work = max(1, b) * (main.topk + (extra.topk if extra else 0) + 1)
    h_q = draw(st.sampled_from([h for h in HEADS if h == 1 or h * work <= 80_000]))
    return DecodeProblem(
        b=b,
        s_q=draw(st.integers(1, max(1, min(4, 40_000 // (h_q * work))))),
        h_q=h_q,
        main=main,
        extra=extra,
        sink=draw(st.sampled_from(["none", "finite", "infinite"])),
        softmax_scale=draw(st.sampled_from([512**-0.5, 1.0, 0.0, -(512**-0.5), 0.1, -3.0])),
        logit=draw(st.sampled_from([1.0, 0.1, 8.0, 30.0, 60.0])),
        poison=draw(st.sampled_from(["none"] * 6 + ["query", "sink"])),
        cap=cap,
        q_place=draw(places),
        small_place=draw(places),
        seed=draw(SEEDS),
    )


def build(problem: DecodeProblem, device: torch.device | str = "cpu") -> DecodeInputs:
    """The tensors of a problem: deterministic, equal on every device."""
    rng = np.random.default_rng(problem.seed)
    p = problem
    main = _scope(rng, p, p.main, device)
    extra = _scope(rng, p, p.extra, device) if p.extra else (None, None, None)
    q = _queries(rng, p, [*main, *extra])
    sink = None if p.sink == "none" else p.logit * rng.standard_normal(p.h_q)
    if p.sink == "infinite" and sink is not None:
        sink = np.where(rng.random(p.h_q) < 0.5, rng.choice([-np.inf, np.inf, -3.3e38, 3.3e38], p.h_q), sink)
    if p.poison == "query" and p.b:
        q[rng.integers(p.b), rng.integers(p.s_q), rng.integers(p.h_q), rng.integers(512)] = torch.nan
    if p.poison == "sink" and sink is not None:
        sink[rng.integers(p.h_q)] = np.nan
    if sink is not None:
        sink = place(torch.from_numpy(sink).float(), p.small_place, device)
    return DecodeInputs(
        place(q, p.q_place, device), main[0], main[1], main[2], sink, *extra, softmax_scale=p.softmax_scale
    )


def _scope(
    rng: np.random.Generator, p: DecodeProblem, scope: Scope, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    shape = (p.b, p.s_q, scope.topk)
    if scope.unique:
        lists = np.full(shape, -1)
        listed = min(scope.topk, scope.slots)
        lists[..., :listed] = rng.permuted(np.broadcast_to(np.arange(scope.slots), (*shape[:2], scope.slots)), axis=2)[
            ..., :listed
        ]
    else:
        lists = rng.integers(0, scope.slots, shape)
    lists[rng.random(shape) * 100 < scope.holes] = -1
    live = np.ones(shape, dtype=bool)
    if scope.lengths is not None:
        live &= np.arange(scope.topk) < np.array(scope.lengths).reshape(-1, 1, 1)
        beyond = np.array([0, INT32_MAX, -9, scope.slots, scope.slots - 1, -(2**31)])
        lists = np.where(live, lists, rng.choice(beyond, shape))
    listed_slots = np.unique(lists[live & (lists >= 0)])

    fmt = KV_FORMAT[scope.format]
    rows = hostile_bytes(rng, scope.hostile, (scope.slots, fmt.bytes))
    rows[listed_slots] = np.concatenate(token_bytes(rng, fmt, len(listed_slots), scope.content, p.cap), axis=1)
    blocks = rows.reshape(scope.blocks, scope.page, fmt.bytes)
    cache = paged(blocks, scope.layout, scope.hostile, p.seed, device)
    lengths = None if scope.lengths is None else torch.tensor(scope.lengths, dtype=torch.int32)
    return (
        cache,
        place(torch.from_numpy(lists.astype(np.int32)), p.small_place, device),
        None if lengths is None else place(lengths, p.small_place, device),
    )


def _queries(rng: np.random.Generator, p: DecodeProblem, scopes_: list[torch.Tensor | None]) -> torch.Tensor:
    """Normal queries, each row scaled so that its largest |logit| is about ``p.logit``."""
    q = rng.standard_normal((p.b, p.s_q, p.h_q, 512))
    row_keys = oracle.live_keys(*scopes_)
    for b, s in np.ndindex(p.b, p.s_q):
        keys = row_keys(b, s)
        largest = np.abs(p.softmax_scale * (q[b, s] @ keys.T)).max(initial=0.0)
        if largest > 0:
            # Rounding q to bf16 moves a logit by 2^-9 of it at most; 1 % keeps 60 below 60.
            factor = 0.99 * p.logit / largest
            # Beyond keys of 2^100 no normal query reaches such logits: they get q = 0, a plain mean.
            q[b, s] *= min(factor, 2.0**100) if factor > 2.0**-100 else 0.0
    return torch.from_numpy(q).to(torch.bfloat16)
