"""Inputs of one operator call, its roof, and its compulsory work. Caches are packed by the package's own packers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

import deepinfer_ops
from deepinfer_ops import packers, packers_index, reference
from deepinfer_ops.record_format import INDEX_DIM, LATENT_DIM

PAGE = 64
_DISTINCT = 1024  # records that are really packed; a cache repeats them in random order


@dataclass(frozen=True)
class Problem:
    """One call of one operator, and what it is measured against."""

    operator: str
    arguments: tuple[Any, ...]
    roof: Callable[[], object]
    """The same products through torch's fp32 GEMM on ready operands; for the pool, a copy of as many bytes."""
    flops: int
    bytes: int
    """What must be read and written once: the records, the queries, the result."""
    asides: dict[str, Callable[[], object]] = field(default_factory=dict)
    """Other work that explains the operator's time."""

    def run(self) -> torch.Tensor:
        return getattr(deepinfer_ops, self.operator)(*self.arguments)

    def compose(self) -> torch.Tensor:
        return getattr(reference, self.operator)(*self.arguments)

    def compiled(self) -> Callable[[], torch.Tensor]:
        """The composition through inductor, specialised to this problem's shapes."""
        torch._dynamo.reset()  # one function serves every case: without this, dynamo stops at its recompile limit
        composition = torch.compile(getattr(reference, self.operator), dynamic=False)
        return lambda: composition(*self.arguments)


@cache
def kv_cache(fmt: str, slots: int) -> torch.Tensor:
    records = packers.quantize_kv(torch.randn(_DISTINCT, LATENT_DIM), fmt)
    return records[torch.randint(_DISTINCT, (slots,))].view(-1, PAGE, 1, records.shape[1])


@cache
def index_cache(fmt: str, slots: int) -> torch.Tensor:
    data, scales = packers_index.quantize_index(torch.randn(_DISTINCT, INDEX_DIM), fmt)
    pick = torch.randint(_DISTINCT, (slots // PAGE, PAGE))
    planes = torch.cat([data[pick].flatten(1), scales[pick].flatten(1)], 1)
    return planes.view(-1, PAGE, 1, data.shape[1] + scales.shape[1])


def decode(heads: int, rows: int, keys: int, extra: int = 0, extra_format: str = "fp8", dead: bool = False) -> Problem:
    """``rows`` requests of one token each: ``keys`` fp8 keys in the main scope, ``extra`` ones in the other.

    ``dead``: every listed slot is -1, so that nothing is left to compute.
    """
    q = torch.randn(rows, 1, heads, LATENT_DIM).bfloat16()
    scopes = [(kv_cache("fp8", 8192), keys)] + ([(kv_cache(extra_format, 16384), extra)] if extra else [])
    lists = [torch.randint(len(c) * PAGE, (rows, 1, n), dtype=torch.int32) for c, n in scopes]
    if dead:
        lists = [torch.full_like(slots, -1) for slots in lists]
    sink = torch.zeros(heads)
    second = (scopes[1][0], lists[1]) if extra else (None, None)
    arguments = (q, scopes[0][0], lists[0], None, sink, *second)

    live = keys + extra
    queries, panel = torch.randn(rows, heads, LATENT_DIM), torch.randn(rows, live, LATENT_DIM)
    logits, out = torch.empty(rows, heads, live), torch.empty(rows, heads, LATENT_DIM)

    def roof() -> None:
        # Row by row: MKL's batched product is up to twice as slow as its single one where a row has few heads.
        for row in range(rows):
            torch.mm(queries[row], panel[row].t(), out=logits[row])
            torch.mm(logits[row], panel[row], out=out[row])

    records = rows * sum(n * c.shape[3] for c, n in scopes)
    moved = records + 2 * q.nbytes + sum(x.nbytes for x in lists)
    return Problem("flash_mla_decode", arguments, roof, 4 * rows * heads * live * LATENT_DIM, moved)


def logits(fmt: str, heads: int, positions: int, tokens: int = 1) -> Problem:
    """``tokens`` requests of one token each, every one with its own ``positions`` cached keys in shuffled pages."""
    keys = index_cache(fmt, tokens * positions)
    q_data, q_sf = packers_index.quantize_index_query(torch.randn(tokens, 1, heads, INDEX_DIM), fmt)
    table = torch.randperm(len(keys), dtype=torch.int32).view(tokens, -1)
    contexts = torch.full((tokens, 1), positions, dtype=torch.int32)
    arguments = (q_data, q_sf, keys, torch.randn(tokens, heads), contexts, table, positions)

    queries, panel = torch.randn(tokens, heads, INDEX_DIM), torch.randn(tokens, positions, INDEX_DIM)
    products = torch.empty(heads, positions)

    def roof() -> None:
        for token in range(tokens):
            torch.mm(queries[token], panel[token].t(), out=products)

    moved = keys.nbytes + q_data.nbytes + 2 * tokens * positions
    return Problem("paged_mqa_logits", arguments, roof, 2 * tokens * heads * positions * INDEX_DIM, moved)


def pool(n: int, r: int, d: int) -> Problem:
    scores, latents = torch.randn(n, r, d), torch.randn(n, r, d)
    moved = 2 * scores.nbytes + 2 * n * d
    # A copy reads and writes: half of the pool's bytes each way.
    source = torch.randn(-(-moved // 8))
    target = torch.empty_like(source)
    powers = torch.empty_like(scores)
    asides = {"torch.exp of the scores": lambda: torch.exp(scores, out=powers)}
    # Per score: maximum, difference, exp (counted as one), weight sum, product, product sum.
    return Problem("softmax_pool", (scores, latents), lambda: target.copy_(source), 6 * n * r * d, moved, asides)


def check_same(problem: Problem, composition: Callable[[], torch.Tensor]) -> None:
    """The composition computes what the operator does, or its time means nothing."""
    got, expected = composition().float(), problem.run().float()
    torch.testing.assert_close(got, expected, rtol=2**-6, atol=2**-7 * expected.abs().max().item())
