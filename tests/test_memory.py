"""A call's peak memory beyond its arguments and its result, read from the kernel's high-water mark of the process."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from subprocesses import run_script

import deepinfer_ops
from deepinfer_ops import reference

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")

PER_THREAD = 8 << 20
"""Bytes that any call may use, whatever its rows, top-k and context."""

PAGE = 64

MODULES = {"operator": deepinfer_ops, "composition": reference}


def decode(rows: int, heads: int, topk: int, extra: int = 0) -> tuple[object, ...]:
    """fp8 keys, and ``extra`` fp4 ones; caches stay small, so that slots repeat."""
    q = torch.randn(rows, 1, heads, 512, dtype=torch.bfloat16)
    main = torch.randint(128, (16, PAGE, 1, 528), dtype=torch.uint8)
    second = torch.randint(128, (16, PAGE, 1, 288), dtype=torch.uint8)
    slots = [torch.randint(16 * PAGE, (rows, 1, n), dtype=torch.int32) for n in (topk, extra)]
    return (q, main, slots[0], None, torch.zeros(heads), *((second, slots[1]) if extra else ()))


def logits(tokens: int, heads: int, positions: int, token_bytes: int) -> tuple[object, ...]:
    cache = torch.randint(128, (32, PAGE, 1, token_bytes), dtype=torch.uint8)
    q = torch.randint(120, (tokens, 1, heads, token_bytes - 4), dtype=torch.uint8)
    q_data = q.view(torch.float8_e4m3fn) if token_bytes == 132 else q
    q_sf = torch.full((tokens, 1, heads, 4), 120, dtype=torch.uint8)
    table = torch.randint(32, (tokens, -(-positions // PAGE)), dtype=torch.int32)
    contexts = torch.full((tokens, 1), positions, dtype=torch.int32)
    return q_data, q_sf, cache, torch.randn(tokens, heads), contexts, table, positions


def pool(n: int, r: int, d: int) -> tuple[object, ...]:
    return torch.randn(n, r, d), torch.randn(n, r, d)


CALLS: dict[str, tuple[str, Callable[[], tuple[object, ...]]]] = {
    "decode of 4096 rows": ("flash_mla_decode", lambda: decode(4096, 8, 16)),
    "decode of 131072 keys": ("flash_mla_decode", lambda: decode(1, 16, 131072)),
    "decode of 512 heads": ("flash_mla_decode", lambda: decode(2, 512, 1024)),
    "decode of two scopes, 64 rows": ("flash_mla_decode", lambda: decode(64, 64, 128, 512)),
    "fp8 logits of 1M positions": ("paged_mqa_logits", lambda: logits(1, 8, 1 << 20, 132)),
    "fp4 logits of 1M positions": ("paged_mqa_logits", lambda: logits(1, 64, 1 << 20, 68)),
    "logits of 16384 tokens": ("paged_mqa_logits", lambda: logits(16384, 4, 512, 132)),
    "pool of 65536 rows": ("softmax_pool", lambda: pool(65536, 2, 64)),
    "pool of 16384 summands": ("softmax_pool", lambda: pool(2, 16384, 512)),
}


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def peak_beyond_result(call: Callable[[], torch.Tensor]) -> int:
    """Bytes by which the process grew during the call, at its largest, less the result's."""
    ctypes.CDLL(None).malloc_trim(0)  # a call must not hide in pages that others have freed
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from here
    before = status("VmRSS")
    result = call()
    return status("VmHWM") - before - result.untyped_storage().nbytes()


def measure(module: str, name: str, threads: int) -> int:
    """The first call of a process, so that memory kept for later calls counts too; only torch's threads are running."""
    torch.set_num_threads(threads)
    torch.randn(1 << 20).exp_()
    operator, arguments = CALLS[name]
    arguments = arguments()
    return peak_beyond_result(lambda: getattr(MODULES[module], operator)(*arguments))


def in_a_fresh_process(module: str, name: str, threads: int) -> int:
    script = "import sys, test_memory as t; print(t.measure(*sys.argv[1:3], int(sys.argv[3])))"
    return int(run_script(script, module, name, threads))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_uses_less_than_8_mib_per_thread(name: str):
    assert in_a_fresh_process("operator", name, 2) < 2 * PER_THREAD


def test_one_thread_uses_less_than_8_mib():
    assert in_a_fresh_process("operator", "decode of two scopes, 64 rows", 1) < PER_THREAD


def test_the_meter_sees_a_temporary_that_is_gone_when_the_call_returns():
    """The composition decodes every row's keys at once: 64 x 640 x 512 floats, 80 MiB, at the least."""
    assert in_a_fresh_process("composition", "decode of two scopes, 64 rows", 2) > 80 << 20
