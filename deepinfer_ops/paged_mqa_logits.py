"""``deepinfer::paged_mqa_logits``: the lightning indexer's scores over a paged, quantized index cache.

Schema, contract, fake function, public function, in this order. The CPU kernel is ``csrc/paged_mqa_logits.cpp``, the
Neuron composition ``neuron/paged_mqa_logits.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .contract import Checker, Size, paged_cache
from .library import define, fake
from .record_format import INDEX_FORMATS, RecordFormat, by_name

define(
    "paged_mqa_logits(Tensor q_data, Tensor q_sf, Tensor kv_cache, Tensor weights, Tensor context_lens, "
    "Tensor block_table, SymInt max_context_len, *, bool one_sequence=False) -> Tensor"
)

QUERY_DTYPES = (torch.float8_e4m3fn, torch.int8, torch.uint8)
"""fp8 elements, or bytes of two packed e2m1."""

ROW_ALIGNMENT = 256
"""Output rows start at multiples of this many elements: 512 bytes, as in DeepGEMM."""


@dataclass(frozen=True)
class LogitsFormats:
    """What the contract learns on the way: the formats of query and keys, which may differ."""

    query: RecordFormat
    keys: RecordFormat


def check_arguments(
    q_data: torch.Tensor,
    q_sf: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: Size,
    one_sequence: bool = False,
) -> LogitsFormats:
    """The contract. ``csrc/paged_mqa_logits.cpp`` checks the same, in the same order, with the same words."""
    check = Checker("paged_mqa_logits")
    check.no_grad(q_data=q_data, weights=weights)
    query = by_name(INDEX_FORMATS, "fp8" if q_data.dtype == torch.float8_e4m3fn else "fp4")
    check.tensor("q_data", q_data, QUERY_DTYPES, ["T", 1, "H", query.data_bytes])
    check.at_least("q_data", "H", check.size("H"), 1)
    # Scales may come two to an int16, as DeepGEMM's packed layouts do.
    per_item = 2 if q_sf.dtype == torch.int16 else 1
    check.tensor("q_sf", q_sf, [torch.uint8, torch.int16], ["T", 1, "H", query.scale_bytes // per_item])
    names = ("pages", "page_kv", "token_bytes")
    keys = paged_cache(check, "kv_cache", kv_cache, INDEX_FORMATS, names, planar=True)
    check.tensor("weights", weights, [torch.bfloat16, torch.float32], ["T", "H"])
    check.tensor("context_lens", context_lens, [torch.int32], ["T", 1])
    check.tensor("block_table", block_table, [torch.int32], ["T", "W"])
    check.at_least("max_context_len", "max_context_len", max_context_len, 0)
    return LogitsFormats(query, keys)


@fake("paged_mqa_logits")
def _(q_data: torch.Tensor, *args: object, **flags: object) -> torch.Tensor:
    check_arguments(q_data, *args, **flags)  # type: ignore[arg-type]
    return empty_logits(q_data, args[5])  # type: ignore[arg-type]


def empty_logits(q_data: torch.Tensor, max_context_len: Size) -> torch.Tensor:
    """An uninitialised result: ``[T, max_context_len]`` bfloat16 with aligned rows."""
    aligned = (max_context_len + ROW_ALIGNMENT - 1) // ROW_ALIGNMENT * ROW_ALIGNMENT
    size = (q_data.shape[0], max_context_len)
    return torch.empty_strided(size, (aligned, 1), dtype=torch.bfloat16, device=q_data.device)


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
    """Score every cached index key for every token: ``sum_h relu(q_h . k_j) * w_h``.

    Args:
        q_data: ``[T, 1, H, 128]`` float8_e4m3fn, or ``[T, 1, H, 64]`` int8/uint8 of packed e2m1 (even element in the
            low nibble).
        q_sf: ue8m0 scales, one per 32 elements: ``[T, 1, H, 4]`` uint8, or ``[T, 1, H, 2]`` int16 (low byte first).
        kv_cache: ``[pages, page_kv, 1, token_bytes]`` uint8 (132 bytes: fp8, 68: fp4), in q's format or the other.
            A page is planar: the element bytes of all its tokens, then four scale bytes per token (docs/formats.md).
        weights: ``[T, H]`` bfloat16 or float32.
        context_lens: ``[T, 1]`` int32 >= 0: keys 0..context-1 are live. Longer than ``max_context_len`` or than the
            block table: cut there.
        block_table: ``[T, W]`` int32: key j of token t lives in page ``block_table[t, j // page_kv]``. Entries past
            the context are stale and never followed.
        max_context_len: columns of the result.
        one_sequence: promise that all tokens belong to one sequence, so that ``block_table[0]`` serves them all.

    Returns:
        ``[T, max_context_len]`` bfloat16; -inf past each context. ``stride(0)`` is ``max_context_len`` rounded up to
        256 elements. Accumulated in float32, rounded once.

    Raises:
        RuntimeError: a bad argument (``deepinfer::paged_mqa_logits: <argument>: expected ..., got ...``), on CPU also
            a live page outside the cache or a negative context, naming position and value.

    Example:
        >>> scores = paged_mqa_logits(q_data, q_sf, cache, weights, context_lens, block_table, 16384)
        >>> top = scores.topk(512, dim=-1).indices
    """
    return torch.ops.deepinfer.paged_mqa_logits(  # type: ignore[no-any-return]
        q_data,
        q_sf,
        kv_cache,
        weights,
        context_lens,
        block_table,
        max_context_len,
        one_sequence=one_sequence,
    )
