"""The three operators composed from torch operators, eagerly: what one writes without this package.

They take the operators' own arguments, check nothing, and give the operators' results within their tolerance. Meant for
reading, and as the baseline that the demo and the benchmarks time the operators against; so each is the fastest plain
form found on CPU: whole records gathered with index_select, bytes decoded with one table look-up each, float32 matmuls
(CPUs without bfloat16 units are several times slower in bfloat16).
"""

from __future__ import annotations

import torch

from .packers import decode, decode_keys
from .packers_index import as_bytes, split_runs
from .record_format import INDEX_FORMATS, KV_FORMATS, LATENT_DIM

_BY_DATA_BYTES = {fmt.data_bytes: fmt for fmt in INDEX_FORMATS.values()}


def flash_mla_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    softmax_scale: float = LATENT_DIM**-0.5,
) -> torch.Tensor:
    """Gather and decode every row's records, two matmuls, one softmax. Needs ``[b * s_q, topk, 512]`` floats."""
    keys, live = _gather_keys(k_cache, indices, topk_length)
    if extra_k_cache is not None and extra_indices is not None:
        extra_keys, extra_live = _gather_keys(extra_k_cache, extra_indices, extra_topk_length)
        keys, live = torch.cat([keys, extra_keys], 1), torch.cat([live, extra_live], 1)
    rows = q.flatten(0, 1).float() * softmax_scale  # before the product: a scale of 0 must not meet an overflow
    logits = torch.bmm(rows, keys.mT).masked_fill_(~live[:, None], -torch.inf)
    if attn_sink is not None:
        # The sink is the logit of one more key, whose value is 0. +inf would make the softmax NaN.
        sink = attn_sink.clamp(max=torch.finfo(torch.float32).max)
        logits = torch.cat([logits, sink[None, :, None].expand(len(rows), -1, 1)], 2)
    weights = logits.softmax(-1)[..., : keys.shape[1]]
    out = torch.bmm(weights, keys).masked_fill_(~live.any(1)[:, None, None], 0.0)
    return out.to(torch.bfloat16).view(q.shape)


def paged_mqa_logits(
    q_data: torch.Tensor,
    q_sf: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
    *,
    one_sequence: bool = False,
) -> torch.Tensor:
    """Gather and decode every token's pages, one matmul, relu, one weighted sum over the heads."""
    query_format, key_format = _BY_DATA_BYTES[q_data.shape[-1]], INDEX_FORMATS[kv_cache.shape[3]]
    queries = decode(as_bytes(q_data)[:, 0], as_bytes(q_sf)[:, 0], query_format)
    page_kv = kv_cache.shape[1]
    longest = min(int(context_lens.max()) if len(queries) else 0, max_context_len)
    table = block_table[: 1 if one_sequence else None, : -(-longest // page_kv)]
    pages = table.clamp(0, kv_cache.shape[0] - 1)  # stale entries past a context are gathered, and masked below
    runs = kv_cache.as_strided((kv_cache.shape[0], page_kv * key_format.bytes), (kv_cache.stride(0), 1))
    data, scales = split_runs(runs.index_select(0, pages.flatten()), key_format)
    keys = decode_keys(data, scales, key_format).view(len(table), table.shape[1] * page_kv, key_format.dim)
    scores = torch.matmul(queries, keys.mT).relu_()
    sums = torch.matmul(weights.float()[:, None], scores)[:, 0, :max_context_len]
    dead = torch.arange(sums.shape[1], device=sums.device) >= context_lens
    out = sums.new_full((len(queries), max_context_len), -torch.inf, dtype=torch.bfloat16)
    out[:, : sums.shape[1]] = sums.masked_fill_(dead, -torch.inf)
    return out


def softmax_pool(score_rows: torch.Tensor, latent_rows: torch.Tensor) -> torch.Tensor:
    """Softmax, product, sum; a masked latent is not used, even if it is NaN."""
    products = score_rows.softmax(1).mul_(latent_rows).masked_fill_(score_rows == -torch.inf, 0.0)
    return products.sum(1).to(torch.bfloat16)


def _gather_keys(
    cache: torch.Tensor, indices: torch.Tensor, topk_length: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decoded keys ``[b * s_q, topk, 512]`` and which of them are live; dead ones are slot 0's."""
    fmt, page, topk = KV_FORMATS[cache.shape[3]], cache.shape[1], indices.shape[2]
    live = indices >= 0
    if topk_length is not None:
        live = live & (torch.arange(topk, device=indices.device) < topk_length[:, None, None])
    slots = indices.masked_fill(~live, 0).flatten()
    if cache.stride(0) == page * cache.stride(1):
        records = cache.flatten(0, 2).index_select(0, slots)  # one row stride for all slots: rows are copied whole
    else:
        records = cache[slots // page, slots % page, 0]
    keys = decode_keys(records[:, : fmt.data_bytes], records[:, fmt.data_bytes :], fmt)
    return keys.view(live.shape[0] * live.shape[1], topk, fmt.dim), live.flatten(0, 1)
