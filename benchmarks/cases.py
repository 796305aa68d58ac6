"""What is measured: the cases of the speed goals, the sweeps, and the calls too small for anything but overhead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .problems import Problem, decode, logits, pool


@dataclass(frozen=True)
class Case:
    """One line of the table. ``goals``: the ratio each candidate is to reach (its time over the operator's)."""

    name: str
    build: Callable[[], Problem]
    goals: dict[str, float] = field(default_factory=dict)


_DECODE = {"eager": 4.0, "inductor": 3.0, "roof": 1.0}
_SHARD = {"eager": 4.0, "inductor": 2.0, "roof": 0.7}

CASES = (
    Case("decode, 64 heads, 128 + 512 fp8 keys, 1 row", lambda: decode(64, 1, 128, 512), _DECODE),
    Case("decode, 64 heads, 128 + 512 fp8 keys, 8 rows", lambda: decode(64, 8, 128, 512), _DECODE),
    Case("decode, 128 heads, 128 fp8 + 1024 fp4 keys, 4 rows", lambda: decode(128, 4, 128, 1024, "fp4"), _DECODE),
    Case("decode, 16 heads, 128 + 512 fp8 keys, 1 row", lambda: decode(16, 1, 128, 512), _SHARD),
    Case("decode, 16 heads, 128 + 512 fp8 keys, 8 rows", lambda: decode(16, 8, 128, 512), _SHARD),
    Case(
        "logits fp8, 64 heads, 16K positions",
        lambda: logits("fp8", 64, 16384),
        {"eager": 4.0, "inductor": 3.0, "roof": 1.0},
    ),
    Case(
        "logits fp4, 64 heads, 16K positions",
        lambda: logits("fp4", 64, 16384),
        {"eager": 8.0, "inductor": 6.0, "roof": 2.0},
    ),
    Case("pool, 512 x 8 x 512", lambda: pool(512, 8, 512), {"eager": 5.0, "inductor": 2.0, "roof": 0.8}),
)

TINY = {
    "pool, 1 x 8 x 128": lambda: pool(1, 8, 128),
    "decode, 1 row, 8 times -1, 1 head": lambda: decode(1, 1, 8, dead=True),
    "decode, 1 row, 8 keys, 1 head": lambda: decode(1, 1, 8),
    "decode, 1 row, 8 keys, 16 heads": lambda: decode(16, 1, 8),
    "decode, 1 row, 8 keys, 64 heads": lambda: decode(64, 1, 8),
}
OVERHEAD_GOAL = 10e-6  # seconds beyond an empty operator


@dataclass(frozen=True)
class Sweep:
    """One operator along one size."""

    name: str
    axis: str
    values: tuple[int, ...]
    build: Callable[[int], Problem]


SWEEPS = (
    Sweep("decode, 64 heads, 1 row", "keys", (64, 128, 256, 512, 1024, 2048, 4096), lambda n: decode(64, 1, n)),
    Sweep("decode, 64 heads, 640 keys", "rows", (1, 2, 4, 8, 16, 32), lambda n: decode(64, n, 128, 512)),
    Sweep("decode, 1 row, 640 keys", "heads", (1, 4, 8, 16, 32, 64, 128), lambda n: decode(n, 1, 128, 512)),
    Sweep("logits fp8, 64 heads", "positions", (512, 2048, 8192, 32768, 65536), lambda n: logits("fp8", 64, n)),
    Sweep("logits fp4, 64 heads", "positions", (512, 2048, 8192, 32768, 65536), lambda n: logits("fp4", 64, n)),
    Sweep("logits fp8, 16K positions", "heads", (8, 16, 32, 64, 128), lambda n: logits("fp8", n, 16384)),
    Sweep("logits fp8, 64 heads, 4K positions", "tokens", (1, 2, 4, 8, 16), lambda n: logits("fp8", 64, 4096, n)),
    Sweep("pool, N x 8 x 512", "N", (1, 8, 64, 512, 4096), lambda n: pool(n, 8, 512)),
)

THREADED = (CASES[1], CASES[5], CASES[6], CASES[7])
"""Cases measured on 1, 2, 4, ... threads."""
