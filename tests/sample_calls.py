"""A list of good calls of all three operators, for tests about PyTorch rather than numbers.

Every optional argument, None, strided and pooled layouts, nothing at all, and the columns around a row's alignment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cases
import strategies_decode
import strategies_logits
import strategies_pool
import torch
from pack import Layout
from strategies_decode import DecodeProblem, Scope
from strategies_logits import LogitsProblem
from strategies_pool import PoolProblem

POOLED = Layout(token_pad=16, block_pad=64, pool=3, layer=1, offset=64)
POOLED_PAGES = Layout(block_pad=1000, pool=2, layer=1, offset=1)


@dataclass(frozen=True)
class Call:
    """One call: the operator's name, and its arguments by their names in the schema's order."""

    op: str
    arguments: dict[str, Any]

    @property
    def overload(self) -> torch._ops.OpOverload:
        return getattr(torch.ops.deepinfer, self.op).default

    def run(self) -> torch.Tensor:
        return self.overload(**self.arguments)

    def map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
        changed = {name: change(a) if isinstance(a, torch.Tensor) else a for name, a in self.arguments.items()}
        return Call(self.op, changed)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: a for name, a in self.arguments.items() if isinstance(a, torch.Tensor)}


def token_interleaved(cache: torch.Tensor) -> torch.Tensor:
    """The same cache with the tokens of all its blocks taking turns: stride(1) passes over every block."""
    return cache.transpose(0, 1).contiguous().transpose(0, 1)


def hints(inputs: strategies_decode.DecodeInputs, blocks: int = 3) -> dict[str, Any]:
    """Every hint of ``flash_mla_decode``, with one ``chunk_offset_len`` row more than needed."""
    rows = inputs.q.shape[0] * inputs.q.shape[1]
    return {
        "max_requests": 2,
        "max_context": 64,
        "chunk_block_table": cases.int32(range(blocks)),
        "chunk_blocks": blocks - 1,
        "chunk_offset_len": torch.zeros(rows + 1, 2, dtype=torch.int32),
    }


def decode(problem: DecodeProblem, *, hinted: bool = False, **changes: Any) -> Call:
    inputs = strategies_decode.build(problem)._replace(**changes)
    return Call("flash_mla_decode", inputs._asdict() | (hints(inputs) if hinted else {}))


def logits(problem: LogitsProblem, **changes: Any) -> Call:
    return Call("paged_mqa_logits", strategies_logits.build(problem)._replace(**changes)._asdict())


def pool(problem: PoolProblem, **changes: Any) -> Call:
    return Call("softmax_pool", strategies_pool.build(problem)._replace(**changes)._asdict())


MAIN = Scope("fp8", page=4, blocks=5, topk=6, lengths=(6, 2), holes=20)
EXTRA = Scope("fp4", page=3, blocks=7, topk=9, lengths=(0, 9))
EVERYTHING = DecodeProblem(b=2, s_q=3, h_q=4, main=MAIN, extra=EXTRA, sink="finite")
SCORES = LogitsProblem(contexts=(3, 0, 8), heads=4, pages=5, width=2, max_context_len=8)

DECODE = {
    "all optionals None": lambda: decode(DecodeProblem(b=2, h_q=3, main=Scope(blocks=4, topk=5))),
    "sink alone": lambda: decode(DecodeProblem(h_q=3, main=Scope(blocks=4, topk=5), sink="infinite")),
    "every argument": lambda: decode(EVERYTHING, hinted=True),
    "strided": lambda: decode(
        DecodeProblem(
            b=2,
            s_q=3,
            h_q=4,
            main=Scope("fp4", blocks=5, topk=6, lengths=(6, 2), layout=POOLED),
            extra=Scope("fp8", page=3, blocks=7, topk=9, layout=POOLED),
            sink="finite",
            q_place="swapped",
            small_place="gapped",
        )
    ),
    "interleaved": lambda: DECODE["sink alone"]().map_tensors(lambda t: token_interleaved(t) if t.dim() == 4 else t),
    "b = 0": lambda: decode(DecodeProblem(b=0, h_q=4, main=Scope(topk=8, lengths=()))),
    "topk = 0": lambda: decode(DecodeProblem(b=2, h_q=4, main=Scope(topk=0), extra=Scope(topk=0))),
    "no blocks": lambda: decode(
        DecodeProblem(h_q=2, main=Scope(topk=3, holes=100)), k_cache=torch.empty(0, 4, 1, 528, dtype=torch.uint8)
    ),
}
LOGITS = {
    "fp8 query, fp8 keys": lambda: logits(SCORES),
    "fp4 query, fp8 keys, packed scales": lambda: logits(
        LogitsProblem(contexts=(5, 1), heads=3, query="fp4", pages=4, width=2, packed_scales=True)
    ),
    "int8 fp4 query, fp4 keys, fp32 weights": lambda: logits(
        LogitsProblem((5, 1), 3, "fp4", "fp4", pages=4, width=2, nibble_dtype=torch.int8, weight_dtype=torch.float32)
    ),
    "strided": lambda: logits(
        LogitsProblem(
            contexts=(3, 7), heads=5, pages=4, width=3, layout=POOLED_PAGES, q_place="swapped", small_place="gapped"
        )
    ),
    "one sequence": lambda: logits(LogitsProblem((5, 6, 7), 2, pages=2, width=2, max_context_len=7, one_sequence=True)),
    "T = 0": lambda: logits(LogitsProblem(contexts=(), max_context_len=300)),
    "T = 1": lambda: logits(LogitsProblem(contexts=(2,), max_context_len=300)),
    "W = 0": lambda: logits(LogitsProblem(contexts=(2, 1), width=0)),
} | {
    f"max_context_len = {columns}": lambda columns=columns: logits(
        LogitsProblem(contexts=(7, 300), pages=80, width=75, max_context_len=columns)
    )
    for columns in (0, 1, 255, 256, 257)
}
POOL = {
    "contiguous": lambda: pool(PoolProblem(2, 3, 5)),
    "strided": lambda: pool(PoolProblem(3, 4, 17, score_place="swapped", latent_place="gapped")),
    "expanded": lambda: pool(
        PoolProblem(), score_rows=torch.randn(1, 4, 1).expand(3, 4, 6), latent_rows=torch.randn(4, 6).expand(3, 4, 6)
    ),
    "R = 1": lambda: pool(PoolProblem(2, 1, 9)),
    "N = 0": lambda: pool(PoolProblem(0, 3, 5)),
    "D = 0": lambda: pool(PoolProblem(), score_rows=torch.empty(2, 3, 0), latent_rows=torch.empty(2, 3, 0)),
}
CALLS: dict[str, Callable[[], Call]] = {
    f"{op}: {name}": make
    for op, calls in (("flash_mla_decode", DECODE), ("paged_mqa_logits", LOGITS), ("softmax_pool", POOL))
    for name, make in calls.items()
}
"""Every call by its name. Each use builds fresh tensors."""


def one_of_each() -> list[Call]:
    """The three operators with every argument they have."""
    return [DECODE["every argument"](), LOGITS["fp4 query, fp8 keys, packed scales"](), POOL["contiguous"]()]
