"""``deepinfer::flash_mla_decode``: sparse MQA attention over paged, quantized MLA caches.

Schema, contract, fake function, public function, in this order. The CPU kernel is ``csrc/flash_mla_decode.cpp``, the
Neuron composition ``neuron/flash_mla_decode.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .contract import Checker, Size, paged_cache
from .library import define, fake
from .record_format import KV_FORMATS, LATENT_DIM, RecordFormat

define(
    "flash_mla_decode(Tensor q, Tensor k_cache, Tensor indices, Tensor? topk_length, Tensor? attn_sink, "
    "Tensor? extra_k_cache, Tensor? extra_indices, Tensor? extra_topk_length, float softmax_scale, *, "
    "SymInt? max_requests=None, SymInt? max_context=None, Tensor? chunk_block_table=None, "
    "SymInt? chunk_blocks=None, Tensor? chunk_offset_len=None) -> Tensor"
)


@dataclass(frozen=True)
class DecodeFormats:
    """What the contract learns on the way: the record format of each scope."""

    main: RecordFormat
    extra: RecordFormat | None


def check_arguments(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    extra_k_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    softmax_scale: float,
    max_requests: Size | None = None,
    max_context: Size | None = None,
    chunk_block_table: torch.Tensor | None = None,
    chunk_blocks: Size | None = None,
    chunk_offset_len: torch.Tensor | None = None,
) -> DecodeFormats:
    """The contract. ``csrc/flash_mla_decode.cpp`` checks the same, in the same order, with the same words."""
    check = Checker("flash_mla_decode")
    check.no_grad(q=q, attn_sink=attn_sink)
    check.tensor("q", q, [torch.bfloat16], ["b", "s_q", "h_q", LATENT_DIM])
    check.at_least("q", "s_q", check.size("s_q"), 1)
    check.at_least("q", "h_q", check.size("h_q"), 1)
    names = ("num_blocks", "page", "bytes")
    main = paged_cache(check, "k_cache", k_cache, KV_FORMATS, names, planar=False)
    check.tensor("indices", indices, [torch.int32], ["b", "s_q", "topk"])
    if topk_length is not None:
        check.tensor("topk_length", topk_length, [torch.int32], ["b"])
    if attn_sink is not None:
        check.tensor("attn_sink", attn_sink, [torch.float32], ["h_q"])
    extra = None
    check.together("extra_indices", extra_indices, "extra_k_cache", extra_k_cache)
    if extra_k_cache is not None and extra_indices is not None:
        names = ("extra_num_blocks", "extra_page", "extra_bytes")
        extra = paged_cache(check, "extra_k_cache", extra_k_cache, KV_FORMATS, names, planar=False)
        check.tensor("extra_indices", extra_indices, [torch.int32], ["b", "s_q", "extra_topk"])
    if extra_topk_length is not None:
        check.require(extra is not None, "extra_topk_length", "None without extra_k_cache", lambda: "a value")
        check.tensor("extra_topk_length", extra_topk_length, [torch.int32], ["b"])
    check.require(math.isfinite(softmax_scale), "softmax_scale", "a finite number", lambda: softmax_scale)
    if max_requests is not None:
        check.at_least("max_requests", "max_requests", max_requests, 0)
    if max_context is not None:
        check.at_least("max_context", "max_context", max_context, 0)
    check.together("chunk_blocks", chunk_blocks, "chunk_block_table", chunk_block_table)
    check.together("chunk_offset_len", chunk_offset_len, "chunk_block_table", chunk_block_table)
    if chunk_block_table is not None and chunk_blocks is not None and chunk_offset_len is not None:
        check.tensor("chunk_block_table", chunk_block_table, [torch.int32], ["n"])
        check.at_least("chunk_blocks", "chunk_blocks", chunk_blocks, 0)
        n = check.size("n")
        check.require(chunk_blocks <= n, "chunk_blocks", f"at most {n}", lambda: chunk_blocks)
        check.tensor("chunk_offset_len", chunk_offset_len, [torch.int32], ["rows", 2])
        rows = check.size("b") * check.size("s_q")
        check.at_least("chunk_offset_len", "rows", check.size("rows"), rows)
    return DecodeFormats(main, extra)


@fake("flash_mla_decode")
def _(q: torch.Tensor, *args: object, **hints: object) -> torch.Tensor:
    check_arguments(q, *args, **hints)  # type: ignore[arg-type]
    return torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)


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
    *,
    max_requests: int | None = None,
    max_context: int | None = None,
    chunk_block_table: torch.Tensor | None = None,
    chunk_blocks: int | None = None,
    chunk_offset_len: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from every query row to the cached latents its index list names; keys are values.

    For a row with live keys k_1..k_n (main scope first, then extra) and head h, with
    ``logit_i = softmax_scale * (q_h . k_i)`` and m the largest logit::

        out_h = sum_i exp(logit_i - m) * k_i / (sum_i exp(logit_i - m) + exp(sink_h - m))

    Args:
        q: ``[b, s_q, h_q, 512]`` bfloat16, any strides.
        k_cache: ``[num_blocks, page, 1, bytes]`` uint8 of records (528 bytes: fp8, 288: fp4; docs/formats.md).
            ``stride(3)`` is 1, ``stride(1)`` may exceed ``bytes``, ``stride(0)`` may skip over other layers' blocks.
        indices: ``[b, s_q, topk]`` int32 slots (``block * page + offset``) in any order; -1 is no key, anywhere in
            the list. A slot listed twice counts twice. Unlike FlashMLA, only -1 means "no key": a slot past the cache
            is an error on CPU and masked on Neuron.
        topk_length: ``[b]`` int32 in 0..topk: entries at and past it are never looked at. None: all are live.
        attn_sink: ``[h_q]`` float32 logits of a key without value. -inf: no effect, +inf: that head gives 0.
        extra_k_cache, extra_indices, extra_topk_length: a second scope with its own page size, record format and
            top-k; its keys join the same softmax.
        softmax_scale: any finite number; default ``512 ** -0.5``.
        max_requests, max_context: promises that bound the work on Neuron; they never change the result.
        chunk_block_table, chunk_blocks, chunk_offset_len: ``[n]`` int32, an int and ``[rows or more, 2]`` int32,
            one request's prompt chunk as arithmetic (Neuron only; docs/neuron.md); they never change the result.

    Returns:
        ``[b, s_q, h_q, 512]`` bfloat16, contiguous. Rows without a live key are 0.

    Raises:
        RuntimeError: a bad argument (``deepinfer::flash_mla_decode: <argument>: expected ..., got ...``), on CPU also
            a slot or length outside its range, naming position and value.

    Example:
        >>> out = flash_mla_decode(q, k_cache, indices, topk_length, attn_sink=sink)
    """
    return torch.ops.deepinfer.flash_mla_decode(  # type: ignore[no-any-return]
        q,
        k_cache,
        indices,
        topk_length,
        attn_sink,
        extra_k_cache,
        extra_indices,
        extra_topk_length,
        softmax_scale,
        max_requests=max_requests,
        max_context=max_context,
        chunk_block_table=chunk_block_table,
        chunk_blocks=chunk_blocks,
        chunk_offset_len=chunk_offset_len,
    )
