"""The decode step: pool the newest window, score the index keys, take the top-k, attend. Once per set of operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import reference
from ..flash_mla_decode import flash_mla_decode
from ..paged_mqa_logits import paged_mqa_logits
from ..softmax_pool import softmax_pool
from .scene import TOPK, Caches, to_slots

Operator = Callable[..., torch.Tensor]


class Operators(NamedTuple):
    softmax_pool: Operator
    paged_mqa_logits: Operator
    flash_mla_decode: Operator


OURS = Operators(softmax_pool, paged_mqa_logits, flash_mla_decode)
TORCH = Operators(reference.softmax_pool, reference.paged_mqa_logits, reference.flash_mla_decode)


class StepResult(NamedTuple):
    pooled: torch.Tensor  # [1, 512], the newest window's compressed latent
    scores: torch.Tensor  # [1, n]
    chosen: torch.Tensor  # [1, k] positions, best first
    out: torch.Tensor  # [1, 1, heads, 512]


def decode_step(
    operators: Operators,
    caches: Caches,
    window_scores: torch.Tensor,
    window_rows: torch.Tensor,
    query: torch.Tensor,
    sink: torch.Tensor,
    index_weights: torch.Tensor,
) -> StepResult:
    """One token of one request. ``window_scores`` and ``window_rows``: ``[1, 8, 512]``, the window that just filled."""
    pooled = operators.softmax_pool(window_scores, window_rows)
    scores = score(operators, index_weights, caches)
    chosen = scores.topk(min(TOPK, scores.shape[1]), dim=-1).indices
    slots = to_slots(chosen[0], caches.block_table[0])[None, None]
    return StepResult(pooled, scores, chosen, attend(operators, query, sink, slots, caches))


def score(operators: Operators, index_weights: torch.Tensor, caches: Caches) -> torch.Tensor:
    """Index scores ``[1, n]`` of all compressed keys."""
    return operators.paged_mqa_logits(
        caches.q_data, caches.q_sf, caches.index, index_weights, caches.context_lens, caches.block_table, caches.keys
    )


def attend(
    operators: Operators, query: torch.Tensor, sink: torch.Tensor, slots: torch.Tensor, caches: Caches
) -> torch.Tensor:
    """Attention over the sliding window (main scope) and the chosen compressed keys (extra scope)."""
    return operators.flash_mla_decode(
        query, caches.swa, caches.swa_slots, None, sink, caches.compressed, slots.to(torch.int32), None
    )
