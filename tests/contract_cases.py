"""Every way to break one argument of a good call, and the words that must answer it: data for ``test_contract*.py``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sample_calls
import torch
from sample_calls import Call
from torch import Tensor

NO_GRAD = "expected a tensor that does not require grad (there is no backward), got requires_grad=True"


@dataclass(frozen=True)
class Case:
    """``change`` maps the good argument to a bad one; ``message`` is what follows ``deepinfer::<op>: <argument>: ``."""

    op: str
    argument: str
    change: Callable[[Any], Any]
    message: str
    also: str | None = None  # the argument the message names, where it is another one

    @property
    def text(self) -> str:
        return f"deepinfer::{self.op}: {self.also or self.argument}: {self.message}"

    def apply(self, call: Call) -> Call:
        arguments = dict(call.arguments)
        arguments[self.argument] = self.change(arguments[self.argument])
        return Call(call.op, arguments)

    def __str__(self) -> str:
        return f"{self.op}-{self.argument}-{self.message}"


def good(op: str) -> Call:
    """The call every case breaks: all arguments given, every size different from its neighbours."""
    if op == "flash_mla_decode":
        return sample_calls.decode(sample_calls.EVERYTHING, hinted=True)
    if op == "paged_mqa_logits":
        return sample_calls.logits(sample_calls.SCORES)
    return sample_calls.POOL["contiguous"]()


def resized(*shape: int) -> Callable[[Tensor], Tensor]:
    """Another shape, same dtype."""
    return lambda t: torch.zeros(shape, dtype=t.dtype)


def restrided(*strides: int) -> Callable[[Tensor], Tensor]:
    """Another stride per dimension, same shape."""
    return lambda t: torch.empty_strided(t.shape, strides, dtype=t.dtype).zero_()


def typed(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda t: torch.zeros(t.shape, dtype=dtype)


def retyped(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Another dtype, also one that cannot be filled."""
    return lambda t: torch.empty(t.shape, dtype=dtype)


def to(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def trainable(t: Tensor) -> Tensor:
    return t.clone().requires_grad_()


def dtype_cases(op: str, argument: str, expected: str, *dtypes: torch.dtype) -> list[Case]:
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    return [
        Case(op, argument, typed(dtype), f"expected dtype {expected}, got {name}")
        for dtype, name in zip(dtypes, names, strict=True)
    ]


def shape_cases(op: str, argument: str, expected: str, *shapes: tuple[int, ...]) -> list[Case]:
    return [Case(op, argument, resized(*s), f"expected shape {expected}, got {list(s)}") for s in shapes]


def overlapping(op: str, argument: str, block: int, token: int) -> Case:
    message = f"expected blocks that do not overlap, got stride(0) {block}, stride(1) {token}"
    return Case(op, argument, restrided(block, token, token, 1), message)


def cache_cases(op: str, argument: str, names: tuple[str, str, str], page: int, size: int, known: str) -> list[Case]:
    """What every paged cache demands; index caches, whose pages are planar, differ in stride(1) only."""
    shape = f"[{names[0]}, {names[1]}, 1, {names[2]}]"
    planar = op == "paged_mqa_logits"
    at_least = "" if planar else ">= "
    extent = page * size
    return [
        *dtype_cases(op, argument, "uint8", torch.int8, torch.float8_e4m3fn, torch.float8_e8m0fnu),
        *shape_cases(op, argument, shape, (5, page, size), (5, page, 2, size), (5 * page * size,)),
        *[
            Case(op, argument, resized(5, page, 1, wrong), f"expected {names[2]} {known}, got {wrong}")
            for wrong in (0, size - 1, size + 1, 512, 656)
        ],
        Case(op, argument, resized(5, 0, 1, size), f"expected {names[1]} >= 1, got 0"),
        Case(op, argument, restrided(2 * extent, 2 * size, 2 * size, 2), "expected stride(3) 1, got 2"),
        Case(op, argument, restrided(0, 0, 0, 0), "expected stride(3) 1, got 0"),
        Case(
            op, argument, restrided(extent, size - 1, size, 1), f"expected stride(1) {at_least}{size}, got {size - 1}"
        ),
        *[overlapping(op, argument, stride, size) for stride in (0, size, extent - 1)],
    ]


def _decode() -> list[Case]:
    op = "flash_mla_decode"
    main, extra = ("num_blocks", "page", "bytes"), ("extra_num_blocks", "extra_page", "extra_bytes")
    known = "528 (fp8) or 288 (fp4)"
    cases = [
        *dtype_cases(op, "q", "bfloat16", torch.float16, torch.float32, torch.int16, torch.uint8, torch.float8_e4m3fn),
        *shape_cases(op, "q", "[b, s_q, h_q, 512]", (2, 3, 4, 511), (2, 3, 512), (2, 3, 4, 1, 512), (), (2, 3, 4, 0)),
        Case(op, "q", resized(2, 0, 4, 512), "expected s_q >= 1, got 0"),
        Case(op, "q", resized(2, 3, 0, 512), "expected h_q >= 1, got 0"),
        Case(op, "q", trainable, NO_GRAD),
        Case(op, "q", resized(1, 3, 4, 512), "expected shape [1, 3, topk], got [2, 3, 6]", also="indices"),
        *cache_cases(op, "k_cache", main, 4, 528, known),
        Case(op, "k_cache", restrided(4000, 600, 600, 2), "expected stride(3) 1, got 2"),
        overlapping(op, "k_cache", 2327, 600),
        overlapping(op, "k_cache", 528, 5 * 528 - 1),  # one byte less than blocks whose tokens take turns
        overlapping(op, "k_cache", 527, 5 * 528),
        *dtype_cases(op, "indices", "int32", torch.int64, torch.int16, torch.uint32, torch.float32, torch.bool),
        *shape_cases(op, "indices", "[2, 3, topk]", (2, 3), (1, 3, 6), (2, 1, 6), (2, 3, 1, 6), (6, 6)),
        *dtype_cases(op, "topk_length", "int32", torch.int64, torch.uint8),
        *shape_cases(op, "topk_length", "[2]", (), (1,), (3,), (2, 1), (2, 3)),
        *dtype_cases(op, "attn_sink", "float32", torch.bfloat16, torch.float64),
        *shape_cases(op, "attn_sink", "[4]", (), (1,), (5,), (4, 1), (1, 4)),
        Case(op, "attn_sink", trainable, NO_GRAD),
        *cache_cases(op, "extra_k_cache", extra, 3, 288, known),
        *dtype_cases(op, "extra_indices", "int32", torch.int64, torch.bool),
        *shape_cases(op, "extra_indices", "[2, 3, extra_topk]", (2, 9), (3, 3, 9), (2, 1, 9), (2, 3, 9, 1)),
        *dtype_cases(op, "extra_topk_length", "int32", torch.int64, torch.float32),
        *shape_cases(op, "extra_topk_length", "[2]", (), (3,), (2, 1)),
        Case(op, "extra_k_cache", to(None), "expected None without extra_k_cache, got a value", also="extra_indices"),
        Case(op, "extra_indices", to(None), "expected a value with extra_k_cache, got None"),
        *[
            Case(op, "softmax_scale", to(bad), f"expected a finite number, got {bad}")
            for bad in (math.nan, math.inf, -math.inf)
        ],
        *[
            Case(op, hint, to(bad), f"expected {hint} >= 0, got {bad}")
            for hint in ("max_requests", "max_context", "chunk_blocks")
            for bad in (-1, -(2**40))
        ],
        Case(op, "chunk_blocks", to(4), "expected at most 3, got 4"),
        Case(op, "chunk_blocks", to(None), "expected a value with chunk_block_table, got None"),
        Case(op, "chunk_offset_len", to(None), "expected a value with chunk_block_table, got None"),
        Case(op, "chunk_block_table", to(None), "expected None without chunk_block_table, got a value", "chunk_blocks"),
        *dtype_cases(op, "chunk_block_table", "int32", torch.int64, torch.uint8),
        *shape_cases(op, "chunk_block_table", "[n]", (), (3, 1), (1, 3)),
        *dtype_cases(op, "chunk_offset_len", "int32", torch.int64, torch.float32),
        *shape_cases(op, "chunk_offset_len", "[rows, 2]", (6,), (6, 1), (6, 3), (2, 3, 2)),
        Case(op, "chunk_offset_len", resized(5, 2), "expected rows >= 6, got 5"),
        Case(op, "chunk_offset_len", resized(0, 2), "expected rows >= 6, got 0"),
    ]
    return cases


def _logits() -> list[Case]:
    op = "paged_mqa_logits"
    query = "float8_e4m3fn, int8 or uint8"
    wrong_queries = (torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.int16, torch.uint16)
    return [
        *dtype_cases(op, "q_data", query, *wrong_queries, torch.float4_e2m1fn_x2, torch.bool),
        *shape_cases(op, "q_data", "[T, 1, H, 128]", (3, 1, 4, 64), (3, 4, 128), (3, 2, 4, 128), (3, 4, 1, 128), ()),
        Case(op, "q_data", lambda q: q.view(torch.uint8), "expected shape [T, 1, H, 64], got [3, 1, 4, 128]"),
        Case(op, "q_data", lambda q: q.view(torch.int8), "expected shape [T, 1, H, 64], got [3, 1, 4, 128]"),
        Case(op, "q_data", resized(3, 1, 0, 128), "expected H >= 1, got 0"),
        Case(op, "q_data", trainable, NO_GRAD),
        Case(op, "q_data", resized(2, 1, 4, 128), "expected shape [2, 1, 4, 4], got [3, 1, 4, 4]", also="q_sf"),
        *dtype_cases(op, "q_sf", "uint8 or int16", torch.int8, torch.int32, torch.float32, torch.float8_e8m0fnu),
        *shape_cases(op, "q_sf", "[3, 1, 4, 4]", (3, 1, 4, 2), (3, 4, 4), (3, 1, 5, 4), (2, 1, 4, 4), (3, 1, 4, 128)),
        Case(op, "q_sf", to(torch.zeros(3, 1, 4, 4).short()), "expected shape [3, 1, 4, 2], got [3, 1, 4, 4]"),
        *cache_cases(op, "kv_cache", ("pages", "page_kv", "token_bytes"), 4, 132, "132 (fp8) or 68 (fp4)"),
        Case(op, "kv_cache", restrided(1000, 133, 133, 1), "expected stride(1) 132, got 133"),
        Case(op, "kv_cache", restrided(5, 660, 660, 1), "expected stride(1) 132, got 660"),
        *dtype_cases(op, "weights", "bfloat16 or float32", torch.float16, torch.float64, torch.int32),
        *shape_cases(op, "weights", "[3, 4]", (3,), (4, 3), (3, 1), (3, 4, 1), (1, 4)),
        Case(op, "weights", trainable, NO_GRAD),
        *dtype_cases(op, "context_lens", "int32", torch.int64, torch.uint32),
        *shape_cases(op, "context_lens", "[3, 1]", (3,), (1, 3), (3, 2), (4, 1), ()),
        *dtype_cases(op, "block_table", "int32", torch.int64, torch.int16),
        *shape_cases(op, "block_table", "[3, W]", (2,), (1, 2), (4, 2), (3, 2, 1)),
        Case(op, "max_context_len", to(-1), "expected max_context_len >= 0, got -1"),
        Case(op, "max_context_len", to(-(2**40)), f"expected max_context_len >= 0, got {-(2**40)}"),
    ]


def _pool() -> list[Case]:
    op = "softmax_pool"
    others = (torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.complex64)
    return [
        *dtype_cases(op, "score_rows", "float32", *others),
        *shape_cases(op, "score_rows", "[N, R, D]", (), (5,), (3, 5), (2, 3, 5, 1)),
        Case(op, "score_rows", resized(2, 0, 5), "expected R >= 1, got 0"),
        Case(op, "score_rows", trainable, NO_GRAD),
        Case(op, "score_rows", resized(2, 4, 5), "expected shape [2, 4, 5], got [2, 3, 5]", also="latent_rows"),
        *dtype_cases(op, "latent_rows", "float32", *others),
        *shape_cases(op, "latent_rows", "[2, 3, 5]", (), (3, 5), (1, 3, 5), (2, 1, 5), (2, 3, 1), (2, 5, 3)),
        Case(op, "latent_rows", trainable, NO_GRAD),
    ]


CASES = [*_decode(), *_logits(), *_pool()]

OPERATORS = ("flash_mla_decode", "paged_mqa_logits", "softmax_pool")
