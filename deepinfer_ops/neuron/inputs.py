"""Queries and index lists made ready: rows padded to a power of two, and whatever is dead masked before anything is
gathered (SPEC section 7, rules 4 and 9).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .plain import MASKED
from .plans import DecodePlan, ScopePlan


@dataclass
class Query:
    """What every route shares: ``q`` [padded rows, heads, 512] bf16, ``sink`` [heads, 1] fp32."""

    q: torch.Tensor
    sink: torch.Tensor
    softmax_scale: float
    fast: bool

    @classmethod
    def of(
        cls, plan: DecodePlan, q: torch.Tensor, attn_sink: torch.Tensor | None, softmax_scale: float, fast: bool
    ) -> Query:
        """No sink is one of -1e30, whose weight is 0. An infinite one is cut there: inf - inf would be NaN."""
        if attn_sink is None:
            sink = torch.full((plan.heads, 1), MASKED, dtype=torch.float32, device=q.device)
        else:
            sink = attn_sink.clamp(MASKED, -MASKED).unsqueeze(1)
        rows = pad_rows(q.reshape(plan.rows, plan.heads, q.shape[3]), plan.padded_rows)
        return cls(rows, sink, softmax_scale, fast)


@dataclass
class Lists:
    """One scope's lists, padded to the plan's rows with rows of dead entries.

    ``slots`` [rows, topk] int32 lie inside the cache; they are 0 where ``live`` [rows, topk] is false, so nothing that
    a gather sees depends on what a dead entry held.
    """

    plan: ScopePlan
    cache: torch.Tensor
    slots: torch.Tensor
    live: torch.Tensor

    @classmethod
    def of(
        cls,
        plan: ScopePlan,
        cache: torch.Tensor,
        indices: torch.Tensor,
        topk_length: torch.Tensor | None,
        padded_rows: int,
    ) -> Lists:
        """``indices`` [b, s_q, topk] int32: dead are -1, slots outside the cache, and what is past the length."""
        b, s_q, topk = indices.shape
        live = (indices >= 0) & (indices <= plan.cache.last_slot)
        if topk_length is not None:
            position = torch.arange(topk, dtype=torch.int32, device=indices.device)
            live = live & (position < topk_length.view(b, 1, 1))
        slots = torch.where(live, indices, 0).reshape(b * s_q, topk)
        blocks, page = plan.cache.blocks, plan.cache.page
        # A sub-block view of the ring: the same bytes and slots, cut into shorter blocks.
        cache = cache.view(blocks, page, 1, plan.cache.fmt.bytes) if cache.shape[0] != blocks else cache
        return cls(plan, cache, pad_rows(slots, padded_rows), pad_rows(live.reshape(b * s_q, topk), padded_rows))

    @property
    def live_rows(self) -> torch.Tensor:
        """[rows]: whether a row has a live key in this scope."""
        return self.live.any(1)


def pad_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Zeros (or False) below, up to ``rows`` rows."""
    missing = rows - tensor.shape[0]
    if not missing:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
