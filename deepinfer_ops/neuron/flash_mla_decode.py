"""``deepinfer::flash_mla_decode`` on Neuron: carries out the route that ``routes.plan_decode`` picked."""

from __future__ import annotations

import torch

from .. import config
from ..flash_mla_decode import check_arguments
from ..record_format import LATENT_DIM
from .dense_chunk import Chunk, dense_chunk, log_difference
from .gathered_routes import gathered
from .inputs import Lists, Query
from .plans import DecodePlan
from .routes import plan_decode
from .shapes import DecodeShape

Given = dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]


def flash_mla_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    extra_k_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    softmax_scale: float,
    *,
    max_requests: int | None = None,
    max_context: int | None = None,
    chunk_block_table: torch.Tensor | None = None,
    chunk_blocks: int | None = None,
    chunk_offset_len: torch.Tensor | None = None,
) -> torch.Tensor:
    """The operator's arguments, the operator's result."""
    hints = (max_requests, max_context, chunk_block_table, chunk_blocks, chunk_offset_len)
    scopes = (k_cache, indices, topk_length, attn_sink, extra_k_cache, extra_indices, extra_topk_length)
    plan = plan_call(q, *scopes, softmax_scale, *hints)
    if plan.route == "empty":
        return q.new_zeros(q.shape)
    given: Given = {"main": (k_cache, indices, topk_length)}
    if extra_k_cache is not None and extra_indices is not None:
        given["extra"] = (extra_k_cache, extra_indices, extra_topk_length)
    query = Query.of(plan, q, attn_sink, softmax_scale, config.current().fast_e4m3)
    if chunk_block_table is not None and chunk_offset_len is not None and plan.route == "dense chunk":
        out = dense_chunk(plan, _lists(plan, given), query, Chunk(chunk_block_table, chunk_offset_len))
        if plan.checked is not None:
            dense, out = out, gathered(plan.checked, _lists(plan.checked, given), query)
            log_difference(dense, out)
    else:
        out = gathered(plan, _lists(plan, given), query)
    return out[: plan.rows].reshape(q.shape)


def plan_call(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    softmax_scale: float = LATENT_DIM**-0.5,
    max_requests: int | None = None,
    max_context: int | None = None,
    chunk_block_table: torch.Tensor | None = None,
    chunk_blocks: int | None = None,
    chunk_offset_len: torch.Tensor | None = None,
) -> DecodePlan:
    """The route of one call under the settings in force; raises as the operator does where the contract is broken."""
    formats = check_arguments(
        *(q, k_cache, indices, topk_length, attn_sink, extra_k_cache, extra_indices, extra_topk_length, softmax_scale),
        *(max_requests, max_context, chunk_block_table, chunk_blocks, chunk_offset_len),
    )
    hints = (max_requests, max_context, chunk_blocks)
    shape = DecodeShape.of(formats, q, k_cache, indices, extra_k_cache, extra_indices, *hints)
    return plan_decode(shape, config.current())


def _lists(plan: DecodePlan, given: Given) -> list[Lists]:
    return [Lists.of(scope, *given[scope.name], plan.padded_rows) for scope in plan.scopes]
