"""``deepinfer::paged_mqa_logits`` on Neuron: pages gathered whole, decoded, scored by the kernel, masked at the end."""

from __future__ import annotations

import torch

from .. import config
from ..paged_mqa_logits import check_arguments, empty_logits
from . import kernels
from .decode import decode_keys, decode_queries
from .gathers import gather_blocks
from .inputs import pad_rows
from .plans import LogitsPlan
from .routes import plan_logits
from .shapes import LogitsShape


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
    """The operator's arguments, the operator's result."""
    arguments = (q_data, q_sf, kv_cache, weights, context_lens, block_table, max_context_len, one_sequence)
    plan = plan_call(*arguments)
    if plan.route == "empty":
        return empty_logits(q_data, max_context_len).fill_(-torch.inf)
    fast = config.current().fast_e4m3
    lengths = context_lens.clamp(0, int(max_context_len))
    keys, followed = _keys(plan, kv_cache, block_table, lengths, fast)
    queries = decode_queries(q_data, q_sf, plan.query, fast=fast)
    scores = _scores(plan, queries, keys, weights.to(torch.float32))
    width = min(int(max_context_len), plan.pages * plan.cache.page)
    position = torch.arange(width, dtype=torch.int32, device=q_data.device)
    live = (position < lengths) & followed[:, :width]
    live_scores = torch.where(live, scores[:, :width].to(torch.bfloat16), -torch.inf)
    # The documented row stride: a result of aligned rows, seen without what aligns them.
    aligned = empty_logits(q_data, max_context_len).stride(0)
    past = live_scores.new_full((plan.tokens, aligned - width), -torch.inf)
    return torch.cat([live_scores, past], dim=1)[:, : int(max_context_len)]


def plan_call(
    q_data: torch.Tensor,
    q_sf: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
    one_sequence: bool = False,
) -> LogitsPlan:
    """The route of one call; raises as the operator does where the contract is broken."""
    arguments = (q_data, q_sf, kv_cache, weights, context_lens, block_table, max_context_len, one_sequence)
    formats = check_arguments(*arguments)
    return plan_logits(LogitsShape.of(formats, q_data, kv_cache, block_table, max_context_len, one_sequence))


def _keys(
    plan: LogitsPlan,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    fast: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [tables, positions, 128] bf16, 0 at dead positions, and where a page could be followed [tables, positions].

    Dead positions read page 0: entries past the context are stale, and none reaches the gather.
    """
    fmt, page = plan.cache.fmt, plan.cache.page
    lengths = lengths.amax(0, keepdim=True) if plan.tables == 1 else lengths
    ids = block_table[: plan.tables, : plan.pages]
    first = torch.arange(plan.pages, dtype=torch.int32, device=ids.device) * page
    followed = (ids >= 0) & (ids < plan.cache.blocks) & (first < lengths)
    runs = gather_blocks(kv_cache, plan.cache, torch.where(followed, ids, 0).reshape(-1))
    runs = runs.reshape(plan.tables * plan.pages, page * fmt.bytes)
    data, scales = runs[:, : page * fmt.data_bytes], runs[:, page * fmt.data_bytes :]
    followed = followed.repeat_interleave(page, dim=1)
    position = torch.arange(plan.pages * page, dtype=torch.int32, device=ids.device)
    live = followed & (position < lengths)
    keys = decode_keys(
        data.reshape(-1, fmt.data_bytes),
        scales.reshape(-1, fmt.scale_bytes),
        fmt,
        fast=fast,
        live=live.reshape(-1),
    ).view(plan.tables, plan.pages * page, fmt.dim)
    missing = plan.positions - plan.pages * page
    return torch.nn.functional.pad(keys, (0, 0, 0, missing)) if missing else keys, followed


def _scores(plan: LogitsPlan, queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[tokens, positions] fp32 from queries [tokens * heads, 128] and weights [tokens, heads] fp32."""
    on_device, heads = plan.kernel is not None, plan.heads
    if plan.route == "one sequence":
        queries, weights = pad_rows(queries, plan.kernel_tokens * heads), pad_rows(weights, plan.kernel_tokens)
        scores = kernels.call("weighted_scores", queries, keys[0], weights.t(), on_device=on_device)
        return scores[: plan.tokens]
    calls = zip(queries.view(plan.tokens, heads, -1), keys, weights.unsqueeze(2), strict=True)
    return torch.cat([kernels.call("weighted_scores", *call, on_device=on_device) for call in calls])
