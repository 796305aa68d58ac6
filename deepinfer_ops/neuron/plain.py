"""The NKI kernels' mathematics in plain torch operators: the dense routes, and what stands in for a kernel.

Numerics are the kernels': fp32 logits of bf16 operands, probabilities rounded to bf16 for the value product, fp32
accumulation. Operands are widened to fp32 because a bf16 matmul would round its result; their values stay bf16, so the
compiler may run the product on bf16 hardware.
"""

from __future__ import annotations

import functools

import torch

MASKED = -1e30
"""Logit of an empty lane. Finite, because (-inf) - (-inf) is NaN."""


def attention(
    q: torch.Tensor,
    shared: torch.Tensor | None,
    own: torch.Tensor | None,
    live: torch.Tensor,
    sink: torch.Tensor,
    softmax_scale: float,
) -> torch.Tensor:
    """One softmax over keys that all rows share and keys of each row's own.

    ``q`` [rows, heads, d] bf16, ``shared`` [s, d] bf16, ``own`` [rows, k, d] bf16, ``live`` [rows, s + k] (shared keys
    first), ``sink`` [heads, 1] fp32 -> [rows, heads, d] bf16. Keys are the values. Logits of dead lanes are replaced,
    not added to: what another row's key makes of this row's query may be infinite.
    """
    rows, heads, width = q.shape
    # Two forms of one product: rows and heads together against shared keys, row by row against its own.
    query, parts, values = q.to(torch.float32), [], []
    if shared is not None:
        parts.append(query.reshape(1, rows * heads, width))
        values.append(shared.to(torch.float32).unsqueeze(0))
    if own is not None:
        parts.append(query)
        values.append(own.to(torch.float32))
    products = [torch.bmm(a, b.transpose(1, 2)).view(rows, heads, -1) for a, b in zip(parts, values, strict=True)]
    logits = torch.where(live.unsqueeze(1), torch.cat(products, dim=2) * softmax_scale, MASKED)
    largest = torch.maximum(logits.amax(2, keepdim=True), sink)
    weights = torch.exp(logits - largest)
    total = weights.sum(2, keepdim=True) + torch.exp(sink - largest)
    rounded = weights.to(torch.bfloat16).to(torch.float32).split([p.shape[2] for p in products], dim=2)
    sums = [torch.bmm(w.reshape(*a.shape[:2], -1), b) for w, a, b in zip(rounded, parts, values, strict=True)]
    out = functools.reduce(torch.add, [part.view(rows, heads, width) for part in sums])
    return (out / total).to(torch.bfloat16)


def gathered_attn(
    q: torch.Tensor, kv: torch.Tensor, mask_bias: torch.Tensor, sink: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """As the kernel: ``q`` [rows * heads, d], ``kv`` [rows * k, d], ``mask_bias`` [rows, k] -> [rows * heads, d]."""
    rows, keys = mask_bias.shape
    width = q.shape[1]
    own = kv.reshape(rows, keys, width)
    return attention(q.reshape(rows, -1, width), None, own, mask_bias == 0.0, sink, softmax_scale).reshape(-1, width)


def gathered_attn_idx(
    q: torch.Tensor,
    table: torch.Tensor,
    idx: torch.Tensor,
    mask_bias: torch.Tensor,
    sink: torch.Tensor,
    softmax_scale: float,
) -> torch.Tensor:
    """As the kernel: keys are rows ``idx`` [rows, k] int32 of ``table`` [T, d]."""
    return gathered_attn(q, table.index_select(0, idx.reshape(-1)), mask_bias, sink, softmax_scale)


def weighted_scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As the kernel: ``q`` [T * H, d] bf16, ``k`` [n, d] bf16, ``weights`` [H, T] fp32 -> [T, n] fp32."""
    heads, tokens = weights.shape
    scores = (q.to(torch.float32) @ k.to(torch.float32).t()).clamp(min=0.0).view(tokens, heads, -1)
    return torch.bmm(weights.t().unsqueeze(1), scores).squeeze(1)


def softmax_pool(latent: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """As the kernel: ``latent``, ``score`` [N, R, D] fp32 -> [N, D] fp32. -inf masks; a column of it gives 0."""
    masked = score == -torch.inf
    largest = score.amax(1, keepdim=True)
    weights = torch.exp(score - torch.where(largest == -torch.inf, 0.0, largest))
    pooled = (torch.where(masked, 0.0, latent) * weights).sum(1) / weights.sum(1)
    return torch.where(masked.all(1), 0.0, pooled)
