"""Plain-torch definitions of the package's NKI kernels, with the kernels' argument names, order and numerics.

bf16 operands, fp32 accumulation; logits are fp32, probabilities are rounded to bf16 for the value product and summed as
fp32 before rounding; one rounding to bf16 at the end.
"""

from __future__ import annotations

import torch

from .runners import define


@define("gathered_attn")
def gathered_attn(
    q: torch.Tensor, kv: torch.Tensor, mask_bias: torch.Tensor, sink: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """``q`` [rows*heads, 512], ``kv`` [rows*k, 512], ``mask_bias`` [rows, k] fp32, ``sink`` [heads, 1] fp32."""
    rows, keys = mask_bias.shape
    width = q.shape[-1]
    queries = q.view(rows, -1, width).float()
    values = kv.view(rows, keys, width).float()
    logits = torch.einsum("rhd,rkd->rhk", queries, values) * softmax_scale + mask_bias[:, None, :]
    largest = torch.maximum(logits.amax(-1, keepdim=True), sink[None])
    weights = torch.exp(logits - largest)
    denominator = weights.sum(-1, keepdim=True) + torch.exp(sink[None] - largest)
    output = torch.einsum("rhk,rkd->rhd", weights.bfloat16().float(), values) / denominator
    return output.bfloat16().view(-1, width)


@define("gathered_attn_idx")
def gathered_attn_idx(
    q: torch.Tensor,
    table: torch.Tensor,
    idx: torch.Tensor,
    mask_bias: torch.Tensor,
    sink: torch.Tensor,
    softmax_scale: float,
) -> torch.Tensor:
    """As ``gathered_attn``, the keys being rows ``idx`` [rows, k] int32 of ``table`` [T, 512]."""
    if idx.device.type == "cpu" and idx.numel() and not 0 <= int(idx.min()) <= int(idx.max()) < table.shape[0]:
        raise IndexError(f"gathered_attn_idx: indices {int(idx.min())}..{int(idx.max())}, table of {table.shape[0]}")
    return gathered_attn(q, table[idx.reshape(-1).long()], mask_bias, sink, softmax_scale)


@define("weighted_scores")
def weighted_scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``q`` [T*H, 128], ``k`` [n, 128], ``weights`` [H, T] fp32 -> [T, n] fp32: sum over h of relu(q . k) * w."""
    heads, tokens = weights.shape
    scores = (q.float() @ k.float().T).clamp(min=0).view(tokens, heads, k.shape[0])
    return torch.einsum("thn,ht->tn", scores, weights)


@define("softmax_pool")
def softmax_pool(latent: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """``latent``, ``score`` [N, R, D] fp32 -> [N, D] fp32: a softmax over R of the scores weighs the latents.

    A score of -inf masks its entry, whatever the latent is; a column of -inf only gives 0.
    """
    masked = score == -torch.inf
    largest = score.amax(1, keepdim=True)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    weights = torch.exp(score - largest)
    total = weights.sum(1)
    pooled = (torch.where(masked, 0.0, latent) * weights).sum(1)
    return torch.where(masked.all(1), 0.0, pooled / total)
